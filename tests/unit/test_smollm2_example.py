"""The pretrained model's examples: their worked calls are right, and nothing held out is trained on."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path

import pytest

from asyncrl.conversation.parsers import hermes
from asyncrl.data import load_samples
from asyncrl.rewards import final_number
from asyncrl.tools import call_tool, load_tool
from asyncrl.types import ToolCall

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/multiturn/smollm2"
DATA = EXAMPLE / "data"


@pytest.mark.parametrize(("split", "count"), [("train", 1024), ("test", 256)])
def test_the_worked_examples_of_a_prompt_are_calls_with_their_replies(split: str, count: int) -> None:
    samples = load_samples(str(DATA / f"{split}.parquet"))
    assert len(samples) == count and len({sample.prompt[:-1] for sample in samples}) == 1
    _, *shown, asked = samples[0].prompt
    calculator = load_tool("expression_calculator")
    for question, turn, reply, answer in zip(*[iter(shown)] * 4, strict=True):
        (call,) = hermes(turn.content, (calculator.schema_text,)).calls
        assert asyncio.run(call_tool(calculator, call)).content == reply.content
        assert question.content[8:-1] == answer.content.partition(" = ")[0]
        assert final_number("", answer.content, reply.content, {})["score"] == 1.0
    assert asked.role == "user"


def test_two_operations_are_two_calls_with_their_replies() -> None:
    sample = load_samples(str(EXAMPLE / "two_operations" / "train.parquet"))[0]
    calculator = load_tool(f"{EXAMPLE / 'one_operation.py'}:calculator")
    calls = 0
    for turn, reply in pairwise(sample.prompt):
        for call in hermes(turn.content, (calculator.schema_text,)).calls:
            assert asyncio.run(call_tool(calculator, call)).content == reply.content
            calls += 1
    assert calls == 3
    both = ToolCall("calculator", '{"expression": "1 + 2 * 3"}')
    assert "one operation" in asyncio.run(call_tool(calculator, both)).content


@pytest.mark.parametrize("folder", ["data", "two_operations"])
def test_held_out_questions_are_not_trained_on(folder: str) -> None:
    train, test = (
        {sample.prompt[-1].content for sample in load_samples(str(EXAMPLE / folder / f"{split}.parquet"))}
        for split in ("train", "test")
    )
    assert len(train) == 1024 and len(test) == 256 and not train & test
