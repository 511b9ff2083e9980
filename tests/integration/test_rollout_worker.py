"""A real worker against real sockets: what it says, what it repeats, and when it stops talking."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

import msgspec
import psutil
import pytest
from transformers import AutoModelForCausalLM

from asyncrl.buffer.payloads import decode_part
from asyncrl.config import RunConfig
from asyncrl.data.samples import load_samples
from asyncrl.rollout.worker import run
from asyncrl.runtime.process import ignore_end_signals
from asyncrl.tools.snapshots import Snapshots
from asyncrl.types import NO_VERSION, EpisodeEnd, PolicyVersion, StopReason
from asyncrl.weights.manifest import WeightsRef
from asyncrl.wire.messages.shared import Loaded, LoadWeights, Stop
from asyncrl.wire.messages.worker import (
    Ack,
    Cancel,
    Failed,
    Fenced,
    Finished,
    Generated,
    MinVersion,
    Replied,
    Sampled,
)
from asyncrl.wire.sockets import Endpoints
from tests.fakes import worker as fake
from tests.fakes.chatml import save_tiny_chat_model
from tests.fakes.coordinator import FakeCoordinator
from tests.fakes.forked import FORKED
from tests.fakes.weights import publish
from tests.fakes.worker import WorkerThread, sample

ROOT = Path(__file__).resolve().parents[2]
KEY = 7  # of a turn that its model does not end soon
EXAMPLE = ROOT / "examples" / "multiturn" / "calculator"


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def hub() -> Iterator[FakeCoordinator]:
    coordinator = FakeCoordinator()
    yield coordinator
    coordinator.close()


@pytest.fixture
def worker(hub: FakeCoordinator, model_path: str, tmp_path: Path) -> Iterator[WorkerThread]:
    """A joined worker; told to stop afterwards."""
    fake.seams.__init__()  # type: ignore[misc]
    thread = WorkerThread(fake.config(model_path, tmp_path), hub.endpoints)
    thread.start()
    hub.join()
    yield thread
    fake.seams.tool_gate.set()
    if thread.is_alive():
        hub.withheld = ()
        hub.control.send(hub.peer, Stop("end of the test"))
    assert thread.wait_for_end() in (0, 1)


def engine() -> fake.CallingEngine:
    return fake.seams.engines[0]


def test_an_assigned_episode_is_played_to_its_end(hub: FakeCoordinator, worker: WorkerThread) -> None:
    attempt = hub.assign("e", sample())
    turn = hub.expect(Generated, attempt=attempt, turn=0)
    hub.expect(Replied, turn=0)
    hub.expect(Generated, turn=1)
    end = hub.expect(Finished, attempt=attempt)
    assert (end.result.reward, end.result.end, end.stats.turns, end.stats.tool_calls) == (
        1.0,
        EpisodeEnd.ANSWERED,
        2,
        1,
    )
    assert [record.seq for record in hub.seen(Generated | Replied | Finished)] == [1, 2, 3, 4]
    assert len(hub.turn(turn).generation.ids) == len(hub.turn(turn).generation.logprobs)
    hub.pump()
    assert hub.beat is not None
    assert (hub.beat.held, hub.beat.assigned) == ((), 1)
    assert hub.beat.tokens == sum(len(hub.turn(r).generation.ids) for r in hub.seen(Generated))


def test_tools_do_not_run_before_the_ack(hub: FakeCoordinator, worker: WorkerThread) -> None:
    hub.withheld = (Generated,)
    attempt = hub.assign("e", sample())
    turn = hub.expect(Generated, turn=0)
    hub.pump(8)
    assert fake.seams.looks == []
    assert hub.beat is not None
    assert "acks" in hub.beat.waiting
    assert hub.beat.held == (attempt,)
    hub.withheld = ()
    hub.send_bulk(Ack(turn.seq))
    hub.expect(Finished, attempt=attempt)
    assert fake.seams.looks == ["looked"]


def test_an_ending_is_held_until_it_is_durable(hub: FakeCoordinator, worker: WorkerThread) -> None:
    hub.withheld = (Finished,)
    attempt = hub.assign("e", sample())
    end = hub.expect(Finished)
    hub.pump()
    assert hub.beat is not None
    assert hub.beat.held == (attempt,)
    hub.send_bulk(Ack(end.seq))
    hub.until(lambda: hub.beat and hub.beat.held == (), "empty heartbeat")


def test_a_restarted_coordinator_gets_what_was_not_acknowledged(
    hub: FakeCoordinator, worker: WorkerThread
) -> None:
    hub.withheld = (Generated,)
    hub.assign("e", sample())
    hub.expect(Generated, seq=1)
    hub.restart()
    hub.withheld = ()
    hub.expect(Generated, seq=1)
    assert hub.expect(Finished).seq == 4
    assert fake.seams.looks == ["looked"]


def test_a_worker_that_hears_nothing_fences_itself_and_comes_back(
    hub: FakeCoordinator, worker: WorkerThread
) -> None:
    assert hub.hello is not None and hub.hello.version == NO_VERSION
    hub.send(LoadWeights(WeightsRef(PolicyVersion(1, 3), "x"), "train"))
    hub.expect(Loaded)
    engine().gate.clear()
    attempt = hub.assign("e", sample())
    hub.until(lambda: hub.beat and hub.beat.held == (attempt,), "held episode")
    hub.welcoming = False
    hub.until(lambda: engine().cancelled, "cancelled episode")
    assert hub.hello.version == PolicyVersion(1, 3)
    hub.welcoming = True
    hub.until(lambda: hub.beat and hub.beat.held == (), "empty heartbeat")
    engine().gate.set()
    again = hub.assign("e", sample(), attempt=1)
    assert hub.expect(Finished).attempt == again
    assert not [r for r in hub.seen(Generated) if r.attempt == attempt]


@pytest.mark.parametrize("word", [Cancel, Fenced])
def test_a_fenced_episode_says_nothing_more(
    hub: FakeCoordinator, worker: WorkerThread, word: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten = list[str]()
    monkeypatch.setattr(Snapshots, "forget_episode", lambda self, episode: forgotten.append(episode))
    engine().gate.clear()
    attempt = hub.assign("e", sample())
    hub.until(lambda: hub.beat and hub.beat.held == (attempt,), "held episode")
    (hub.send if word is Cancel else hub.send_bulk)(word(attempt))
    hub.until(lambda: hub.beat and hub.beat.held == (), "empty heartbeat")
    engine().gate.set()
    other_attempt = hub.assign("f", sample())
    hub.expect(Finished, attempt=other_attempt)
    assert {record.attempt for record in hub.seen(Generated)} == {other_attempt}
    assert "e/0" in engine().released
    assert ("e" in forgotten) == (word is Cancel)  # a worker that is fenced may go on with it


def test_turns_wait_for_fresh_weights_by_name(hub: FakeCoordinator, worker: WorkerThread) -> None:
    hub.send(MinVersion(min_version=2))
    hub.assign("e", sample())
    wait = hub.until(lambda: hub.beat and hub.beat.waiting, "named wait")
    assert wait.startswith("weights v2: engine has v0")
    assert hub.seen(Generated) == []
    hub.send(LoadWeights(WeightsRef(PolicyVersion(0, 3), "x"), "train"))
    assert hub.expect(Loaded).checksum == "sum-3"
    assert hub.turn(hub.expect(Generated)).generation.spans[0].version == 3
    hub.expect(Finished)


def test_validation_samples_its_own_version(hub: FakeCoordinator, worker: WorkerThread) -> None:
    hub.send(LoadWeights(WeightsRef(PolicyVersion(0, 1), "x"), "eval"))
    hub.expect(Loaded, lane="eval")
    hub.send(LoadWeights(WeightsRef(PolicyVersion(0, 5), "x"), "train"))
    hub.expect(Loaded, lane="train")
    hub.assign("val0/greedy/0", sample(), lane="eval")
    hub.assign("e", sample())
    ends = {hub.expect(Finished).attempt.uid: hub.arrived[hub._read - 1] for _ in range(2)}
    versions = {
        record.attempt.uid: hub.turn(record).generation.spans[-1].version for record in hub.seen(Generated)
    }
    assert versions == {"val0/greedy/0": 1, "e": 5}
    assert "<|im_start|>tool\nseen" in ends["val0/greedy/0"].text
    assert ends["e"].text == ""


def test_an_episode_goes_on_from_another_workers_turns(hub: FakeCoordinator, worker: WorkerThread) -> None:
    hub.assign("e", sample())
    first = hub.expect(Generated, turn=0)
    replied = hub.expect(Replied)
    second = hub.expect(Generated, turn=1)
    hub.expect(Finished)
    frames = [hub.frames[first.seq][0], hub.frames[replied.seq][0]]
    attempt = hub.assign("e", sample(), frames, attempt=1)
    again = hub.expect(Generated, attempt=attempt)
    assert again.turn == 1
    ids = [hub.turn(record).generation.ids for record in (second, again)]
    assert ids[0] == ids[1]
    assert hub.expect(Finished).stats.turns == 2
    assert fake.seams.looks == ["looked"]


def test_stop_ends_the_worker_with_what_it_had_said(hub: FakeCoordinator, worker: WorkerThread) -> None:
    fake.seams.tool_gate.clear()
    hub.assign("e", sample())
    hub.until(lambda: fake.seams.looks, "running tool")
    hub.send(Stop("enough"))
    assert worker.wait_for_end() == 0
    assert engine().closed
    assert hub.seen(Finished) == []


def test_a_worker_left_alone_leaves(hub: FakeCoordinator, model_path: str, tmp_path: Path) -> None:
    launch = {"lease": 0.2, "start_timeout": 0.5}
    thread = WorkerThread(fake.config(model_path, tmp_path, launch=launch), hub.endpoints)
    thread.start()
    assert thread.wait_for_end() == 1


# -- a process of its own, with the embedded engine --------------------------------------------------


def work(config: bytes, endpoints: Endpoints) -> NoReturn:
    ignore_end_signals()
    sys.exit(run(msgspec.json.decode(config, type=RunConfig), endpoints, 0, "process"))


@contextmanager
def process(hub: FakeCoordinator, config: RunConfig) -> Iterator[BaseProcess]:
    """A joined worker process; killed afterwards if it still runs."""
    child = FORKED.Process(target=work, args=(msgspec.json.encode(config), hub.endpoints))
    child.start()
    try:
        hub.join()
        yield child
    finally:
        child.kill()
        child.join()


REWARD = """
import pathlib, time
def compute_score(data_source, solution_str, ground_truth, extra_info):
    if ground_truth == "hang":
        pathlib.Path(__file__).with_suffix(".called").touch()
        time.sleep(1000)
    return 1.0
"""


def test_a_process_with_the_embedded_engine(hub: FakeCoordinator, model_path: str, tmp_path: Path) -> None:
    """It leaves at a signal to all processes of the job, by which rewards and tools die, too: no episode ends
    by that."""
    (tmp_path / "reward.py").write_text(REWARD)
    rollout = {"max_new_tokens": 24, "max_tokens": 200, "reward": f"{tmp_path}/reward.py:compute_score"}
    config = fake.config(
        model_path, tmp_path, engine={"name": "torch"}, rollout=rollout, launch={"lease": 60.0}
    )
    with process(hub, config) as child:
        hub.assign("a", sample())
        turn = hub.turn(hub.expect(Generated))
        assert turn.generation.stop is StopReason.LENGTH
        assert (len(turn.generation.ids), turn.generation.spans[-1].version) == (24, 0)
        assert all(logprob < 0 for logprob in turn.generation.logprobs)
        assert hub.expect(Finished).result.end is EpisodeEnd.LENGTH
        model = AutoModelForCausalLM.from_pretrained(model_path)
        ref = publish(model.state_dict(), tmp_path / "weights", version=PolicyVersion(0, 4))
        hub.send(LoadWeights(ref, "train"))
        loaded = hub.expect(Loaded)
        assert (loaded.error, loaded.ref) == ("", ref)
        hub.send(MinVersion(4))
        hub.assign("b", sample())
        assert hub.turn(hub.expect(Generated)).generation.spans[0].version == 4
        hub.expect(Finished)
        hub.assign("c", msgspec.structs.replace(sample(), ground_truth_json='"hang"'))
        hub.expect(Generated)
        hub.until((tmp_path / "reward.called").exists, "reward under way")
        started = psutil.Process(child.pid).children(recursive=True)
        for one in (*started, psutil.Process(child.pid)):
            with suppress(psutil.NoSuchProcess):  # its wrapper was faster
                one.send_signal(signal.SIGTERM)
        hub.until(lambda: not child.is_alive(), "end")
        assert child.exitcode == 0 and hub.seen(Failed) == [] and len(hub.seen(Finished)) == 2
    assert '"decode"' in (tmp_path / "t" / "timeline" / "rollout-0.jsonl").read_text()


@pytest.mark.skipif(not (EXAMPLE / "model" / "config.json").exists(), reason="the example has no model yet")
def test_the_examples_model_uses_its_tool(hub: FakeCoordinator, tmp_path: Path) -> None:
    rollout = {"tools": ["calculator"], "slots": 16, "max_tokens": 512, "max_new_tokens": 128}
    config = fake.config(
        str(EXAMPLE / "model"), tmp_path, engine={"name": "torch"}, rollout=rollout, launch={"lease": 60.0}
    )
    samples = load_samples(str(EXAMPLE / "data" / "test.parquet"))[:16]
    with process(hub, config):
        for index, row in enumerate(samples):
            hub.assign(f"e{index}", row)
        ends = [hub.expect(Finished) for _ in samples]
    assert sum(end.stats.tool_calls for end in ends) > 0
    assert sum(end.result.reward for end in ends) > 0
    assert hub.seen(Failed) == []


def test_a_turn_goes_on_after_its_parts_when_its_worker_is_killed(
    hub: FakeCoordinator, model_path: str, tmp_path: Path
) -> None:
    """By kill -9: nothing of the parts is sampled again, and the turn is the one that it would have been."""
    (tmp_path / "reward.py").write_text(REWARD)
    rollout = {"max_new_tokens": 1500, "max_tokens": 1700, "reward": f"{tmp_path}/reward.py:compute_score"}
    rollout |= {"part_seconds": 0.02}
    config = fake.config(
        model_path, tmp_path, engine={"name": "torch"}, rollout=rollout, launch={"lease": 60.0}
    )
    with process(hub, config) as child:
        hub.assign("a", sample(), key=KEY)
        for _ in range(3):
            hub.expect(Sampled)
        child.kill()
        child.join()
    assert hub.seen(Generated) == []
    parts = [hub.frames[record.seq][0] for record in hub.seen(Sampled)]
    durable = sum(len(decode_part(part).sampled.ids) for part in parts)
    hub.hellos = 0
    with process(hub, config):
        hub.assign("a", sample(), parts, attempt=1, key=KEY, parts=len(parts))
        turn = hub.turn(hub.expect(Generated))
        hub.expect(Finished)
        hub.pump(1)
        assert hub.beat is not None and hub.beat.tokens == len(turn.generation.ids) - durable
        hub.assign("b", sample(), key=KEY)
        whole_turn = hub.turn(hub.expect(Generated))
    resumed = turn.generation
    uninterrupted = whole_turn.generation
    assert turn.context == whole_turn.context
    assert (resumed.ids, resumed.stop) == (uninterrupted.ids, uninterrupted.stop)
    assert resumed.logprobs == pytest.approx(uninterrupted.logprobs, abs=2e-5)
    assert {span.version for span in resumed.spans} == {0} and resumed.spans[-1].end == len(resumed.ids)
