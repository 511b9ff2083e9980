"""One rank, with a learner that does nothing and links that only remember."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
from torch.distributed import DistNetworkError

from asyncrl.config import CheckpointConfig, TrainerConfig, parse
from asyncrl.errors import ConfigError, DeadlineError, GaveUpError, UserCodeError, lacks_memory
from asyncrl.runtime.liveness import progress_limit
from asyncrl.store.checkpoints import CheckpointError, CheckpointManifest
from asyncrl.trainer import checkpoint, client
from asyncrl.trainer import rank as module
from asyncrl.trainer.checkpointing import Checkpointing
from asyncrl.trainer.client import HEARTBEAT_SECONDS, Stopped
from asyncrl.trainer.images import READ_AHEAD, ImagePixels
from asyncrl.trainer.learner import Learner
from asyncrl.trainer.performance import Stopwatch
from asyncrl.trainer.rank import SAVE_AGAIN_SECONDS, TrainerRank
from asyncrl.trainer.recompute import Recomputation
from asyncrl.types import Generation, PolicyVersion, StopReason, Turn, VersionSpan
from asyncrl.vision.files import image_digest
from asyncrl.vision.image_ids import DIGEST_DIGITS, image_ids
from asyncrl.weights.manifest import Probe
from asyncrl.wire.messages.shared import ImageFiles, Stop, Welcome, WireMessage
from asyncrl.wire.messages.trainer import (
    AskDevices,
    Checkpointed,
    Commit,
    Committed,
    GaveUp,
    GrantDevices,
    Payloads,
    PlanRequest,
    Probed,
    TrainerHeartbeat,
    WorkPlan,
    is_answer,
)
from asyncrl.wire.sockets import Endpoints
from tests.fakes.image_data import LAYOUT, image_file, write_image_processor
from tests.fakes.raised import BASE_EXCEPTIONS

GENERATION = Generation((1,), (-0.5,), (VersionSpan(0, 1, 0, 0),), StopReason.STOP)


class FakeLearner:
    """Calls `note_work` after every micro-batch, as the real one does."""

    def __init__(self, config: Any, mesh: Any) -> None:
        self.step = 0
        self.stopwatch = Stopwatch()
        self.world = mesh
        self.policy = SimpleNamespace(vocabulary=10)
        self.token_budget = 1
        self.recomputation = Recomputation(TrainerConfig())
        self.note_work = lambda: None
        self.announce_wait = lambda wait_name: None
        self.rank_part = lambda planned: [list(planned)] if planned else []

    read_images = Learner.read_images
    behind_barrier = False

    def work(self, micros: int) -> None:
        for _ in range(micros):
            self.note_work()


class FakeLink:
    def __init__(self, *about: Any) -> None:
        self.sent: list[WireMessage] = []

    def send(self, message: WireMessage) -> None:
        self.sent.append(message)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=100.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(client, "time", clock)
    return clock


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace) -> TrainerRank:
    monkeypatch.setattr(module, "Learner", FakeLearner)
    monkeypatch.setattr(module, "try_largest", lambda learner: None)
    monkeypatch.setattr(client, "Link", FakeLink)
    monkeypatch.setattr(client, "Poller", lambda *about: None)
    publishing = SimpleNamespace(
        raise_failure=lambda: None, allow_pause=lambda: None, announced=None, unwritten_reason=""
    )
    monkeypatch.setattr(module, "Publishing", lambda *about: publishing)
    mesh: Any = SimpleNamespace(
        rank=0, size=1, device=torch.device("cpu"), gather=lambda value, kind: [value]
    )
    mesh.with_own_group = lambda seconds: mesh
    mesh.use_device = lambda: None
    monkeypatch.setattr(checkpoint, "snapshot", lambda learner, copy=True, device_offload=None: {})
    of = lambda learner, **lineage: CheckpointManifest(step=learner.step, **lineage)  # noqa: E731
    monkeypatch.setattr(checkpoint, "manifest_of", of)
    config = parse({"name": "t", "run_dir": str(tmp_path), "model": {"path": "m"}, "data": {"train": "d"}})
    return TrainerRank(config, Endpoints("", ""), mesh, "x")


def beats(rank: TrainerRank) -> list[int]:
    """`work` of all that was sent; nothing but beats was."""
    sent = rank.client.control.sent  # type: ignore[attr-defined]
    assert all(isinstance(message, TrainerHeartbeat) for message in sent)
    return [message.work for message in sent]


def test_behind_a_barrier_beats_go_on_and_count_what_was_done(
    rank: TrainerRank, clock: SimpleNamespace
) -> None:
    for micros in (3, 1, 4):
        rank.learner.work(micros)  # type: ignore[attr-defined]
        clock.now += 10 * HEARTBEAT_SECONDS
    assert beats(rank) == [1, 4, 5]  # one beat for each burst, however many micro-batches it has


def test_servers_may_join_after_every_micro_batch_and_during_waits(
    rank: TrainerRank, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[str] = []
    monkeypatch.setattr(rank.publishing, "allow_pause", lambda: pauses.append(rank.client.waiting_for))

    def advance(seconds: float) -> None:
        clock.now += seconds

    mail: list[tuple[WireMessage, list[bytes]]] = []
    rank.client._poller = SimpleNamespace(wait=advance)  # type: ignore[assignment]
    rank.client.bulk.receive = lambda timeout: None  # type: ignore[method-assign]
    rank.client.control.receive = lambda timeout: mail.pop() if mail else None  # type: ignore[method-assign]

    rank.learner.work(3)  # type: ignore[attr-defined]
    assert pauses == ["", "", ""]

    pauses.clear()
    answers = iter((None, "there"))
    rank.client._await_ranks("another rank", lambda: next(answers))
    assert set(pauses) == {"another rank"}

    pauses.clear()
    mail.append((Committed(1, publish=False), []))
    rank.client.request(Commit(0, 1, "", (), {}), "the commit of step 1")
    assert pauses == ["the commit of step 1"]

    pauses.clear()
    busy = iter((True, False))
    monkeypatch.setattr(Checkpointing, "is_writing", property(lambda saving: next(busy)))
    monkeypatch.setattr(rank, "_report_saved", lambda: None)
    rank._await_saved()
    assert set(pauses) == {"a checkpoint is being written (0 MB so far)"}


def test_a_rank_that_only_waits_beats_and_tells_no_work(rank: TrainerRank, clock: SimpleNamespace) -> None:
    rank.learner.work(2)  # type: ignore[attr-defined]
    for _ in range(4):
        clock.now += HEARTBEAT_SECONDS / 2
        rank.client._send_heartbeat_or_hello(clock.now)
    assert beats(rank) == [1, 2, 2]


def test_a_wait_that_is_over_is_withdrawn_before_the_rank_computes(
    rank: TrainerRank, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What follows may take minutes without a beat; each thing that takes long has its name."""
    seen: list[str] = []

    def last_reported_wait() -> str:
        return next(m.waiting for m in reversed(rank.client.control.sent) if isinstance(m, TrainerHeartbeat))  # type: ignore[attr-defined]

    def computes(what: str) -> None:
        clock.now += HEARTBEAT_SECONDS / 10  # a beat is not due by the time
        seen.append(f"{what}: {last_reported_wait()}")

    mail = [(WorkPlan(1, 1, "stop"), []), (WorkPlan(1, 0, "work"), [])]
    welcome = [(Welcome(1, 0, 0), [])]

    def stopped() -> None:
        raise Stopped

    rank.client.bulk.receive = lambda timeout: mail.pop() if mail else None  # type: ignore[method-assign]
    rank.client.control.receive = lambda timeout: welcome.pop() if welcome else None  # type: ignore[method-assign]
    rank.client._poller = SimpleNamespace(wait=lambda seconds: computes("it waits"))  # type: ignore[assignment]
    monkeypatch.setattr(module, "try_largest", lambda learner: computes("it tries"))
    monkeypatch.setattr(rank, "_publish_probe", lambda: computes("it scores"))
    monkeypatch.setattr(rank, "_train_part", lambda plan, work: computes("it trains"))
    monkeypatch.setattr(rank, "_save_last", stopped)
    with pytest.raises(Stopped):
        rank.loop()
    assert seen[:5] == [
        "it waits: the coordinator's welcome message",
        "it scores: ",
        "it tries: trying the largest micro-batch",
        "it waits: trajectories of step 1",
        "it trains: ",
    ]
    rank.timeline.close()
    assert '"trying the largest micro-batch"' in (rank.run_dir / "timeline" / "trainer-0.jsonl").read_text()


def test_the_probe_is_scored_for_a_published_version_and_not_while_steps_are_repeated(
    rank: TrainerRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restarted coordinator is told again."""
    done: list[Any] = []
    probe = Probe(((1, 2),), ((-1.0,),))
    monkeypatch.setattr(rank.publishing, "publish", done.append, raising=False)
    monkeypatch.setattr(rank.publishing, "score_probe", lambda: done.append("probe") or probe, raising=False)
    rank.is_repeating = True
    rank._publish_probe()
    assert not done
    # weights.every=2: step 3 was not published
    rank.is_repeating = False
    rank.learner.step = 3
    rank._publish_probe()
    rank._publish_probe()
    assert done == [PolicyVersion(0, 3), "probe", "probe"]
    probed = Probed(PolicyVersion(0, 3), probe)
    assert rank.client.control.sent == [probed, probed]  # type: ignore[attr-defined]
    rank.client.control.sent.clear()  # type: ignore[attr-defined]
    welcome = [(Welcome(2, 0, 3), [])]
    rank.client.control.receive = lambda wait: welcome.pop() if welcome else None  # type: ignore[method-assign]
    rank.client.bulk.receive = lambda wait: None  # type: ignore[method-assign]
    list(rank.client._received_messages())
    assert rank.client.control.sent == [probed]  # type: ignore[attr-defined]


def test_no_rank_trains_before_all_hold_their_payloads(rank: TrainerRank, clock: SimpleNamespace) -> None:
    """One that waited in a collective would fail when that takes too long."""
    looks = iter([False, False, True])

    class Others:
        send_word = arrive_at_meeting = lambda *about: None
        all_arrived = property(lambda self: next(looks))

    def advance(seconds: float) -> None:
        clock.now += seconds

    mail = [(WorkPlan(1, 0, "step"), [])]
    rank.client._broadcast = Others()  # type: ignore[assignment]
    rank.client._poller = SimpleNamespace(wait=advance)  # type: ignore[assignment]
    rank.client.bulk.receive = lambda timeout: mail.pop() if mail else None  # type: ignore[method-assign]
    rank.client.control.receive = lambda timeout: None  # type: ignore[method-assign]
    plan, work = rank._take_plan(0)
    assert (plan.kind, work, [*looks]) == ("step", [], [])
    assert "the other ranks' payloads" in [
        m.waiting for m in rank.client.control.sent if isinstance(m, TrainerHeartbeat)
    ]  # type: ignore[attr-defined]


def test_episodes_with_a_lost_or_damaged_image_are_not_trained(
    rank: TrainerRank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_image_processor(tmp_path)
    rank.learner.image_pixels = ImagePixels(str(tmp_path), LAYOUT)  # type: ignore[misc]
    colors = ("red", "blue", "green", "white")
    digests = [image_digest(image_file(color=color)) for color in colors]
    files = [image_file(color=color) for color in colors[:3]]
    files[2] = files[2][:60]
    work: list[Any] = [
        (SimpleNamespace(uid=f"g/{index}"), [Turn(0, (1, *image_ids(digest, 4)), GENERATION)])
        for index, digest in enumerate(digests)
    ]

    def answer_request(request: Any, purpose: str) -> tuple[ImageFiles, list[bytes]]:
        assert (request.digests, purpose) == (tuple(digests), "images of step 1")
        return ImageFiles(request.digests, lost=(digests[3],)), files

    monkeypatch.setattr(rank.client, "request", answer_request)
    trainable = rank._read_images(work, rank._fetch_images(digests, step=1))
    assert [trajectory.uid for trajectory, _ in trainable] == ["g/0", "g/1"]
    assert rank._lost_uids == ["g/2", "g/3"]
    assert f"episode g/2 is not trained: image {digests[2]}: a stored image cannot be" in caplog.text
    assert f"episode g/3 is not trained: image {digests[3]} is lost" in caplog.text
    assert rank._fetch_images([], step=1) == {}


def test_a_commit_names_the_trained_and_the_lost_episodes_of_all_ranks(
    rank: TrainerRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "is_tiny", lambda learner: True)
    monkeypatch.setattr(rank.learner, "finish", lambda: {"actor/grad_norm": 1.0}, raising=False)
    monkeypatch.setattr(rank.publishing, "rounding", None, raising=False)
    monkeypatch.setattr(rank.ratio_recorder, "save_step", lambda step: None)
    monkeypatch.setattr(rank, "_save_if_due", lambda: None)
    other_rank_uids = {"g/0": ["h/0"], "g/1": ["h/1", "h/2"]}
    monkeypatch.setattr(
        rank.trainer_world,
        "gather_data",
        lambda uids, value_type: [uids, other_rank_uids[uids[0]]] if uids else [uids],
        raising=False,
    )
    commits = list[Commit]()
    monkeypatch.setattr(
        rank.client,
        "request_for_all",
        lambda commit, purpose: commits.append(commit) or Committed(commit.step, publish=False),
    )

    rank._batch_uids = ["g/0"]
    rank._lost_uids = ["g/1"]
    for _ in range(2):
        rank.learner.step += 1
        rank._finish_batch(WorkPlan(rank.learner.step, 1, "step", plan_hash="p"))
    first_commit, second_commit = commits
    assert first_commit.trained == ("g/0", "h/0")
    assert first_commit.lost == ("g/1", "h/1", "h/2")
    assert first_commit.metrics["trainer/lost_episodes"] == 3
    assert (second_commit.trained, second_commit.lost) == ((), ())
    assert second_commit.metrics["trainer/lost_episodes"] == 0


def test_decoding_images_is_work_and_waiting_for_their_files_is_not(
    rank: TrainerRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = Turn(0, (1, *image_ids("1" * DIGEST_DIGITS, 4)), GENERATION)
    planned = SimpleNamespace(uid="g/0")
    now = 0.0

    def work_for(seconds: float) -> None:
        nonlocal now
        now += seconds

    def fetch(digests: Any, step: int) -> dict[str, bytes]:
        work_for(2.0)
        return {}

    def read_images(work: Any, files: Any) -> Any:
        work_for(3.0)
        return work

    rank.stopwatch = rank.learner.stopwatch = Stopwatch(lambda: now)
    rank.learner.rank_part = lambda trajectories: [[planned]]  # type: ignore[method-assign,assignment,list-item,return-value]
    monkeypatch.setattr(rank.learner, "read_images", read_images)
    monkeypatch.setattr(rank.client, "request_for_all", lambda *about, **how: WorkPlan(1, 0, "work"))
    monkeypatch.setattr(rank.client, "request", lambda *about: (Payloads(1, ("g/0",)), []))
    monkeypatch.setattr(module, "with_turns", lambda trajectories, frames: [(planned, [turn])])
    monkeypatch.setattr(rank, "_fetch_images", fetch)
    monkeypatch.setattr(rank.client, "meet_ranks", lambda purpose: work_for(4.0))
    _, work = rank._take_plan(0)
    assert work == [(planned, [turn])]
    assert rank.stopwatch.lap()[1] == {"wait_data": 6.0, "read_images": 3.0}
    assert (rank.stopwatch.busy_s, rank.stopwatch.idle_s) == (3.0, 6.0)


def test_the_work_of_reading_images_is_reported(rank: TrainerRank, tmp_path: Path) -> None:
    """A rank whose `work` stays the same for too long counts as stalled."""
    write_image_processor(tmp_path)
    learner = rank.learner
    learner.image_pixels = ImagePixels(  # type: ignore[misc]
        str(tmp_path), LAYOUT, note_work=lambda: learner.note_work()
    )
    files = [image_file(color=f"#0000{number:02x}") for number in range(2 * READ_AHEAD)]
    files_by_digest = {image_digest(file): file for file in files}
    work: list[Any] = [
        (SimpleNamespace(uid=f"g/{digest}"), [Turn(0, (1, *image_ids(digest, 4)), GENERATION)])
        for digest in files_by_digest
    ]
    assert rank._read_images(work, files_by_digest) == work
    assert rank.client.heartbeat_message().work == 2


def test_a_part_without_images_is_one_wait(rank: TrainerRank, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = SimpleNamespace(uid="g/1")
    rank.learner.rank_part = lambda trajectories: [[planned]]  # type: ignore[method-assign,assignment,list-item,return-value]
    monkeypatch.setattr(rank.client, "request_for_all", lambda *about, **how: WorkPlan(1, 0, "work"))
    monkeypatch.setattr(rank.client, "request", lambda *about: (Payloads(1, ("g/1",), ("g/1",)), []))
    monkeypatch.setattr(module, "with_turns", lambda trajectories, frames: trajectories)
    monkeypatch.setattr(rank.client, "meet_ranks", lambda purpose: None)
    spans = list[str]()
    monkeypatch.setattr(rank.timeline, "span", lambda name: spans.append(name) or nullcontext())
    _, work = rank._take_plan(0)
    assert (work, spans) == ([], ["wait_data"])
    assert rank._lost_uids == ["g/1"], "its turns could not be read"


@pytest.mark.parametrize("stops", [True, False])
def test_a_wait_for_other_ranks_has_an_end(rank: TrainerRank, clock: SimpleNamespace, stops: bool) -> None:
    """Rank 0 may have gone because of a stop that this rank is still to hear of."""

    def advance(seconds: float) -> None:
        clock.now += max(seconds, 1.0)

    def gone() -> None:
        raise DistNetworkError("closed")

    stop = [(Stop("over"), [])] if stops else []
    rank.client._poller = SimpleNamespace(wait=advance)  # type: ignore[assignment]
    rank.client.bulk.receive = lambda timeout: None  # type: ignore[method-assign]
    rank.client.control.receive = lambda timeout: stop.pop() if stop and clock.now > 100 else None  # type: ignore[method-assign]
    with pytest.raises(Stopped if stops else DistNetworkError):
        rank.client._await_ranks("rank 0", gone)
    limit = progress_limit(rank.config)
    with pytest.raises(DeadlineError, match=f"waited {limit:g} s for rank 0"):
        rank.client._await_ranks("rank 0", lambda: None)
    begun = clock.now
    assert rank.client._await_ranks("rank 0", lambda: clock.now > begun + 2 * limit or None, is_patient=True)


@pytest.mark.parametrize("answer", [GrantDevices(), Stop("over")])
def test_a_rank_asks_for_the_devices_until_they_are_free(
    monkeypatch: pytest.MonkeyPatch, answer: GrantDevices | Stop
) -> None:
    answers = [None, None, (answer, [])]
    closed: list[bool] = []
    link = FakeLink()
    link.receive = lambda timeout: answers.pop(0)  # type: ignore[attr-defined]
    link.close = lambda: closed.append(True)  # type: ignore[attr-defined]
    monkeypatch.setattr(client, "Link", lambda *about: link)
    with pytest.raises(Stopped, match="over") if isinstance(answer, Stop) else nullcontext():
        client.await_devices(Endpoints("", ""), 1, "x")
    assert link.sent == [AskDevices(1, "x")] * 3 and closed


class FailingDisk:
    """In place of `checkpoint.write`: the first `failures` fail."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.saved = list[CheckpointManifest]()

    def __call__(self, to: Any, state: Any, manifest: CheckpointManifest, *about: Any) -> None:
        self.failures -= 1
        if self.failures >= 0:
            raise CheckpointError("step-0: OSError: no space")
        self.saved.append(manifest)


def settle(rank: TrainerRank) -> None:
    """Wait for the end of the checkpoint under way, if there is one."""
    if rank.checkpointing._write_job is not None:
        rank.checkpointing._write_job.result.result(60)


def saved(rank: TrainerRank) -> bool:
    """Begin a checkpoint, and wait for its end."""
    rank.checkpointing.begin_checkpoint(1)
    settle(rank)
    return rank.checkpointing.poll_checkpoint()


@pytest.mark.parametrize(("every", "due"), [(7, 7), (0, 1000)])
def test_all_turns_since_the_newest_checkpoint_are_kept_so_there_is_one_in_the_end(
    rank: TrainerRank, every: int, due: int
) -> None:
    rank.config = msgspec.structs.replace(rank.config, checkpoint=CheckpointConfig(every=every))
    saved_steps = list[int]()

    def begin(trainer_epoch: int) -> bool:
        saved_steps.append(rank.learner.step)
        return True

    rank.checkpointing.begin_checkpoint = begin  # type: ignore[method-assign,assignment]
    for rank.learner.step in range(1, due + 1):
        rank._save_if_due()
    assert saved_steps == [due]


def test_training_goes_on_while_a_checkpoint_is_written_and_nobody_hears_of_it(
    rank: TrainerRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is due meanwhile comes after it. What was trained since is not in the first."""
    written = threading.Event()
    disk = FailingDisk(failures=0)

    def write(*about: Any) -> None:
        assert written.wait(60)
        disk(*about)

    monkeypatch.setattr(checkpoint, "write_checkpoint", write)
    every = rank.config.checkpoint.every
    for step in range(1, 3 * every + 1):
        rank.learner.step = step
        rank.checkpointing.add_trained([f"{step}.0"])
        if step == 2 * every + 1:
            assert rank.client.control.sent == []  # type: ignore[attr-defined]
            assert rank.checkpointing.newest_manifest is None and rank.checkpointing.is_writing
            written.set()
        if step > 2 * every:
            settle(rank)
        rank._save_if_due()
    settle(rank)
    rank._report_saved()
    lists = [(manifest.parent, manifest.step, len(manifest.trained)) for manifest in disk.saved]
    assert lists == [
        (-1, every, every),
        (every, 2 * every + 1, every + 1),
        (2 * every + 1, 3 * every, every - 1),
    ]
    checkpointed = [message for message in rank.client.control.sent if isinstance(message, Checkpointed)]  # type: ignore[attr-defined]
    assert [message.step for message in checkpointed] == [every, 2 * every + 1, 3 * every]


def test_a_checkpoint_that_cannot_be_written_is_tried_again_and_lists_all(
    rank: TrainerRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FailingDisk(failures=1)
    monkeypatch.setattr(checkpoint, "write_checkpoint", disk)
    rank.checkpointing.add_trained(["0.0"])
    rank.checkpointing.begin_checkpoint(1)
    settle(rank)
    assert rank.client.heartbeat_message().checkpoint_problem == "step-0: OSError: no space", (
        "a long step does not hide the failure"
    )
    assert not rank.checkpointing.poll_checkpoint()
    assert rank.checkpointing.is_due and not rank.checkpointing.is_writing  # not after `every` more steps
    assert rank.client.heartbeat_message().waiting == "not saved: step-0: OSError: no space"
    rank.publishing.unwritten_reason = "no room for weights"  # type: ignore[misc]
    assert rank.client.heartbeat_message().waiting.endswith("no space; no room for weights")
    rank.checkpointing.add_trained(["1.0"])
    assert saved(rank) and rank.client.heartbeat_message().waiting == "no room for weights"
    assert rank.client.heartbeat_message().checkpoint_problem == ""
    assert [(manifest.parent, manifest.trained) for manifest in disk.saved] == [(-1, ("0.0", "1.0"))]


def test_the_last_checkpoint_is_tried_until_stop_comes(
    rank: TrainerRank, monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace
) -> None:
    monkeypatch.setattr(checkpoint, "write_checkpoint", disk := FailingDisk(failures=2))

    def advance(seconds: float) -> None:
        clock.now += seconds

    rank.client._poller = SimpleNamespace(wait=advance)  # type: ignore[assignment]
    mail = [(WorkPlan(1, 0, "stop"), [])]
    rank._await_welcome = lambda: Welcome(1, 0, 1)  # type: ignore[method-assign]
    rank.client.bulk.receive = lambda timeout: mail.pop() if mail else None  # type: ignore[method-assign]
    stop = (Stop("stopped"), [])
    rank.client.control.receive = lambda timeout: stop if disk.saved else None  # type: ignore[method-assign]
    with pytest.raises(Stopped):
        rank.loop()
    assert clock.now >= 100.0 + 2 * SAVE_AGAIN_SECONDS and len(disk.saved) == 1


def test_a_commit_waits_longer_than_a_full_disk_may_stop_the_coordinator(
    rank: TrainerRank, clock: SimpleNamespace
) -> None:
    def advance(seconds: float) -> None:
        clock.now += 10 * seconds

    rank.client._poller = SimpleNamespace(wait=advance)  # type: ignore[assignment]
    for link in (rank.client.control, rank.client.bulk):
        link.receive = lambda timeout: None  # type: ignore[method-assign]
    with pytest.raises(DeadlineError, match="the commit of step 0"):
        rank._commit_step(WorkPlan(1, 1, "step"), {}, trained=[], lost=[])
    assert any(isinstance(message, Commit) for message in rank.client.control.sent)  # type: ignore[attr-defined]
    assert clock.now > 100.0 + rank.config.launch.stall_timeout


def test_what_took_too_much_memory_is_reported_until_the_coordinator_knows(
    rank: TrainerRank, clock: SimpleNamespace
) -> None:
    def advance(seconds: float) -> None:
        clock.now += 3 * seconds

    stop = (Stop("micro-batches of 512 tokens"), [])
    rank.client._poller = SimpleNamespace(wait=advance)  # type: ignore[assignment]
    rank.learner.micro_batch_size = (1000, 4)
    rank.learner.recomputation.wrap(0, lambda: None)
    rank.learner.recomputation.recompute_at_least(2)
    rank.client.bulk.receive = lambda timeout: None  # type: ignore[method-assign]
    rank.client.control.receive = lambda timeout: stop if clock.now > 110 else None  # type: ignore[method-assign]
    reported = rank.report_failure(MemoryError("no more"))
    assert reported == "out of memory (MemoryError: no more): micro-batches of 512 tokens"
    sent = [m for m in rank.client.control.sent if isinstance(m, GaveUp)]  # type: ignore[attr-defined]
    assert len(sent) > 1 and set(sent) == {
        GaveUp(0, 0, 1, "memory", "out of memory (MemoryError: no more)", 1000, 4, 2, 1)
    }


@pytest.mark.parametrize(
    ("size", "error", "raised"),
    [
        ((1000, 4), MemoryError, GaveUpError),
        ((0, 0), MemoryError, MemoryError),
        *(((1000, 4), kind, UserCodeError) for kind in BASE_EXCEPTIONS),
    ],
)
def test_only_in_a_micro_batch_are_smaller_ones_asked_for(
    monkeypatch: pytest.MonkeyPatch,
    size: tuple[int, int],
    error: type[BaseException],
    raised: type[Exception],
) -> None:
    """Elsewhere (the optimizer's step, a copy of the weights) it is a crash, and counts as a restart."""

    def loop() -> None:
        raise error("its text")

    stopped = mock.Mock(side_effect=Stopped("less"))
    rank = SimpleNamespace(
        loop=loop,
        close=lambda: None,
        trainer_world=SimpleNamespace(rank=0),
        trainer_epoch=1,
        client=SimpleNamespace(request=stopped),
    )
    recomputation = Recomputation(TrainerConfig())
    rank.learner = SimpleNamespace(micro_batch_size=size, step=0, recomputation=recomputation)
    rank.report_failure = partial(TrainerRank.report_failure, rank)
    monkeypatch.setattr(module, "TrainerRank", lambda *about: rank)
    mesh = SimpleNamespace(arranged=lambda *about: None)
    monkeypatch.setattr(
        module, "world", SimpleNamespace(join_ranks=lambda *about, **options: mesh, leave_ranks=lambda: None)
    )
    config = parse({"name": "t", "model": {"path": "m"}, "data": {"train": "d"}})
    with pytest.raises(raised):
        module.run(config, Endpoints("", ""), 0, "x")


def raised_from(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "lacks"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (raised_from(ValueError("a user's loss"), torch.OutOfMemoryError()), True),
        (raised_from(ConfigError("set a smaller model"), torch.OutOfMemoryError()), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (OSError("no space left"), False),
    ],
)
def test_which_errors_are_a_lack_of_memory(error: Exception, lacks: bool) -> None:
    assert lacks_memory(error) is lacks


def test_only_the_answer_to_this_request_is_taken() -> None:
    """A plan may come again for an earlier take, which was sent twice."""
    take = PlanRequest(1, 7, 2)
    assert is_answer(WorkPlan(7, 2, "step"), take)
    assert not is_answer(WorkPlan(7, 1, "work"), take) and not is_answer(WorkPlan(6, 2, "step"), take)
    assert not is_answer(Committed(7, True), take)
    assert not is_answer(WorkPlan(7, 2, "step"), TrainerHeartbeat(0, 0.0, 0.0))  # it asks for nothing
