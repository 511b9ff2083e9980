"""Samples of a version for the test of an engine: what is asked for, when, and what ends the sampling."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from asyncrl.config import parse
from asyncrl.engines.base import Request
from asyncrl.errors import EngineError
from asyncrl.runtime import probe_sampling
from asyncrl.runtime.probe_sampling import (
    PROMPT_COUNT,
    PROMPT_TOKENS,
    REQUESTS_AT_ONCE,
    SAMPLE_COUNT,
    SAMPLE_TOKENS,
    ProbeSampling,
)
from asyncrl.types import Generation, PolicyVersion
from asyncrl.weights.manifest import Probe, WeightsRef
from asyncrl.wire.messages.shared import MAX_SAMPLE_TOKENS, Loaded, ProbeSamples
from tests.fakes.engine import ScriptedEngine, generation
from tests.fakes.loop import settle

PROBE = Probe((tuple(range(40, 60)),), ((-1.0,) * 19,))
TEXT = "x" * SAMPLE_TOKENS


class Fixture:
    """The sampling of a scripted engine, and the reports."""

    def __init__(self, **config: Any) -> None:
        self.engine = ScriptedEngine(lambda request: TEXT)
        self.reports: list[ProbeSamples] = []
        self.sampling = ProbeSampling(
            parse({"name": "t", "model": {"path": "m"}, "data": {"train": "d"}, **config}),
            3,
            self.engine.generate,
            self.engine.release,
        )

    async def report(self, message: ProbeSamples) -> None:
        self.reports.append(message)

    def load(self, step: int, probe: Probe | None = PROBE, error: str = "") -> None:
        self.engine._version = step
        loaded = Loaded(WeightsRef(PolicyVersion(1, step), "v"), "train", "sum", 0.1, error)
        self.sampling.note_load(loaded, probe, self.report)

    async def sample(self) -> list[ProbeSamples]:
        """Wait for the end of the sampling; return and forget the reports."""
        if self.sampling._task is not None:
            await asyncio.wait([self.sampling._task])
        reports = self.reports
        self.reports = []
        return reports

    @property
    def sessions(self) -> list[str]:
        return [request.session for request in self.engine.requests]


async def test_a_version_with_a_probe_is_sampled_once() -> None:
    fixture = Fixture(rollout={"temperature": 0.7})
    fixture.load(4, probe=None)
    assert await fixture.sample() == []
    fixture.load(4, error="damaged")
    assert await fixture.sample() == []

    fixture.load(4)
    reports = await fixture.sample()
    assert {report.version for report in reports} == {PolicyVersion(1, 4)}
    assert [len(report.sequences) for report in reports] == [REQUESTS_AT_ONCE] * 4
    sequences = [sequence for report in reports for sequence in report.sequences]
    prompts = [sequence.ids[:PROMPT_TOKENS] for sequence in sequences]
    assert len({*prompts}) == PROMPT_COUNT and {*sum(prompts, ())} <= {*PROBE.ids}
    assert {len(sequence.ids) - len(sequence.logprobs) for sequence in sequences} == {PROMPT_TOKENS}

    requests = fixture.engine.requests
    assert {(r.sampling.temperature, r.sampling.stop_ids) for r in requests} == {(0.7, ())}
    assert len({request.key for request in requests}) == SAMPLE_COUNT
    assert sorted(fixture.engine.released) == sorted(fixture.sessions)

    fixture.load(4)
    assert await fixture.sample() == [], "the same keys give the same tokens"
    fixture.load(5, Probe(tuple(range(60, 80)), PROBE.logprobs))
    reports = await fixture.sample()
    later_prompts = [sequence.ids[:PROMPT_TOKENS] for report in reports for sequence in report.sequences]
    assert later_prompts == prompts, "a prefix cache that outlives an update is used"
    assert len({request.key for request in requests}) == 2 * SAMPLE_COUNT


@pytest.mark.parametrize("event", ["newer version", "sleep", "close", "deadline"])
async def test_sampling_ends_early_and_releases_its_sessions(
    event: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    if event == "deadline":
        monkeypatch.setattr(probe_sampling, "SAMPLE_SECONDS", 0.0)
    fixture = Fixture()
    fixture.engine.gate.clear()
    fixture.load(4)
    await settle()

    if event == "newer version":
        fixture.load(5, probe=None)
    elif event == "sleep":
        fixture.sampling.stop()
    elif event == "close":
        await fixture.sampling.close()

    assert await fixture.sample() == []
    assert len(fixture.sessions) in (0, REQUESTS_AT_ONCE)
    assert {*fixture.engine.released} >= {*fixture.sessions}
    assert ("v4: sampling for the engine's test did not finish" in caplog.text) is (event == "deadline")


@pytest.mark.parametrize("failing", ["-3", ""])
async def test_failed_requests_cost_only_their_sequences(
    failing: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    fixture = Fixture()

    def script(request: Request) -> str:
        if request.session.endswith(failing):
            raise EngineError("broken")
        return TEXT

    fixture.engine.script = script
    fixture.load(4)
    sequences = [sequence for report in await fixture.sample() for sequence in report.sequences]
    assert len(sequences) == (SAMPLE_COUNT - 1 if failing else 0)
    failed_count = 1 if failing else REQUESTS_AT_ONCE
    assert f"v4: {failed_count} of {REQUESTS_AT_ONCE} sequences" in caplog.text and "broken" in caplog.text
    assert sorted(fixture.engine.released) == sorted(fixture.sessions)


@pytest.mark.parametrize(("slots", "batch_size"), [(1, 2), (8, 2), (256, REQUESTS_AT_ONCE)])
async def test_a_batch_leaves_most_slots_to_episodes(slots: int, batch_size: int) -> None:
    fixture = Fixture(rollout={"slots": slots})
    fixture.engine.gate.clear()
    fixture.load(4)
    await settle()
    assert len(fixture.engine.requests) == batch_size

    fixture.engine.gate.set()
    reports = await fixture.sample()
    assert {len(report.sequences) for report in reports} == {batch_size}
    assert all(report.sequences[0].ids[:-1] == report.sequences[1].ids[:-1] for report in reports)
    assert len(reports) * batch_size == SAMPLE_COUNT


async def test_a_sequence_that_is_too_long_is_cut_and_accepted_by_the_coordinator() -> None:
    fixture = Fixture()
    long_generation = generation("x" * (MAX_SAMPLE_TOKENS + 1), version=4)

    async def generate(request: Request) -> Generation:
        return long_generation

    fixture.sampling._generate = generate
    fixture.load(4)
    reports = await fixture.sample()
    for report in reports:
        decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=ProbeSamples)
        assert {len(sequence.ids) for sequence in decoded.sequences} == {PROMPT_TOKENS + SAMPLE_TOKENS}
        assert {len(sequence.logprobs) for sequence in decoded.sequences} == {SAMPLE_TOKENS}
    assert len(reports) == 4


async def test_sequences_across_an_update_are_dropped() -> None:
    fixture = Fixture()
    updated: set[str] = set()

    def script(request: Request) -> str:
        if request.session.endswith("-7"):
            updated.add(request.session)
        fixture.engine._version = 5 if request.session in updated else 4
        return TEXT

    fixture.engine.script = script
    fixture.load(4)
    assert sum(len(report.sequences) for report in await fixture.sample()) == SAMPLE_COUNT - 1


@pytest.mark.parametrize(("label", "wrong_label"), [(3, 3), (5, None), (4, None)])
async def test_an_engine_that_names_an_older_version_is_reported(label: int, wrong_label: int | None) -> None:
    """Of newer versions nothing is known: the next one may have been loaded meanwhile."""
    fixture = Fixture()
    fixture.load(4)
    fixture.engine._version = label
    labels = [report.wrong_label for report in await fixture.sample()]
    assert [label for label in labels if label is not None] == ([] if wrong_label is None else [wrong_label])


async def test_prompts_leave_room_for_samples() -> None:
    fixture = Fixture(rollout={"max_tokens": 20, "max_new_tokens": 8})
    fixture.load(4)
    await fixture.sample()
    assert {len(request.ids) for request in fixture.engine.requests} == {20 - SAMPLE_TOKENS}
