"""A task for build_demo_model.py, and its demonstrations as tokens: chat template, tokenizer, ids."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from asyncrl.conversation.chat import Chat
from asyncrl.tools import Tool
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
TAGS = ("<tool_call>", "</tool_call>")
IGNORE = -100  # the label of tokens that the model did not write

Q = TypeVar("Q")  # a question of the task


class Episode(Protocol):
    """A try at a question, by the rules of the task."""

    def reply(self, call: ToolCall) -> str:
        """Answer a call of the model, as the tool does."""

    def score(self, answer: str) -> float:
        """Judge the episode after the model's last turn."""


class DemoTask(Protocol[Q]):
    """A task whose formats a tiny model learns from demonstrations: clean ones, and ones with each
    decision open to a worse replacement. A demonstration has the model's turns at even indices and the
    tool's replies between them. Its first `given_decisions` decisions are right."""

    tool: Tool
    shares: Mapping[int, float]  # shares of samples by level of difficulty; levels count from 1
    units: Sequence[str]  # texts that are always one token

    def make(self, rng: random.Random, level: int) -> Q: ...
    def question(self, problem: Q) -> str: ...
    def decisions(self, problem: Q) -> int: ...
    def demonstration(
        self, problem: Q, rng: random.Random, tempted: bool, given_decisions: int = 0
    ) -> list[str]: ...
    def for_tokenizer(self, rng: random.Random) -> tuple[Q, list[str]]: ...
    def begin(self, problem: Q) -> Episode: ...


def corpus(task: DemoTask[Q], count: int = 2000) -> Iterator[str]:
    """Yield text for the tokenizer, cut at the same positions as ids: at special tokens, at the task's
    units, and at the start of the model's text."""
    rng = random.Random(0)

    render = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE())).apply_chat_template
    cuts = "|".join(map(re.escape, (*SPECIAL, *TAGS, *task.units))) + r"|(?<=assistant\n)"
    for _ in range(count):
        problem, parts = task.for_tokenizer(rng)
        messages = [{"role": "user", "content": task.question(problem)}]
        for at, part in enumerate(parts):
            messages.append({"role": "tool" if at % 2 else "assistant", "content": part})
        text = render(messages, tools=[task.tool.schema], chat_template=TEMPLATE, tokenize=False)
        yield from re.split(cuts, text)


def build_tokenizer(task: DemoTask[Q], vocabulary: int) -> PreTrainedTokenizerFast:
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
        corpus(task),
        trainers.BpeTrainer(
            vocab_size=vocabulary, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        ),
    )

    core.add_tokens([AddedToken(text, special=False, normalized=False) for text in (*TAGS, *task.units)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=2048
    )
    tokenizer.chat_template = TEMPLATE

    return tokenizer


class Encoder:
    """Encodes demonstrations as ids and labels, in exactly the pieces of an episode."""

    def __init__(self, task: DemoTask[Q], tokenizer: PreTrainedTokenizerFast) -> None:
        self.task = task
        self.tokenizer = tokenizer
        self.chat = Chat(tokenizer)
        self._tools = (task.tool.schema_text,)
        self._no_call = ToolCall(task.tool.name, "{}")

    def prompt(self, problem: Q) -> list[int]:
        return list(self.chat.prompt_ids((Message("user", self.task.question(problem)),), self._tools))

    def reply(self, content: str, call: ToolCall | None = None) -> list[int]:
        call = call or self._no_call
        message = Message("tool", content, tool_call_id=call.id, name=call.name)
        history = (Message("assistant", "", (call,)),)
        delta = self.chat.delta_ids((message,), self.chat.stop_ids[0], history)
        assert delta is not None, "the demo's template only appends"
        return list(delta)

    def encode(self, problem: Q, parts: list[str], given_decisions: int = 0) -> tuple[list[int], list[int]]:
        """Ids, and labels: the ids of the model's tokens, IGNORE elsewhere and in the first `given` turns."""
        ids = self.prompt(problem)
        labels = [IGNORE] * len(ids)
        for at, part in enumerate(parts):
            if at % 2:
                piece = self.reply(part)
                labels += [IGNORE] * len(piece)
            else:
                piece = [*self.tokenizer.encode(part, add_special_tokens=False), self.chat.stop_ids[0]]
                labels += piece if at >= 2 * given_decisions else [IGNORE] * len(piece)
            ids += piece

        return ids, labels

    def example(self, problem: Q, rng: random.Random, tempted: bool) -> tuple[list[int], list[int]]:
        """A demonstration. With temptations, the decisions up to a random turn are given and not learned
        from: else late turns, which few demonstrations would reach, would be forgotten."""
        given_decisions = rng.randint(0, self.task.decisions(problem)) if tempted else 0
        return self.encode(
            problem, self.task.demonstration(problem, rng, tempted, given_decisions), given_decisions
        )

    def batches(
        self, rng: random.Random, levels: list[int], tempted: bool, size: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Endless (ids, labels), right-padded, of fresh questions; rows of a batch have similar lengths."""
        while True:
            problems = [self.task.make(rng, rng.choice(levels)) for _ in range(4 * size)]
            rows = sorted((self.example(problem, rng, tempted) for problem in problems), key=_length)
            cuts = [rows[start : start + size] for start in range(0, len(rows), size)]
            rng.shuffle(cuts)
            for cut in cuts:
                yield _pad([ids for ids, _ in cut], 0), _pad([labels for _, labels in cut], IGNORE)


def _length(row: tuple[list[int], list[int]]) -> int:
    return len(row[0])


def _pad(rows: list[list[int]], value: int) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [value] * (width - len(row)) for row in rows])
