from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from asyncrl.buffer.records import State
from asyncrl.buffer.replay import ReplayBuffer
from asyncrl.store.runstore import RunStore
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
    snapshot = held.load()
    assert snapshot.committed == 1 and snapshot.next_group == 3
    assert [group.id for group in snapshot.groups] == [2]
    assert {e.uid: e.state for e in snapshot.episodes} == {"2.0": State.LANDED, "2.1": State.PENDING}
    assert snapshot.batches[0].uids == batches.batches[0].uids
    assert snapshot.batches[0].plan_hash == batches.batches[0].plan_hash
    assert snapshot.baselines == batches.baselines and snapshot.baselines.keys() == {0, 1}
    assert {e.uid for e in snapshot.taken} == {"0.0", "0.1", "1.0", "1.1"}
    assert snapshot.left[State.TRAINED] == 4
    assert held.frames("2.0", 1) == [b"2.0", b""]
    assert held.frames("0.0", 1) == [b"0.0", b""]  # a kept plan's payloads are kept
    assert held.trained_in_plans() == 4
    assert held.newest_version() == ((1, 1), "somewhere")
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
    again._load_frames({"0.0"})
    assert again.frames("0.0", 2) == [b"kept", b"", b"", b""]


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
    store._load_frames({"0.0"})
    frames = store.frames("0.0", acknowledged + 1)[::2]
    assert frames == [b"payload %d" % turn for turn in range(acknowledged + 1)]


def test_covered_plans_and_their_payloads_go(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    store.put_frame("0.0", 0, "generated", b"x")
    store.forget_frames("0.0")
    store.forget_plans(1, 4)
    store.commit()
    assert store.trained_in_plans() == 4
    assert store.frames("0.0", 1) == [b"", b""]
    store.remove_unused_segments()
    assert len(list((tmp_path / "segments").glob("*.seg"))) == 1
