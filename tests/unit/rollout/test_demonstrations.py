"""Supervised episodes on a worker: their records, what is left out, and what is refused before the start."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import PIL.Image
import pytest
import torch

from asyncrl.engines.base import Request, Sampling
from asyncrl.episodes.parts import check_demonstrations
from asyncrl.errors import ConfigError, EngineError
from asyncrl.rollout.demonstrations import (
    DemonstrationPlayer,
    NoEngine,
    assistant_logprobs,
)
from asyncrl.rollout.episode_run import EpisodeRun
from asyncrl.tools import Toolbox, load_tools
from asyncrl.types import (
    IMAGE_MARK,
    FailReason,
    Generation,
    Message,
    PolicyVersion,
    Sample,
    StopReason,
    Turn,
)
from asyncrl.vision.files import prepare_decoded
from asyncrl.weights import disk
from asyncrl.wire.messages.worker import Finished, Generated
from tests.fakes.chat import IMAGE_LAYOUT, FakeChat
from tests.fakes.episodes import TurnBench
from tests.fakes.weights import publish
from tests.unit.rollout.test_check_chat import parts_of, saved

USER = Message("user", "q")
WELL = Message("assistant", "well")
TALK = (USER, WELL, Message("user", "more"), Message("assistant", "done"))


class Shown(TurnBench):
    """Plays a conversation of the data; whatever would be sampled is an error."""

    def __init__(self, talk: tuple[Message, ...] = TALK, **limits: Any) -> None:
        super().__init__([], **limits)
        self.sample = talked(*talk)

    def player(self, run: EpisodeRun) -> DemonstrationPlayer:
        return DemonstrationPlayer(run, Toolbox({}))


def talked(*messages: Message, row: int = 0, **more: Any) -> Sample:
    return Sample(row, "said", messages, "null", given=0, **more)


def test_a_conversation_is_posted_turn_by_turn_and_earns_nothing() -> None:
    bench = Shown()
    end = bench.finished()
    assert [type(record) for record in bench.sent] == [Generated, Generated, Finished]
    assert (end.result.reward, end.result.tokens, end.stats.turns) == (0.0, len("well") + len("done") + 2, 2)
    turn = msgspec.msgpack.decode(bench.frames[1][0], type=Turn)
    assert "".join(map(chr, turn.generation.ids[:-1])) == "done" and not bench.engine.requests


def test_it_goes_on_after_the_recorded_turns() -> None:
    uninterrupted = Shown()
    uninterrupted.play()
    resumed = Shown()
    resumed.finished(uninterrupted.record[:2])
    assert [type(record) for record in resumed.sent] == [Generated, Finished]
    assert resumed.frames[0] == uninterrupted.frames[1]
    other_failure = Shown((USER, Message("assistant", "other"))).failed(uninterrupted.record[:2])
    assert other_failure.reason is FailReason.NOT_REPEATED


def test_one_that_is_held_out_is_scored() -> None:
    """Its k-th token has the log-prob -k here."""
    bench = Shown()
    bench.engine.score = lambda ids: asyncio.sleep(0, tuple(-float(k) for k in range(1, len(ids))))  # type: ignore[method-assign]
    end = bench.play(lane="eval")
    turns = [msgspec.msgpack.decode(frames[0], type=Turn) for frames in bench.frames[:2]]
    first = len(turns[0].context) + len(turns[0].generation.ids)
    second = first + len(turns[1].context)
    positions = [*range(len(turns[0].context), first), *range(second, second + len(turns[1].generation.ids))]
    assert isinstance(end, Finished) and end.result.tokens == len(positions)
    assert end.result.components["nll"] == pytest.approx(sum(positions) / len(positions))
    bench = Shown()
    bench.engine.score = lambda ids: asyncio.sleep(0, tuple(math.nan for _ in ids[1:]))  # type: ignore[method-assign]
    assert bench.failed(lane="eval").reason is FailReason.ENGINE_ERROR


def test_one_with_an_image_that_is_held_out_is_scored_with_the_file() -> None:
    image = prepare_decoded(PIL.Image.new("RGB", (32, 32), "blue"), IMAGE_LAYOUT)
    question = Message("user", f"see {IMAGE_MARK}", images=(image.ref,))
    bench = Shown((question, WELL), chat=FakeChat(image_layout=IMAGE_LAYOUT))
    bench.context.images.keep_file(image.ref.digest, image.file)
    scored_images = list[Mapping[str, bytes]]()

    async def score(ids: tuple[int, ...], images: Mapping[str, bytes]) -> tuple[float, ...]:
        scored_images.append(images)
        return (-0.5,) * (len(ids) - 1)

    bench.engine.score = score  # type: ignore[method-assign]
    end = bench.finished(lane="eval")
    assert end.result.components["nll"] == pytest.approx(0.5)
    assert scored_images == [{image.ref.digest: image.file}]


def test_log_probs_of_turns_in_several_rows() -> None:
    def turn(row: int, context: int, ids: int) -> Turn:
        return Turn(0, (0,) * context, Generation((0,) * ids, (), (), StopReason.STOP), row=row)

    turns = [turn(0, 2, 3), turn(1, 4, 1), turn(0, 1, 2)]  # as rows come side by side, too
    rows = [[1, 2, 3, 4, 5, 6, 7], [11, 12, 13, 14]]  # of the tokens 1.. of each
    assert assistant_logprobs(turns, rows) == [2, 3, 4, 14, 6, 7]


def test_one_that_is_too_long_is_left_out() -> None:
    bench = Shown((USER, Message("assistant", "x" * 100)), max_tokens=50, max_new_tokens=50)
    end = bench.failed()
    assert end.reason is FailReason.PROMPT_TOO_LONG
    assert len(bench.sent) == 1 and "rollout.max_tokens is 50" in end.detail


def test_the_prompt_shows_the_tools_of_the_conversation_or_of_the_run() -> None:
    box = Toolbox(load_tools(["calculator"]))
    (own_schema,) = box.schemas(talked(*TALK, extra_info_json='{"tool_schemas": [{"type": "function"}]}'))
    (runs,) = box.schemas(talked(*TALK))
    assert own_schema == '{"type": "function"}' and '"calculator"' in runs
    assert box.schemas(talked(*TALK, extra_info_json='{"tools": []}')) == ()


async def test_no_engine_confirms_versions_and_samples_nothing(tmp_path: Path) -> None:
    ref = publish({"w": torch.zeros(2)}, tmp_path, PolicyVersion(1, 3))
    engine = NoEngine()
    manifest = await engine.load(ref)
    assert engine.version == 3 and await engine.score((1, 2)) == ()
    assert manifest.checksum == disk.read_manifest(ref).checksum
    with pytest.raises(EngineError, match="only during validation"):
        await engine.generate(Request("s", (1,), Sampling(1, ())))


def test_conversations_are_written_before_the_start(tmp_path: Path) -> None:
    parts = parts_of(saved("qwen2.5", tmp_path))
    good = talked(*TALK)
    check_demonstrations(parts, "data.test", [good, Sample(0, "asked", TALK, "null"), good])
    with pytest.raises(ConfigError, match=r"data\.test, sample 2: message 2: an assistant message must"):
        check_demonstrations(parts, "data.test", [good, good, talked(USER, WELL, WELL, row=2)])


def test_only_some_of_many_are_looked_at(tmp_path: Path) -> None:
    """Spread over the data: the first and one near the end are among them."""
    parts = parts_of(saved("qwen2.5", tmp_path))
    seen = list[int]()

    class Watched(list[Sample]):
        def __getitem__(self, at: Any) -> Any:
            item = super().__getitem__(at)
            seen.extend(sample.row for sample in item)
            return item

    check_demonstrations(parts, "data.train", Watched(talked(*TALK, row=row) for row in range(5000)))
    assert len(seen) <= 256 and seen[0] == 0 and seen[-1] > 4900
