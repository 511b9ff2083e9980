"""What every engine promises about sampling, tested on each through `Engine` alone: ids in, ids out, the
log-probs of the trainer's own model. Its promises about weights: test_conformance_weights.py."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import torch
from msgspec.structs import replace

from asyncrl.conversation.watch import TurnStopCheck
from asyncrl.engines.base import Engine, Request
from asyncrl.errors import EngineError
from asyncrl.types import Generation, StopReason, VersionSpan
from tests.fakes.chat import FakeChat, rules
from tests.sglang.conformance import (
    EOS,
    MAX_LEN,
    TOLERANCE,
    VOCABULARY,
    Subject,
    ask,
    prompt,
    under_way,
)

every_engine = pytest.mark.parametrize("subject", ["torch-qwen2", "sglang-qwen2-in_place"], indirect=True)
every_family = pytest.mark.parametrize(
    "subject",
    ["torch-qwen2", "sglang-qwen2-in_place", pytest.param("sglang-qwen3-in_place", marks=pytest.mark.full)],
    indirect=True,
)
LONG = 900  # tokens: still running when whatever the test does has happened


@every_family
@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_are_those_of_the_trainers_model(subject: Subject, temperature: float):
    async with subject.ready() as engine:
        for length in (1, 17, 120):
            request = ask(prompt(length, length), 60, str(length), temperature=temperature)
            generation = await engine.generate(request)
            assert generation.stop is StopReason.LENGTH and len(generation.ids) == 60
            assert generation.spans == (VersionSpan(0, 60, 0, 0),)
            assert subject.versions.check(request, generation) == 60


@every_engine
async def test_recorded_logprobs_are_scaled_by_the_temperature(subject: Subject):
    async with subject.ready() as engine:
        for temperature in (0.5, 1.5):
            request = ask(prompt(9), 40, temperature=temperature)
            generation = await engine.generate(request)
            raw = subject.versions.logprobs(0, ask(prompt(9)), generation)
            scaled = subject.versions.logprobs(0, request, generation)
            recorded = torch.tensor(generation.logprobs)
            assert (recorded - scaled).abs().max() < TOLERANCE < 0.1 < (recorded - raw).abs().max()


@every_engine
async def test_greedy_is_the_argmax_and_recorded_at_temperature_1(subject: Subject):
    async with subject.ready() as engine:
        request = ask(prompt(12), 30, temperature=0.0)
        generation = await engine.generate(request)
        assert subject.versions.check(request, generation) == 30
        assert_greedy(subject, request, generation)
        assert (await engine.generate(ask(prompt(12), 30, "again", 7, temperature=0.0))).ids == generation.ids


def assert_greedy(subject: Subject, request: Request, generation: Generation) -> None:
    """No other id is likelier, by the trainer's model, than each that was sampled."""
    for at, chosen in enumerate(generation.logprobs):
        highest = subject.versions.next_logprobs(0, request.ids + generation.ids[:at]).max()
        assert highest <= chosen + TOLERANCE


@every_engine
async def test_a_stop_id_ends_the_turn_and_is_its_last_id(subject: Subject):
    async with subject.ready() as engine:
        full = await engine.generate(ask(prompt(9), 20, temperature=0.0))
        stop = next(token for at, token in enumerate(full.ids) if at >= 4 and token not in full.ids[:at])
        size = full.ids.index(stop) + 1
        for limit in (20, size):  # a stop id at the limit is a stop, too
            request = ask(prompt(9), limit, f"to {limit}", temperature=0.0, stop_ids=(stop,))
            cut = await engine.generate(request)
            assert cut.stop is StopReason.STOP and cut.ids == full.ids[:size]
            assert subject.versions.check(request, cut) == size
        short = await engine.generate(ask(prompt(9), size - 1, "short", temperature=0.0, stop_ids=(stop,)))
        assert short.stop is StopReason.LENGTH and short.ids == full.ids[: size - 1]


@every_engine
async def test_a_text_that_ends_inside_a_token_ends_the_turn_with_that_token(subject: Subject):
    """The turn is the beginning of the one without the text, its log-probs are the trainer's, and the next
    turn goes on after it."""

    class Words(FakeChat):
        def decode(self, ids: Sequence[int]) -> str:
            return "".join(f"<{id}>" for id in ids)

    async with subject.ready() as engine:
        chat = Words()
        for size in (5, 6, 8):  # of tokens, at every place in an event of several
            full = await engine.generate(ask(prompt(9, size), 40, f"{size}", temperature=0.0))
            text = chat.decode(full.ids[:size])
            stop = text[len(chat.decode(full.ids[: size - 2])) - 1 : -1]
            assert text.find(stop) + len(stop) == len(text) - 1
            watch = TurnStopCheck(rules(chat=chat), (), (stop,), "", None)
            request = replace(ask(prompt(9, size), 40, f"cut {size}", temperature=0.0), stop_check=watch)
            cut = await engine.generate(request)
            assert (cut.stop, cut.ids) == (StopReason.TEXT, full.ids[:size])
            assert subject.versions.check(request, cut) == size
            more = ask(request.ids + cut.ids + prompt(4), 10, f"cut {size}")
            assert subject.versions.check(more, await engine.generate(more)) == 10


@every_engine
async def test_nothing_but_the_requested_ids_stops_a_turn(subject: Subject):
    """The model's own end-of-sequence id, for one, goes on like any other unless it is asked for."""

    async def sample_turn(engine: Engine, index: int, stops: tuple[int, ...]) -> Generation:
        request = ask(prompt(5, index), 100, f"{index}", index, temperature=1.5, stop_ids=stops)
        generation = await engine.generate(request)
        subject.versions.check(request, generation)
        return generation

    async with subject.ready() as engine:
        free = await asyncio.gather(*(sample_turn(engine, index, ()) for index in range(32)))
        assert {generation.stop for generation in free} == {StopReason.LENGTH}
        assert all(len(generation.ids) == 100 for generation in free)
        assert any(EOS in generation.ids[:-1] for generation in free)
        stops = (*range(0, VOCABULARY, 9), EOS)
        for generation in await asyncio.gather(*(sample_turn(engine, index, stops) for index in range(32))):
            assert generation.stop is StopReason.STOP or len(generation.ids) == 100
            assert not set(stops) & set(generation.ids[:-1])
            assert (generation.ids[-1] in stops) == (generation.stop is StopReason.STOP)


@every_engine
async def test_max_len_is_a_limit(subject: Subject):
    async with subject.ready() as engine:
        for room in (1, 10):
            request = ask(prompt(MAX_LEN - room), 50)
            generation = await engine.generate(request)
            assert generation.stop is StopReason.LENGTH
            assert subject.versions.check(request, generation) == room
        with pytest.raises(EngineError):
            await engine.generate(ask(prompt(MAX_LEN), 1, "full"))


@every_engine
async def test_a_bad_request_is_refused_and_hurts_nobody(subject: Subject):
    async with subject.ready() as engine:
        request = ask(prompt(4), 60, "good")
        (task,) = await under_way(engine, request)
        for bad in (ask(()), ask((3, VOCABULARY)), ask((-1, 3)), ask((1,), 0), ask((1,), temperature=-1.0)):
            with pytest.raises(EngineError):
                await engine.generate(bad)
        assert subject.versions.check(request, await task) == 60


@every_engine
async def test_cancelling_the_call_ends_the_turn(subject: Subject):
    async with subject.ready() as engine:
        (task,) = await under_way(engine, ask(prompt(7), LONG))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        again = ask(prompt(7), 20)  # the session is free
        assert subject.versions.check(again, await engine.generate(again)) == 20


@every_family
async def test_64_streams_at_once_each_with_its_own_logprobs(subject: Subject):
    async def stream(engine: Engine, index: int) -> int:
        temperature = (0.0, 0.7, 1.0, 1.3)[index % 4]
        request = ask(prompt(1 + index, index), 20 + index % 30, f"{index}", index, temperature=temperature)
        generation = await engine.generate(request)
        assert len(generation.ids) == request.sampling.max_new_tokens
        return subject.versions.check(request, generation)

    async with subject.ready() as engine:
        compared = await asyncio.gather(*(stream(engine, index) for index in range(64)))
        assert sum(compared) == sum(20 + index % 30 for index in range(64))


@every_family
async def test_turns_on_a_kept_prefix_equal_fresh_computations(subject: Subject):
    async with subject.ready() as engine:
        ids = prompt(30)
        for turn in range(5):
            request = ask(ids, 24, "kept", turn, temperature=0.7)
            generation = await engine.generate(request)
            assert subject.versions.check(request, generation) == 24
            ids += generation.ids + prompt(6, turn)
        branch = ask(ids[:50] + prompt(20, "branch"), 24, "kept")  # the session's text is another one now
        assert subject.versions.check(branch, await engine.generate(branch)) == 24
        engine.release("kept")
        engine.release("unknown")
        greedy = [ask(ids, 24, session, temperature=0.0) for session in ("kept", "fresh")]
        first, second = [await engine.generate(request) for request in greedy]
        assert first.ids == second.ids


@every_engine
async def test_score_is_the_trainers(subject: Subject):
    async with subject.ready() as engine:
        for version in (0, 1):
            await engine.load(subject.versions.refs[version])
            for ids in (prompt(2), prompt(700)):  # the embedded engine widens 512 tokens' logits at once
                scores = torch.tensor(await engine.score(ids))
                expected = torch.tensor(subject.versions.score(version, ids))
                torch.testing.assert_close(scores, expected, atol=TOLERANCE, rtol=0)
