"""What a store forgets: never what a resume needs, always what is beyond `keep_bytes`, and counts all."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from asyncrl.buffer.batches import Batches
from asyncrl.buffer.records import State
from asyncrl.buffer.replay import ReplayBuffer
from asyncrl.config import parse
from asyncrl.coordinator.ledger import restore_from_store
from asyncrl.coordinator.state import RunState
from asyncrl.coordinator.trainer import TrainerHandler
from asyncrl.coordinator.versions import VersionLedger
from asyncrl.store import runstore, segments
from asyncrl.store.reader import RunReader
from asyncrl.store.runstore import EPISODE_TABLES, RunStore
from asyncrl.types import Message, Sample, ToolCall, ToolReply
from asyncrl.wire.messages.trainer import Checkpointed
from tests.fakes.mail import Sent
from tests.unit.buffer.machine import admit, land, make, train

SAMPLE = Sample(7, "math", (Message("user", "how  many?"),), '"a lot"')
KEEP = (1, 2, 4)  # checkpoints: a resume may change it


class Coordinator:
    """What of one reaches the store."""

    def __init__(self, run_dir: Path, keep_bytes: int, random: Random) -> None:
        self.buffer, self.batches = make(filter_zero_variance=True)
        self.store = RunStore(run_dir, keep_bytes)
        self.random = random
        self.sent = dict[str, bytes]()
        self.store._segments.segment_bytes = 2000
        config = parse({"name": "t", "model": {"path": "m"}, "data": {"train": "d"}, "total_steps": 100})
        outbox: Any = Sent()
        self.state = RunState(
            config, run_dir, [], self.buffer, self.batches, VersionLedger(), self.store, outbox
        )
        restore_from_store(config, self.store, self.buffer, self.batches)
        self.trainer = TrainerHandler(self.state, lambda commit: None)

    def play(self) -> None:
        """Groups come, some stay under way, perhaps a batch is trained."""
        admit(self.buffer, self.random.randrange(4))
        for uid in [uid for uid, e in self.buffer.episodes.items() if e.state is State.PENDING]:
            if self.random.random() < 0.8:
                self.sent[uid] = self.random.randbytes(self.random.randrange(1, 900))
                self.store.put_frame(uid, 0, "generated", self.sent[uid])
                land(self.buffer, uid, float(self.random.randrange(2)))
                self.store.put_answer(uid, f"answer {uid}")
                self.store.put_calls(uid, 0, [ToolReply(ToolCall("search", "{}"), "", "broke", 0.5)] * 2)
                self.store.put_question(int(uid.partition(".")[0]), SAMPLE)

        if len(self.buffer.tally.groups_by_state[State.READY]) >= 2:
            train(self.batches)
            plan = self.batches.by_step[self.buffer.committed]
            self.store.put_commit(self.buffer.committed, 1, plan.plan_hash)

        self.turn()

    def checkpoint(self, keep: int) -> None:
        config = self.trainer.config
        checkpoint = msgspec.structs.replace(config.checkpoint, keep=keep)
        self.trainer.config = msgspec.structs.replace(config, checkpoint=checkpoint)
        self.trainer.record_checkpoint(b"trainer/0/x", Checkpointed(0, self.buffer.committed, 0), 0.0)

    def turn(self) -> None:
        self.trainer.forget_covered()
        self.state.journal.persist()

    def forget(self) -> None:
        """All that need not be kept."""
        self.store.request_sync()
        for _ in range(1000):
            self.turn()
            if not self.trainer.is_forgetting:
                return
        raise AssertionError("it never ends")


def restored(reader: RunReader) -> tuple[ReplayBuffer, Batches]:
    stored_run = reader.load_run()
    buffer, batches = make(filter_zero_variance=True)
    buffer.restore_groups(stored_run.groups, stored_run.episodes, stored_run.pruned_counts, 0.0)
    buffer.next_group = stored_run.next_group
    buffer.committed = stored_run.committed_steps
    batches.restore_plans(stored_run.batches, stored_run.planned_episodes, stored_run.baselines)
    return buffer, batches


@pytest.fixture(autouse=True)
def a_little_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that turns come in between."""
    monkeypatch.setattr(runstore, "MAX_FORGOTTEN", 3)
    monkeypatch.setattr(segments, "MAX_REMOVED", 1)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("keep_bytes", [0, 5000, 1 << 30])
def test_nothing_needed_goes_and_everything_else_does(tmp_path: Path, seed: int, keep_bytes: int) -> None:
    run = Coordinator(tmp_path, keep_bytes, Random(seed))
    with closing(RunReader.open(tmp_path)) as reader:
        for _ in range(25):
            run.play()
            if run.random.random() < 0.4 and run.buffer.committed > max(run.trainer.checkpoint_step, 0):
                run.checkpoint(run.random.choice(KEEP))
                run.turn()
            buffer, batches = restored(reader)
            assert buffer.account() == run.buffer.account() and buffer.account().conserved
            assert buffer.episodes == run.buffer.episodes
            assert batches.by_step == run.batches.by_step and batches.baselines == run.batches.baselines
            assert reader.trained_in_plans() == buffer.account().trained
            needed = [
                *run.batches.planned_episodes,
                *(u for u, e in run.buffer.episodes.items() if not e.state.over),
            ]
            plans = [uid for step in reader.planned_steps() for uid in reader.plan(step).uids]
            for uid in (uid for uid in (*needed, *plans) if uid in run.sent):
                assert list(reader.turn_frames(uid, 1)) == [run.sent[uid], b""]
            assert {reader.episode(uid).state for uid in plans} <= {State.TRAINED}

        run.forget()
        sizes = {int(path.stem): path.stat().st_size for path in (tmp_path / "segments").iterdir()}
        rows = reader.rows("SELECT segment FROM frames WHERE NOT spare")
        first = min((segment for (segment,) in rows), default=max(sizes))
        spare = sum(size for segment, size in sizes.items() if segment < first)
        issued = run.buffer.account().issued
        ((kept_episodes,),) = reader.rows("SELECT count(*) FROM episodes")
        of = {table: {uid for (uid,) in reader.rows(f"SELECT uid FROM {table}")} for table in EPISODE_TABLES}
        assert of["answers"] == of["calls"] == of["episodes"] & run.sent.keys()
        assert reader.rows("SELECT group_id FROM questions EXCEPT SELECT group_id FROM episodes") == []
        if keep_bytes < 1 << 30:
            assert spare <= keep_bytes and kept_episodes < issued
            assert spare > keep_bytes - 3000, "what fits is kept"
        else:
            assert kept_episodes == issued and reader.planned_steps() == set(
                range(1, run.buffer.committed + 1)
            )

    run.store.close()


def test_a_turn_forgets_one_batch_and_a_restart_goes_on_with_it(tmp_path: Path) -> None:
    run = Coordinator(tmp_path, 0, Random(0))
    while run.buffer.committed < 6:
        run.play()
    run.checkpoint(keep=1)
    for left in (5, 4, 3):
        run.turn()
        assert len(run.batches.by_step) == left

    run.store.close()  # as by kill -9
    again = Coordinator(tmp_path, 0, Random(0))
    assert [*again.batches.by_step] == [4, 5, 6] and again.buffer.account() == run.buffer.account()
    again.turn()
    assert [*again.batches.by_step] == [5, 6]
    again.forget()
    assert (
        not again.batches.by_step and again.store.reader.trained_in_plans() == again.buffer.account().trained
    )
    again.store.close()


def test_the_newest_group_stays_though_all_groups_are_over(tmp_path: Path) -> None:
    """The number of the next group follows from the newest one."""
    run = Coordinator(tmp_path, 0, Random(0))
    run.store._segments.segment_bytes = 1  # each payload has a segment of its own
    admit(run.buffer, 2)
    for uid in list(run.buffer.episodes):
        run.store.put_frame(uid, 0, "generated", b"payload")
        land(run.buffer, uid, 1.0)  # groups of equal rewards are filtered
    run.store.put_frame("val1/sampled/0", 0, "generated", b"a later payload")
    run.forget()

    assert [group.id for group in run.store.reader.groups()] == [1]
    assert run.store.reader.load_run().next_group == 2
    run.store.close()


def test_a_plan_stays_until_a_checkpoint_covers_it_though_a_lost_payload_goes(tmp_path: Path) -> None:
    run = Coordinator(tmp_path, 0, Random(0))
    run.store._segments.segment_bytes = 1  # each payload has a segment of its own
    admit(run.buffer, 2)
    for uid in list(run.buffer.episodes):
        run.store.put_frame(uid, 0, "generated", b"payload")
        land(run.buffer, uid, float(uid[-1]))
    planned_uids = run.batches.next_part(1, 0, 1) or []
    run.batches.mark_lost(1, planned_uids[0])
    run.batches.commit_batch(1, planned_uids[1:], lost_uids=planned_uids[:1])
    run.forget()

    frames = [frame for uid in planned_uids for frame in run.store.reader.turn_frames(uid, 1, ["generated"])]
    assert frames == [b"", b"payload", b"payload", b"payload"]
    assert [plan.step for plan in run.store.reader.plans()] == [1]
    run.store.close()


def test_a_turn_forgets_payloads_of_few_episodes(tmp_path: Path) -> None:
    run = Coordinator(tmp_path, 0, Random(0))
    for number in range(20):
        run.store.put_frame(f"{number}.0", 0, "generated", bytes(500))
        run.store.release_frames(f"{number}.0")

    run.store.put_frame("20.0", 0, "generated", b"needed")
    run.store.request_sync()
    sizes: list[tuple[int, int]] = []  # payloads, segments
    while run.store.pruning:
        assert len(sizes) < 20, "it never ends"
        run.turn()
        ((frames,),) = run.store.reader.rows("SELECT count(*) FROM frames")
        sizes.append((frames, len([*(tmp_path / "segments").iterdir()])))

    payloads = [(left, 6) for left in (18, 15, 12, 9, 6, 3)]
    assert sizes == [*payloads, (1, 5), (1, 4), (1, 3), (1, 2), (1, 1), (1, 1)]
    run.store.close()
