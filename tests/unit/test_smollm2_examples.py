"""The pretrained model's examples: their worked calls and demonstrations are right, and nothing held out is
trained on."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path

import pytest
from msgspec.structs import replace

from asyncrl.config import DataConfig, composition
from asyncrl.conversation.parsers import hermes
from asyncrl.data import RowLayout, load_samples
from asyncrl.data.samples import read_samples
from asyncrl.rewards import final_number
from asyncrl.tools import call_tool, load_tool
from asyncrl.types import Sample, ToolCall

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/multiturn/smollm2"
DATA = EXAMPLE / "data"
SFT = EXAMPLE.parent / "smollm2_sft/data"


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


# -- the warm start


def demonstrations() -> list[Sample]:
    path = str(SFT / "demonstrations.jsonl")
    return list(read_samples(DataConfig(path), path, "train", RowLayout(demonstrations=True)))


def question(sample: Sample) -> str:
    return next(message.content for message in sample.prompt if message.role == "user")


def test_demonstrations_call_the_tool_and_state_its_reply() -> None:
    calculator = load_tool("expression_calculator")
    shown = demonstrations()
    assert len(shown) == 256
    for sample in shown:
        _, asked, turn, reply, answer = sample.prompt
        (call,) = hermes(turn.content, (calculator.schema_text,)).calls
        assert asyncio.run(call_tool(calculator, call)).content == reply.content
        assert call.arguments == f'{{"expression": "{asked.content[8:-1]}"}}'
        assert answer.content == f"<answer>{reply.content}</answer>"


@pytest.mark.parametrize(("split", "count"), [("train", 1024), ("test", 256)])
def test_questions_are_not_those_of_the_demonstrations(split: str, count: int) -> None:
    samples = load_samples(SFT / f"{split}.parquet")
    shown = demonstrations()
    other = load_samples(SFT / f"{'test' if split == 'train' else 'train'}.parquet")
    assert len({*map(question, samples)}) == count
    assert not {*map(question, samples)} & {*map(question, (*shown, *other))}
    assert {sample.prompt[0] for sample in samples} == {sample.prompt[0] for sample in shown}


def test_both_runs_are_of_one_task() -> None:
    """What the warm start sees is what reinforcement learning goes on with, from its last checkpoint."""
    first, then = (composition.compose([f"experiment={name}"]) for name in ("smollm2_sft", "smollm2_answer"))
    assert replace(first.rollout, retries=then.rollout.retries) == then.rollout
    assert first.data.test == then.data.test and first.algorithm.loss == "sft"
    assert then.model.path.endswith(f"runs/smollm2_sft/checkpoints/step-{first.total_steps}/hf")
