"""What commands and the viewer read of recorded episodes; a real run store is read."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from asyncrl.buffer.payloads import decode_turn
from asyncrl.data import samples_path
from asyncrl.episodes.recorded import evaluated, judged_turns, reward_input, stored_result, stored_turns
from asyncrl.gateway import Endpoint
from asyncrl.observe.held_out import GREEDY, SAMPLED, HeldOut, JudgedEpisode
from asyncrl.rewards import RewardInput
from asyncrl.store.reader import RunReader
from asyncrl.store.runstore import RunStore
from asyncrl.types import EpisodeResult, EpisodeStats, FailReason, Sample
from asyncrl.wire.messages.shared import Attempt
from asyncrl.wire.messages.worker import Failed, Finished
from tests.fakes.agents import AgentBench, message
from tests.fakes.chat import FakeChat, call
from tests.fakes.data import rows, stored
from tests.fakes.planted import MARKUP, SPANS, save_run
from tests.unit.buffer.machine import turn_payload

RESULT = EpisodeResult(0.5, components={"pred": 2.0})
STATS = EpisodeStats(2, tool_calls=1)


def test_the_turns_of_an_episode_are_read_with_their_replies_as_far_as_they_are_kept(tmp_path: Path) -> None:
    run_dir = save_run(tmp_path / "a")
    with closing(RunReader.open(run_dir)) as reader:
        complete, dropped = (reader.episode(uid) for uid in ("0.0", "3.0"))
        (turn,), missing = stored_turns(reader, complete)
        assert not missing and turn.generation.spans == SPANS and turn.replies[0].content == MARKUP
        longer = msgspec.structs.replace(complete, turns=2)
        assert stored_turns(reader, longer) == (
            [turn],
            "the episode's turns are no longer stored; set a larger store.keep_bytes",
        )
        assert (
            stored_turns(reader, dropped)[0] == [] and "store.keep_bytes" in stored_turns(reader, dropped)[1]
        )
        assert stored_turns(reader, reader.episode("2.0")) == ([], "")


@pytest.mark.parametrize("damage", ["a frame", "a segment"])
def test_turns_that_cannot_be_read_are_missing_with_the_reason(tmp_path: Path, damage: str) -> None:
    run_dir = save_run(tmp_path / "a")
    if damage == "a frame":
        store = RunStore(run_dir)
        store.put_frame("0.0", 0, "generated", turn_payload()[:-1])
        store.commit()
        store.close()
    else:
        for path in (run_dir / "segments").iterdir():
            path.unlink()
    with closing(RunReader.open(run_dir)) as reader:
        turns, why = stored_turns(reader, reader.episode("0.0"))
    assert turns == [] and ("a turn cannot be decoded" if damage == "a frame" else "segment") in why


def test_the_trained_turns_of_an_evaluation_are_read_behind_a_side_request(tmp_path: Path) -> None:
    held_out = HeldOut.from_uid("val0/sampled/1")
    title, turn = (decode_turn(turn_payload(number)) for number in range(2))
    title = msgspec.structs.replace(title, untrained=True)
    turn = msgspec.structs.replace(turn, row=1)
    store = RunStore(tmp_path)
    for recorded_turn in (title, turn):
        store.put_frame(held_out.uid, recorded_turn.index, "generated", msgspec.msgpack.encode(recorded_turn))
    store.commit()
    store.close()
    with closing(RunReader.open(tmp_path)) as reader:
        judged = JudgedEpisode(held_out, "a", RESULT, EpisodeStats(1, untrained_turns=1))
        (read,) = judged_turns(reader, judged)
    assert (read.generation.ids, read.index, read.row) == (turn.generation.ids, 0, 0)


class ChatWithImageToken(FakeChat):
    image_token = "|image|"


def test_an_agents_episode_is_regraded_by_what_its_reward_saw(tmp_path: Path) -> None:
    """All but the agent's own messages, which are not recorded: the conversation is that of the last turn."""
    seen: list[RewardInput] = []

    async def agent(sample: Sample, endpoint: Endpoint) -> dict[str, Any]:
        tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
        await message(endpoint, "a plan?")
        calling = await message(endpoint, "q", tools=[tool])
        (tool_call,) = calling["tool_calls"]
        reply = {"role": "tool", "tool_call_id": tool_call["id"], "content": "7"}
        await message(endpoint, "q", calling, reply, tools=[tool])
        return {"changes": "YQ=="}

    def said(prompt: str) -> str:
        return "so " + call("look") if prompt.endswith("q") else "it is " + call("look")

    def reward(reward_input: RewardInput) -> float:
        seen.append(reward_input)
        return 1.0

    bench = AgentBench(agent, said, reward, chat=ChatWithImageToken())
    stats = bench.finished().stats
    (live,), parts = seen, SimpleNamespace(rules=bench.context.rules)
    store = RunStore(tmp_path)
    store.put_frame("u", stats.turns - 1, "result", *bench.frames[-1])
    store.commit()
    store.close()
    with closing(RunReader.open(tmp_path)) as reader:
        result = stored_result(reader, "u", stats.turns)
    seen_again = parts, bench.sample, bench.turns, live.end, stats.tool_calls, result
    rebuilt_input = reward_input(*seen_again)  # type: ignore[arg-type]

    def texts(reward_input: RewardInput) -> list[str]:
        return [message.content for message in reward_input.messages if message.role == "assistant"]

    assert (live.answer, live.tool_calls, texts(live)) == ("it is", 2, ["so", "it is"])
    assert (rebuilt_input.answer, rebuilt_input.tool_calls, texts(rebuilt_input)) == (
        "it is",
        2,
        ["so", "it is"],
    )
    assert (rebuilt_input.turns, rebuilt_input.end, rebuilt_input.transcript) == (
        live.turns,
        live.end,
        live.transcript,
    )
    assert rebuilt_input.result == live.result == {"changes": "YQ=="}
    assert rebuilt_input.image_token == live.image_token == "|image|"


def test_the_episodes_of_an_evaluation_are_judged_and_other_validations_are_left_out(tmp_path: Path) -> None:
    samples = stored(rows(3))
    samples.save(samples_path(tmp_path, "test"))
    attempt = Attempt("val0/sampled/1", 0)
    finished = Finished(1, attempt, RESULT, STATS, "a long text", {"pred": "said"})
    failed = Failed(2, attempt, FailReason.AGENT_ERROR, "it raised")
    store = RunStore(tmp_path)
    over = {"val0/sampled/1": finished, "val0/greedy/2": failed, "val10/sampled/0": finished}
    for uid, record in over.items():
        store.put_held_out(uid, msgspec.msgpack.encode(record))
    store.commit()
    store.close()
    read, judged = evaluated(tmp_path)
    assert read.fingerprint == samples.fingerprint
    assert sorted(judged, key=lambda judged_episode: judged_episode.identity.row) == [
        JudgedEpisode(HeldOut(0, SAMPLED, 1), samples[1].data_source, RESULT, STATS, "2.0"),
        JudgedEpisode(HeldOut(0, GREEDY, 2), samples[2].data_source, None),
    ]
