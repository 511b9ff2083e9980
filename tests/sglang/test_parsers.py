"""Our parsers and SGLang's own, on the same turns: one process of SGLang's reads them all."""

from __future__ import annotations

import json
import random
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncrl.conversation.parsers import Parsed, parse_turn, parsers
from tests.fakes.sglang_process import PYTHON
from tests.unit.conversation.call_writers import WRITERS

CORPORA = Path(__file__).parents[1] / "fixtures/parsers"
KNOWN: dict[str, dict[str, list[str]]] = yaml.safe_load(
    Path(__file__).with_name("disagreements.yaml").read_text()
)
SECONDS = 120.0  # of one process: it imports SGLang, which takes 7 s alone
EACH = 30  # generated turns of each format

# By format: SGLang's detector of calls, and of reasoning.
DETECTORS = {
    "cohere": ("cohere_command4", "cohere_command4"),
    "deepseek": ("deepseekv3", "deepseek-v3"),
    "deepseek_v32": ("deepseekv32", "deepseek-v3"),
    "gemma4": ("gemma4", "gemma4"),
    "glm": ("glm45", "glm45"),
    "harmony": ("gpt-oss", "gpt-oss"),
    "hermes": ("hermes", "qwen3"),
    "kimi": ("kimi_k2", "kimi_k2"),
    "kimi_k3": ("kimi_k3", "kimi_k3"),
    "llama3": ("llama3", "qwen3"),
    "minimax": ("minimax-m2", "qwen3"),
    "mistral": ("mistral", "mistral"),
    "pythonic": ("pythonic", "qwen3"),
    "qwen3_coder": ("qwen3_coder", "qwen3"),
    "seed_oss": ("qwen3_coder", "qwen3"),  # it has none, but for these tags
}
THINKING = ("cohere", "kimi_k3")  # SGLang takes a turn for a thought at first, unless it is told otherwise
TEXTS = ["", "Ulm", "Köln ☂", "東京", "القاهرة", "किताब", "😀", 'a "b" c', "it's", "x\\n", "a\nb\n\nc", "{1}"]
TEXTS += [" [a, b] ", "2024", "true", "1.10", '{"a": 1}', "<b>&amp;</b>", "C:\\dir", "call(a=1)"]
SCALARS = [0, -7, 2024, 1.5, -2.5e-05, True, False]
# Values that SGLang reads as others, or drops the call for.
CHANGED = {("glm", "1.10"), ("glm", "true"), ("pythonic", -7), ("pythonic", -2.5e-05)}
CHANGED |= {("deepseek_v32", " [a, b] ")}
KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


@dataclass(frozen=True)
class SharedTurn:
    """A turn that both read. `opened`: the prompt has opened the thought."""

    format: str
    case: str
    text: str
    tools: tuple[str, ...]
    opened: bool = False

    @property
    def job(self) -> list[Any]:
        """For SGLang: see detectors.py. Formats of which it has several detectors are told apart as by the
        model's name."""
        detector, reasoner = DETECTORS[self.format]
        if self.format == "deepseek" and "function<｜tool▁sep｜>" not in self.text:
            detector = "deepseekv31"
        if self.format == "glm" and re.search(r"<tool_call>[^\n<]*<", self.text):
            detector = "glm47"
        if self.format == "pythonic" and "<|tool_call_start|>" in self.text:
            detector = "lfm2"
        if "<｜DSML｜tool_calls>" in self.text:
            detector = "deepseekv4"
        start = "<|start|>assistant" if self.format == "harmony" else ""  # the prompt's last words
        return [
            detector,
            reasoner,
            self.opened or (False if self.format in THINKING else None),
            [json.loads(tool) for tool in self.tools],
            start + self.text.replace("seed:", ""),
        ]

    def read(self) -> Parsed:
        prompt = "<think>\n" if self.opened else ""
        return parse_turn(parsers.get(self.format), self.text, self.tools, prompt)


def schema(name: str, **arguments: Any) -> str:
    kinds = {key: {"type": KINDS[type(value)]} for key, value in arguments.items()}
    parameters = {"type": "object", "properties": kinds}
    return json.dumps({"type": "function", "function": {"name": name, "parameters": parameters}})


def corpus() -> list[SharedTurn]:
    cases = (
        (name, case)
        for name in DETECTORS
        for case in yaml.load((CORPORA / f"{name}.yaml").read_text(), yaml.CSafeLoader)
    )
    return [SharedTurn(name, case["case"], case["text"], (schema("f"),)) for name, case in cases]


def generated(name: str) -> Iterator[SharedTurn]:
    """Turns as templates write them: words, then calls."""
    dice = random.Random(name)
    texts = [text for text in TEXTS if (name, text) not in CHANGED]
    scalars = [number for number in SCALARS if (name, number) not in CHANGED]

    def value(depth: int = 0) -> Any:
        kind = dice.randrange(4 if depth < 3 else 2)
        if kind == 2:
            return [value(depth + 1) for _ in range(dice.randrange(3))]
        if kind == 3:
            return {dice.choice("xyzä"): value(depth + 1) for _ in range(dice.randrange(3))}
        return dice.choice(texts if kind else scalars)

    for number in range(EACH):
        calls = [
            (tool, {key: value() for key in dice.sample("abcd", dice.randrange(4))})
            for tool in dice.sample(["f", "g", "look_up"], dice.randrange(1, 4))
        ]
        words = dice.choice(["", "I look.", "Köln?\n\nIch sehe nach:", "好的"]) if name not in BARE else ""
        yield SharedTurn(
            name,
            f"{number}",
            words + WRITERS[name](calls).replace("[TOOL_CALLS][", "[TOOL_CALLS] ["),
            tuple(schema(tool, **arguments) for tool, arguments in calls),
        )


AFTER = "\n\nThat is all."
CARELESS = ("cohere", "deepseek_v32", "hermes", "minimax", "qwen3_coder", "seed_oss")  # in turns that are cut
BARE = (
    "cohere",
    "llama3",
    "pythonic",
    "harmony",
)  # a turn that calls says nothing else, or in a message of its own

THOUGHTS = {
    "closed": "I call.</think>It rains.",
    "opened twice": "<think>\nI call.\n</think>\n\nIt rains.",
    "cut": "It may rain, or",
    "closed twice": "I call.</think>It </think> rains.",
}


def thoughts() -> list[SharedTurn]:
    names = ("hermes", "qwen3_coder", "glm", "kimi", "deepseek")
    return [
        SharedTurn(name, case, text, (schema("f"),), True)
        for name in names
        for case, text in THOUGHTS.items()
    ]


def cut(turn: SharedTurn) -> Iterator[SharedTurn]:
    """The turn, ended somewhere."""
    dice = random.Random(turn.text)
    for end in dice.sample(range(len(turn.text)), 3):
        yield replace(turn, case=f"{turn.case}, cut at {end}", text=turn.text[:end])


GENERATED = [turn for name in DETECTORS for turn in generated(name)]
CUT = [(turn, part) for turn in GENERATED for part in cut(turn)]
MORE = [(turn, replace(turn, text=f"{turn.text}{AFTER}")) for turn in GENERATED if turn.format not in BARE]
TURNS = [*corpus(), *GENERATED, *thoughts(), *(turn for _, turn in (*CUT, *MORE))]
Answer = tuple[str, list[tuple[str, Any]], str]


@pytest.fixture(scope="module")
def theirs(sglang_installed: None) -> dict[SharedTurn, Answer]:
    """SGLang's reasoning, calls and content of every turn."""
    script = Path(__file__).with_name("detectors.py")
    jobs = json.dumps([turn.job for turn in TURNS])
    done = subprocess.run([PYTHON, script], input=jobs, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-2000:]
    answers = json.loads(done.stdout.splitlines()[-1])
    return {
        turn: (thought.strip(), [(name, json.loads(arguments)) for name, arguments in calls], content.strip())
        for turn, (thought, calls, content) in zip(TURNS, answers, strict=True)
    }


def ours(turn: SharedTurn) -> Answer:
    read = turn.read()
    return read.reasoning, [(call.name, json.loads(call.arguments)) for call in read.calls], read.content


@pytest.mark.parametrize("name", DETECTORS)
def test_generated_turns_are_read_alike(name: str, theirs: dict[SharedTurn, Answer]) -> None:
    for turn in GENERATED:
        if turn.format == name:
            assert ours(turn) == theirs[turn], turn


def test_words_after_calls_are_content(theirs: dict[SharedTurn, Answer]) -> None:
    """Most of SGLang's detectors drop them."""
    for turn, more in MORE:
        thought, calls, before = ours(turn)
        assert ours(more)[:2] == theirs[more][:2] == (thought, calls), more
        assert ours(more)[2].split() == [*before.split(), *AFTER.split()], more
        assert theirs[more][2].split() in (before.split(), [*before.split(), *AFTER.split()]), more


@pytest.mark.parametrize("name", DETECTORS)
def test_of_a_turn_that_is_cut_its_whole_calls_are_carried_out(
    name: str, theirs: dict[SharedTurn, Answer]
) -> None:
    """SGLang's for gpt-oss loses one without its last token. Others lose whole ones, or carry out one that is
    not closed."""
    for turn, part in CUT:
        if turn.format == name:
            our_calls = ours(part)[1]
            their_calls = theirs[part][1]
            assert our_calls == ours(turn)[1][: len(our_calls)], part
            last = name == "harmony" and their_calls == our_calls[:-1]
            assert name in CARELESS or last or their_calls == our_calls, part


def test_thoughts_that_the_prompt_opened_are_read_alike(theirs: dict[SharedTurn, Answer]) -> None:
    for turn in thoughts():
        assert ours(turn) == theirs[turn], turn


def test_every_other_disagreement_has_a_reason(theirs: dict[SharedTurn, Answer]) -> None:
    """Of the odd and broken turns of the corpora: which calls are carried out, and what is a thought."""
    explained = {
        (name, case)
        for cases in KNOWN.values()
        for name, listed_cases in cases.items()
        for case in listed_cases
    }
    differ = {(turn.format, turn.case) for turn in corpus() if ours(turn)[:2] != theirs[turn][:2]}
    assert sorted(differ - explained) == [] == sorted(explained - differ)
