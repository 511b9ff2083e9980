"""What a store forgets: never what a resume needs, always what is beyond `keep_bytes`, and counts all."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from random import Random

import pytest

from asyncrl.buffer.batches import Batches
from asyncrl.buffer.records import OVER, State
from asyncrl.buffer.replay import ReplayBuffer
from asyncrl.store.reader import RunReader
from asyncrl.store.runstore import RunStore
from tests.unit.buffer.machine import admit, land, make, train

KEEP = (1, 2, 4)  # checkpoints: a resume may change it


class Coordinator:
    """What of one reaches the store."""

    def __init__(self, run_dir: Path, keep_bytes: int, random: Random) -> None:
        self.store = RunStore(run_dir, keep_bytes)
        self.store._segments.segment_bytes = 2000
        self.buffer, self.batches = make(filter_zero_variance=True)
        self.random, self.checkpoints, self.sent = random, list[int](), dict[str, bytes]()

    def play(self) -> None:
        """Groups come, some stay under way, a batch is trained, perhaps there is a checkpoint."""
        admit(self.buffer, self.random.randrange(4))
        for uid in [uid for uid, e in self.buffer.episodes.items() if e.state is State.PENDING]:
            if self.random.random() < 0.8:
                self.sent[uid] = self.random.randbytes(self.random.randrange(1, 900))
                self.store.put_frame(uid, 0, "generated", self.sent[uid])
                land(self.buffer, uid, float(self.random.randrange(2)))
        if len(self.buffer.tally.groups[State.READY]) >= 2:
            train(self.batches, self.buffer.committed)
            plan = self.batches.batches[self.buffer.committed - 1]
            self.store.put_commit(self.buffer.committed, 1, plan.plan_hash)
        self.persist()
        if self.random.random() < 0.4 and self.buffer.committed > max(self.checkpoints, default=0):
            self.checkpoints.append(self.buffer.committed)
            keep = self.random.choice(KEEP)
            oldest = self.checkpoints[-keep] if len(self.checkpoints) >= keep else 0
            covered = self.batches.retain(oldest)
            for uid in covered:
                self.store.release_frames(uid)
            self.store.cover(oldest, len(covered))
            self.store.sync()
        self.persist()

    def persist(self) -> None:
        groups, episodes = self.buffer.changes()
        self.store.put_groups(groups, self.buffer.live)
        self.store.put_episodes(episodes)
        self.store.put_batches(self.batches.changes())
        for episode in episodes:
            if episode.state in OVER and episode.state is not State.TRAINED:
                self.store.release_frames(episode.uid)
        self.store.commit()


def restored(reader: RunReader) -> tuple[ReplayBuffer, Batches]:
    held = reader.load()
    buffer, batches = make(filter_zero_variance=True)
    buffer.restore(held.groups, held.episodes, held.left, 0.0)
    buffer.next_group, buffer.committed = held.next_group, held.committed
    batches.restore(held.batches, held.taken, held.baselines)
    return buffer, batches


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("keep_bytes", [0, 5000, 1 << 30])
def test_nothing_needed_goes_and_everything_else_does(tmp_path: Path, seed: int, keep_bytes: int) -> None:
    run = Coordinator(tmp_path, keep_bytes, Random(seed))
    with closing(RunReader.open(tmp_path)) as reader:
        for _ in range(25):
            run.play()
            buffer, batches = restored(reader)
            assert buffer.flow() == run.buffer.flow() and buffer.flow().conserved
            assert batches.batches == run.batches.batches and batches.baselines == run.batches.baselines
            assert reader.trained_in_plans() == buffer.flow().trained
            needed = [*run.batches.taken, *(u for u, e in run.buffer.episodes.items() if not e.state.over)]
            plans = [uid for step in reader.planned_steps() for uid in reader.plan(step).uids]
            for uid in (uid for uid in (*needed, *plans) if uid in run.sent):
                assert list(reader.frames(uid, 1)) == [run.sent[uid], b""]
            assert {reader.episode(uid).state for uid in plans} <= {State.TRAINED}
        run.store.sync()
        run.store.commit()
        sizes = {int(path.stem): path.stat().st_size for path in (tmp_path / "segments").iterdir()}
        rows = reader._rows("SELECT segment FROM frames WHERE NOT spare")
        first = min((segment for (segment,) in rows), default=max(sizes))
        spare = sum(size for segment, size in sizes.items() if segment < first)
        issued = run.buffer.flow().issued
        ((kept,),) = reader._rows("SELECT count(*) FROM episodes")
        if keep_bytes < 1 << 30:
            assert spare <= keep_bytes and kept < issued
            assert spare > keep_bytes - 3000, "what fits is kept"
        else:
            assert kept == issued and reader.planned_steps() == set(range(run.buffer.committed))
    run.store.close()
