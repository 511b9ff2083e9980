from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from asyncrl.buffer.records import State
from asyncrl.buffer.replay import ReplayBuffer
from asyncrl.errors import ConfigError
from asyncrl.store.reader import RunReader
from asyncrl.store.runstore import RunStore
from asyncrl.store.schema import SCHEMA_VERSION, check_schema
from asyncrl.types import PolicyVersion
from tests.unit.buffer.machine import admit, land, make, train

CHILD = """
import sys
from pathlib import Path
from asyncrl.store.runstore import RunStore
store = RunStore(Path(sys.argv[1]))
for turn in range(1000):
    store.put_frame("0.0", turn, "generated", b"payload %d" % turn)
    store.commit()
    print(turn, flush=True)
"""


def persist(store: RunStore, buffer: ReplayBuffer) -> None:
    groups, episodes = buffer.changes()
    store.put_groups(groups, buffer.live)
    store.put_episodes(episodes)
    store.commit()


def test_everything_comes_back(tmp_path: Path) -> None:
    buffer, batches = make()
    store = RunStore(tmp_path)
    admit(buffer, 3)
    for uid in ("0.0", "0.1", "1.0", "1.1", "2.0"):
        land(buffer, uid)
        store.put_frame(uid, 0, "generated", uid.encode())
    persist(store, buffer)
    train(batches, 0)
    persist(store, buffer)  # what left the buffer between two transactions is over in the store, too
    store.put_batches(batches.changes())
    store.put_commit(1, 1, batches.batches[0].plan_hash)
    store.put_version(PolicyVersion(1, 1), "somewhere")
    store.commit()
    store.close()

    held = RunStore(tmp_path)
    snapshot = held.read.load()
    assert snapshot.committed == 1 and snapshot.next_group == 3
    assert [group.id for group in snapshot.groups] == [2]
    assert {e.uid: e.state for e in snapshot.episodes} == {"2.0": State.LANDED, "2.1": State.PENDING}
    assert snapshot.batches[0].uids == batches.batches[0].uids
    assert snapshot.batches[0].plan_hash == batches.batches[0].plan_hash
    assert snapshot.baselines == batches.baselines and snapshot.baselines.keys() == {0, 1}
    assert {e.uid for e in snapshot.taken} == {"0.0", "0.1", "1.0", "1.1"}
    assert snapshot.left[State.TRAINED] == 4
    assert held.read.frames("2.0", 1) == [b"2.0", b""]
    assert held.read.frames("0.0", 1) == [b"0.0", b""]  # a kept plan's payloads are kept
    assert held.read.trained_in_plans() == 4
    assert held.read.newest_version() == ((1, 1), "somewhere")
    restored, _ = make()
    restored.restore(snapshot.groups, snapshot.episodes, snapshot.left)
    restored.next_group = snapshot.next_group
    assert restored.flow() == buffer.flow() and restored.flow().conserved


def test_uncommitted_writes_are_not_there(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    store.put_frame("0.0", 0, "generated", b"kept")
    store.commit()
    store.put_frame("0.0", 1, "generated", b"lost")
    again = RunStore(tmp_path)  # a second process would see this
    assert again.read.frames("0.0", 2) == [b"kept", b"", b"", b""]


def test_kill_9_loses_nothing_acknowledged(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    acknowledged = -1
    for line in child.stdout:
        acknowledged = int(line)
        if acknowledged == 50:
            os.kill(child.pid, signal.SIGKILL)
    child.wait(10)
    store = RunStore(tmp_path)
    frames = store.read.frames("0.0", acknowledged + 1)[::2]
    assert frames == [b"payload %d" % turn for turn in range(acknowledged + 1)]


def test_covered_plans_and_their_payloads_go(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    store.put_frame("0.0", 0, "generated", b"x")
    store.forget_frames("0.0")
    store.forget_plans(1, 4)
    store.commit()
    assert store.read.trained_in_plans() == 4
    assert store.read.frames("0.0", 1) == [b"", b""]
    store.remove_unused_segments()


@pytest.mark.parametrize(("version", "whose"), [(0, "an older"), (SCHEMA_VERSION + 1, "a newer")])
def test_a_run_of_another_schema_is_refused_by_name(tmp_path: Path, version: int, whose: str) -> None:
    RunStore(tmp_path).close()
    check_schema(tmp_path)
    with closing(sqlite3.connect(tmp_path / "run.db")) as db:
        db.execute(f"PRAGMA user_version={version}")
    for opened in (RunStore, RunReader.open, check_schema):
        with pytest.raises(
            ConfigError, match=rf"run\.db: written by {whose} version .* \(schema {version}, .*name="
        ):
            opened(tmp_path)


def test_a_run_is_read_while_it_is_written(tmp_path: Path) -> None:
    check_schema(tmp_path)  # nothing is there yet
    buffer, _ = make()
    store = RunStore(tmp_path)
    admit(buffer, 1)
    land(buffer, "0.0")
    store.put_frame("0.0", 0, "generated", b"x")
    persist(store, buffer)
    files = set(tmp_path.rglob("*.seg"))
    with closing(RunReader.open(tmp_path)) as reader:
        assert reader.counts() == {State.LANDED: 1, State.PENDING: 1}
        assert reader.episode("0.0").result.reward == 1.0
        store.put_meta("a", "b")
        assert (store.read.meta("a"), reader.meta("a")) == ("b", "")
        assert reader.frames("0.0", 1) == [b"x", b""]
    assert set(tmp_path.rglob("*.seg")) == files  # a reader begins no segment
    assert len(list((tmp_path / "segments").glob("*.seg"))) == 1
