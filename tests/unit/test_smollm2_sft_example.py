"""The warm start's example: its demonstrations are right, and of other questions than those to be learned."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from asyncrl.config import DataConfig, composition
from asyncrl.conversation.parsers import hermes
from asyncrl.data import RowLayout, load_samples
from asyncrl.data.samples import read_samples
from asyncrl.tools import call_tool, load_tool
from asyncrl.types import Sample

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "examples/multiturn/smollm2_sft/data"


def demonstrations() -> list[Sample]:
    path = str(DATA / "demonstrations.jsonl")
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
    samples = load_samples(DATA / f"{split}.parquet")
    shown = demonstrations()
    other = load_samples(DATA / f"{'test' if split == 'train' else 'train'}.parquet")
    assert len({*map(question, samples)}) == count
    assert not {*map(question, samples)} & {*map(question, (*shown, *other))}
    assert {sample.prompt[0] for sample in samples} == {sample.prompt[0] for sample in shown}


def test_both_runs_are_of_one_task() -> None:
    """What the warm start sees is what reinforcement learning goes on with, from its last checkpoint."""
    first, then = (composition.compose([f"experiment={name}"]) for name in ("smollm2_sft", "smollm2_answer"))
    assert replace(first.rollout, retries=then.rollout.retries) == then.rollout
    assert first.data.test == then.data.test and first.algorithm.loss == "sft"
    assert then.model.path.endswith(f"runs/smollm2_sft/checkpoints/step-{first.total_steps}/hf")
