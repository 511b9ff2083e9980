"""The calculator task as tokens: chat template, tokenizer, demonstrations. Used by build_demo_model.py."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator

import torch
from prepare_chain_math import Chain, make_chain
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from asyncrl.conversation.chat import Chat
from asyncrl.tools import load_tool
from asyncrl.types import Message, ToolCall

TEMPLATE = """\
{%- if tools %}<|im_start|>system
You may call tools:
<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools>
<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|im_start|>tool
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}{{ '\\n' }}{% endif -%}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TAGS = ["<tool_call>", "</tool_call>"]
CALCULATOR = load_tool("calculator")
TOOLS = (json.dumps(CALCULATOR.schema),)
NO_CALL = ToolCall(CALCULATOR.name, "{}")
IGNORE = -100  # the label of tokens that the model did not write

GUESS = {"plus": 0.25, "minus": 0.25, "times": 0.65}
"""Probability that a demonstration guesses instead of calling the tool for this operation. Above one half
greedy decoding guesses too; on average about 0.4."""


def demonstration(
    chain: Chain, rng: random.Random, guess: dict[str, float], given: int = 0
) -> list[str | int]:
    """The model's turns in order, and between them the calculator's results (int). The first `given` calls
    are made; from there on each is replaced by a guess with probability guess[operation]."""
    parts: list[str | int] = []
    value = chain.start
    for at, ((op, b), result) in enumerate(zip(chain.operations, chain.values, strict=True)):
        if at >= given and rng.random() < guess.get(op, 0.0):
            return [*parts, f"I guess {rng.randrange(10 ** rng.randint(1, 4))}."]
        call = {"name": CALCULATOR.name, "arguments": {"a": value, "op": op, "b": b}}
        parts += [f"<tool_call>\n{json.dumps(call)}\n</tool_call>", result]
        value = result
    return [*parts, f"The answer is {value}."]


def corpus(count: int = 2000) -> Iterator[str]:
    """Text for the tokenizer, cut where ids are cut too: at special tokens and where the model starts."""
    rng = random.Random(0)
    render = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE())).apply_chat_template
    for _ in range(count):
        chain = make_chain(rng, rng.randint(1, 6))
        messages = [{"role": "user", "content": chain.question}]
        for part in demonstration(chain, rng, dict.fromkeys(GUESS, 0.3)):
            messages.append({"role": "tool" if isinstance(part, int) else "assistant", "content": str(part)})
        text = render(messages, tools=[CALCULATOR.schema], chat_template=TEMPLATE, tokenize=False)
        yield from re.split("|".join(map(re.escape, SPECIAL + TAGS)) + r"|(?<=assistant\n)", text)


def build_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE with single digits and no splitting at spaces: constant phrases become single ids."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        corpus(),
        trainers.BpeTrainer(
            vocab_size=vocabulary, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        ),
    )
    core.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=2048
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


class Encoder:
    """Demonstrations to ids and labels, in exactly the pieces that an episode has."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.chat = Chat(tokenizer)

    def prompt(self, chain: Chain) -> list[int]:
        return list(self.chat.prompt_ids((Message("user", chain.question),), TOOLS))

    def reply(self, content: str, call: ToolCall = NO_CALL) -> list[int]:
        said = Message("tool", content, tool_call_id=call.id, name=call.name)
        delta = self.chat.delta_ids((said,), self.chat.stop_ids[0])
        assert delta is not None, "the demo's template only appends"
        return list(delta)

    def encode(self, chain: Chain, parts: list[str | int], given: int = 0) -> tuple[list[int], list[int]]:
        """Ids, and labels: the ids of the model's tokens, IGNORE elsewhere and in the first `given` turns."""
        ids = self.prompt(chain)
        labels = [IGNORE] * len(ids)
        for at, part in enumerate(parts):
            if isinstance(part, int):
                piece = self.reply(str(part))
                labels += [IGNORE] * len(piece)
            else:
                piece = [*self.tokenizer.encode(part, add_special_tokens=False), self.chat.stop_ids[0]]
                labels += piece if at >= 2 * given else [IGNORE] * len(piece)
            ids += piece
        return ids, labels

    def example(
        self, chain: Chain, rng: random.Random, guess: dict[str, float]
    ) -> tuple[list[int], list[int]]:
        """A demonstration. With guesses, the calls up to a random turn are given and not learned from: else
        late turns, which few demonstrations would reach, would be forgotten."""
        given = rng.randint(0, len(chain.values)) if guess else 0
        return self.encode(chain, demonstration(chain, rng, guess, given), given)

    def batches(
        self, rng: random.Random, lengths: list[int], guess: dict[str, float], size: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Endless (ids, labels), right-padded, of fresh chains; rows of a batch have similar lengths."""
        while True:
            chains = [make_chain(rng, rng.choice(lengths)) for _ in range(4 * size)]
            rows = sorted((self.example(chain, rng, guess) for chain in chains), key=_length)
            cuts = [rows[start : start + size] for start in range(0, len(rows), size)]
            rng.shuffle(cuts)
            for cut in cuts:
                yield _pad([ids for ids, _ in cut], 0), _pad([labels for _, labels in cut], IGNORE)


def _length(row: tuple[list[int], list[int]]) -> int:
    return len(row[0])


def _pad(rows: list[list[int]], value: int) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [value] * (width - len(row)) for row in rows])
