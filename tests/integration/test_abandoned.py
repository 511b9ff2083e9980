"""Fifty tasks of an agent that does not repeat itself, with kills in between: what became of each token."""

from __future__ import annotations

import json
from contextlib import closing, suppress
from pathlib import Path

import pytest

from asyncrl.buffer.payloads import decode_turn
from asyncrl.episodes.recorded import kept_turns
from asyncrl.errors import ProtocolError
from asyncrl.store.reader import RunReader
from asyncrl.store.segments import HEADER
from asyncrl.types import Turn
from tests.fakes.noting import PLACE, TURNS, notes
from tests.integration.runs import Run

SLOTS = 8


def durable_turns(run_dir: Path) -> list[Turn]:
    """All that were ever stored. The same payload is there twice where a coordinator was killed between."""
    payloads = set[bytes]()
    for path in (run_dir / "segments").iterdir():
        data, at = path.read_bytes(), 0
        while at < len(data):
            size, _ = HEADER.unpack_from(data, at)
            payloads.add(data[at + HEADER.size : at + HEADER.size + size])
            at += HEADER.size + size
    turns = list[Turn]()
    for payload in payloads:
        with suppress(ProtocolError):  # replies
            turns.append(decode_turn(payload))
    return turns


@pytest.mark.full
def test_every_token_that_was_sampled_is_delivered_or_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PLACE, str(tmp_path))
    tasks = tmp_path / "tasks.jsonl"
    asked = [{"role": "user", "content": f"Start with {number}, plus 3."} for number in range(50)]
    rows = [{"data_source": "t", "prompt": [one], "reward_model": {"ground_truth": "1"}} for one in asked]
    tasks.write_text("\n".join(map(json.dumps, rows)))
    more = (f"data.train={tasks}", "data.test=''", "data.epochs=1", "total_steps=5", "rollout.workers=2")
    more += ("buffer.groups_per_batch=10", "buffer.episodes_per_group=2", f"rollout.slots={SLOTS}")
    more += ("rollout.tools=[]", "rollout.agent=tests.fakes.noting:forgetful", "rollout.max_tokens=1024")
    more += ("engine.name=tests.fakes.noting:noting_engine",)

    def under_way(worker: str) -> bool:
        """Conversations of a worker have durable turns, and go on."""
        process = run.children().get(worker)
        said = notes(tmp_path, "heard") if process else []
        newest = {session: number for pid, session, number in said if process and pid == process.pid}
        return sum(number < TURNS - 1 for number in newest.values()) > 1

    with Run(tmp_path, *more) as run:
        run.until(lambda: under_way("rollout-0"), "conversations of rollout-0")
        run.kill("rollout-0")
        heard = len(notes(tmp_path, "heard"))
        run.until(lambda: len(notes(tmp_path, "heard")) > heard + 2, "more turns")
        run.kill("coordinator-0")
        heard = len(notes(tmp_path, "heard"))
        run.until(lambda: len(notes(tmp_path, "heard")) > heard + SLOTS, "turns that another one has stored")
        run.until(lambda: under_way("rollout-1"), "conversations of rollout-1")
        run.kill("rollout-1")
        summary = run.completed(5)
    sampled = {tuple(prompt): tuple(ids) for prompt, ids in notes(tmp_path, "sampled")}
    assert len(sampled) == len(notes(tmp_path, "sampled")), "no prompt is asked twice"
    left, delivered = dict(sampled), 0
    with closing(RunReader.open(run.path)) as reader:
        episodes = [one for group in reader.groups() for one in reader.members(group.id)]
        for episode in (one for one in episodes if one.stats.turns):
            turns, missing = kept_turns(reader, episode)
            assert not missing
            shown: dict[int, tuple[int, ...]] = {}
            for turn in turns:
                prompt = shown.get(turn.row, ()) + turn.context
                assert left.pop(prompt) == turn.ids, "each token once, as the engine wrote it"
                shown[turn.row] = prompt + turn.ids
                delivered += len(turn.ids)
    durable = durable_turns(run.path)
    abandoned = summary["tokens_abandoned"]
    assert len(episodes) == 100 and abandoned > 0
    assert sum(len(turn.ids) for turn in durable) == delivered + abandoned
    # What the engines sampled beside that was not durable when its worker was killed.
    assert 0 <= len(sampled) - len(durable) <= 2 * SLOTS
