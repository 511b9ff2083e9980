"""Chat templates of real model families, each with a small byte-level tokenizer with the family's control
tokens, and what its models write."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from asyncrl.types import Message, ToolCall

TEMPLATES = Path(__file__).resolve().parents[1] / "fixtures/chat"


@dataclass(frozen=True)
class Family:
    """A family of models.

    `writes` returns the model's tokens, as text, for a message, without the token that ends the turn. `ends`:
    this token, after a turn without calls and after a turn with calls. `appends`: roles after which the
    template leaves earlier turns alone.
    """

    writes: Callable[[Message], str]
    ends: tuple[str, str]
    controls: tuple[str, ...]
    eos: str
    stops: tuple[str, ...]
    appends: tuple[str, ...]
    refuses: tuple[str, ...] = ("critic",)
    words: tuple[str, ...] = ()  # added tokens that are not special: tags
    thinks: bool = False
    bare_calls: bool = False  # a turn that calls says nothing else
    one_call: bool = False


def hermes_call(call: ToolCall) -> str:
    return f'<tool_call>\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n</tool_call>'


def _lines(*parts: str) -> str:
    return "\n".join(filter(None, parts))


def _qwen(message: Message) -> str:
    return _lines(message.content, *map(hermes_call, message.tool_calls))


def _qwen3(message: Message) -> str:
    thought = f"<think>\n{message.reasoning}\n</think>\n\n" if message.reasoning else ""
    return thought + _qwen(message)


def _llama(message: Message) -> str:
    calls = [f'{{"name": "{c.name}", "parameters": {c.arguments}}}' for c in message.tool_calls]
    return calls[0] if calls else message.content


def _glm(message: Message) -> str:
    def call(tool_call: ToolCall) -> str:
        arguments = json.loads(tool_call.arguments).items()
        texts = [(key, value if isinstance(value, str) else json.dumps(value)) for key, value in arguments]
        pairs = [f"\n<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>" for key, text in texts]
        return f"\n<tool_call>{tool_call.name}{''.join(pairs)}\n</tool_call>"

    content = f"\n{message.content}" if message.content else ""
    return f"\n<think>{message.reasoning}</think>{content}" + "".join(map(call, message.tool_calls))


def _deepseek(message: Message) -> str:
    calls = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{c.name}\n```json\n{c.arguments}\n```<｜tool▁call▁end｜>"
        for c in message.tool_calls
    ]
    return message.content + (
        f"<｜tool▁calls▁begin｜>{_lines(*calls)}<｜tool▁calls▁end｜>" if message.tool_calls else ""
    )


def _deepseek_r1(message: Message) -> str:
    """Return the family whose prompt opens the thought."""
    return f"{message.reasoning}\n</think>\n\n{_deepseek(message)}"


def _gpt_oss(message: Message) -> str:
    thought = f"<|channel|>analysis<|message|>{message.reasoning}<|end|>" if message.reasoning else ""
    start = "<|start|>assistant" if thought else ""
    if not message.tool_calls:
        return f"{thought}{start}<|channel|>final<|message|>{message.content}"
    call = message.tool_calls[0]
    return f"{thought}{start} to=functions.{call.name}<|channel|>commentary json<|message|>{call.arguments}"


def _mistral(message: Message) -> str:
    calls = [
        f'{{"name": "{c.name}", "arguments": {c.arguments}, "id": "{c.id}"}}' for c in message.tool_calls
    ]
    return f"[TOOL_CALLS] [{', '.join(calls)}]" if calls else f" {message.content}"


def _strict(message: Message) -> str:
    calls = [f'{{"name": "{c.name}", "arguments": {c.arguments}}}' for c in message.tool_calls]
    return f"[TOOL_CALLS][{','.join(calls)}]" if calls else message.content


def _command(message: Message) -> str:
    calls = [f'{{"tool_name": "{c.name}", "parameters": {c.arguments}}}' for c in message.tool_calls]
    if calls:
        return f"<|START_ACTION|>[{', '.join(calls)}]<|END_ACTION|>"
    return f"<|START_RESPONSE|>{message.content}<|END_RESPONSE|>"


_CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
_DEEPSEEK = (
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
    *(
        f"<｜tool▁{kind}▁{edge}｜>"
        for kind in ("calls", "call", "outputs", "output")
        for edge in ("begin", "end")
    ),
    "<｜tool▁sep｜>",
)
_LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")
_GLM = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>")
_HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|startoftext|>")
_GEMMA = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
_MISTRAL = ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]")
_RESULTS = ("[TOOL_RESULTS]", "[/TOOL_RESULTS]")
_COMMAND = (
    *("<BOS_TOKEN>", "<EOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
    *(f"<|{role}_TOKEN|>" for role in ("SYSTEM", "USER", "CHATBOT")),
    *(f"<|{edge}_{kind}|>" for kind in ("ACTION", "RESPONSE") for edge in ("START", "END")),
)
_BOS = {"<s>", "<BOS_TOKEN>", "<bos>", "<|begin_of_text|>", "<｜begin▁of▁sentence｜>", "<|startoftext|>"}

FAMILIES = {
    "qwen2.5": Family(
        _qwen,
        ("<|im_end|>", "<|im_end|>"),
        _CHATML,
        eos="<|im_end|>",
        stops=("<|im_end|>",),
        appends=("tool", "user", "system"),
        words=_TAGS,
    ),
    "qwen3": Family(
        _qwen3,
        ("<|im_end|>", "<|im_end|>"),
        _CHATML,
        eos="<|im_end|>",
        stops=("<|im_end|>",),
        appends=("tool", "system"),
        words=_TAGS,
        thinks=True,
    ),
    "llama3.1": Family(
        _llama,
        ("<|eot_id|>", "<|eot_id|>"),
        (*_LLAMA, "<|python_tag|>", "<|end_of_text|>"),
        eos="<|eot_id|>",
        stops=("<|eot_id|>", "<|eom_id|>"),
        appends=("tool", "user", "system", "critic"),
        refuses=(),
        bare_calls=True,
        one_call=True,
    ),
    "llama3": Family(  # opens the next turn in any case
        lambda message: message.content,
        ("<|eot_id|>", "<|eot_id|>"),
        (*_LLAMA[:-1], "<|end_of_text|>"),
        eos="<|end_of_text|>",
        stops=("<|eot_id|>", "<|end_of_text|>"),
        appends=("tool", "user", "system", "critic"),
        refuses=(),
    ),
    "phi3.5": Family(  # ends the text wherever no turn is opened
        lambda message: message.content,
        ("<|end|>", "<|end|>"),
        ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        eos="<|endoftext|>",
        stops=("<|end|>", "<|endoftext|>"),
        appends=("tool", "user", "system"),
    ),
    "command-r7b": Family(  # opens the next turn in any case
        _command,
        ("<|END_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
        _COMMAND,
        eos="<EOS_TOKEN>",
        stops=("<|END_OF_TURN_TOKEN|>", "<EOS_TOKEN>"),
        appends=("tool", "user", "system"),
        bare_calls=True,
    ),
    "command-a": Family(  # numbers the replies of the whole conversation
        _command,
        ("<|END_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
        _COMMAND,
        eos="<EOS_TOKEN>",
        stops=("<|END_OF_TURN_TOKEN|>", "<EOS_TOKEN>"),
        appends=("tool", "user", "system"),
        bare_calls=True,
    ),
    "glm4.5": Family(
        _glm,
        ("<|user|>", "<|observation|>"),
        _GLM,
        eos="<|endoftext|>",
        stops=("<|user|>", "<|observation|>", "<|endoftext|>"),
        appends=("tool", "system"),
        words=(*_TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        thinks=True,
    ),
    "deepseek-v3": Family(  # the first release: calls are shown without content only
        _deepseek,
        ("<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
        _DEEPSEEK,
        eos="<｜end▁of▁sentence｜>",
        stops=("<｜end▁of▁sentence｜>",),
        appends=("user",),
        bare_calls=True,
    ),
    "deepseek-v3-0324": Family(
        _deepseek,
        ("<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
        _DEEPSEEK,
        eos="<｜end▁of▁sentence｜>",
        stops=("<｜end▁of▁sentence｜>",),
        appends=("tool", "user"),
    ),
    "deepseek-r1": Family(
        _deepseek_r1,
        ("<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
        _DEEPSEEK,
        eos="<｜end▁of▁sentence｜>",
        stops=("<｜end▁of▁sentence｜>",),
        appends=(),
        words=_TAGS[2:],
    ),
    "gpt-oss": Family(
        _gpt_oss,
        ("<|return|>", "<|call|>"),
        _HARMONY,
        eos="<|return|>",
        stops=("<|return|>", "<|call|>"),
        appends=("tool",),
        refuses=("system", "critic"),
        thinks=True,
        bare_calls=True,
        one_call=True,
    ),
    "gemma3": Family(
        lambda message: message.content,
        ("<end_of_turn>", "<end_of_turn>"),
        _GEMMA,
        eos="<eos>",
        stops=("<end_of_turn>", "<eos>"),
        appends=("tool", "user"),
        refuses=("system", "critic"),
    ),
    "mistral-v3": Family(
        _mistral,
        ("</s>", "</s>"),
        (*_MISTRAL, *_RESULTS),
        eos="</s>",
        stops=("</s>",),
        appends=(),
        refuses=("system", "critic"),
        bare_calls=True,
    ),
    "mistral-strict": Family(  # refuses content beside calls
        _strict,
        ("</s>", "</s>"),
        (*_MISTRAL, *_RESULTS),
        eos="</s>",
        stops=("</s>",),
        appends=("tool",),
        refuses=("system", "critic"),
        bare_calls=True,
    ),
    "mistral-v7": Family(
        _mistral,
        ("</s>", "</s>"),
        (*_MISTRAL, *_RESULTS, "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
        eos="</s>",
        stops=("</s>",),
        appends=("tool",),
        refuses=("system", "critic"),
        bare_calls=True,
    ),
}


@functools.cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """Return a real tokenizer with the family's template, with merges learned from the template's text."""
    family = FAMILIES[name]
    template = (TEMPLATES / f"{name}.jinja").read_text()
    bos = next((token for token in family.controls if token in _BOS), None)
    return learned_tokenizer(template, family.controls, family.words, eos=family.eos, bos=bos)


def learned_tokenizer(
    template: str, controls: Iterable[str], words: Iterable[str], *, eos: str, bos: str | None
) -> PreTrainedTokenizerFast:
    """Return a real tokenizer with the template, with merges learned from the template's text. `controls`:
    its special tokens; `words`: its added tokens that are not special."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator(template.replace("\\n", "\n").split("\n\n") * 2, trainer)
    core.add_special_tokens(list(controls))
    core.add_tokens([AddedToken(word, special=False, normalized=False) for word in words])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=eos, bos_token=bos, chat_template=template
    )
