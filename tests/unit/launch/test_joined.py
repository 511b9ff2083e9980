"""A process on another machine: what it writes comes into the run directory, once and whole."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncrl.config import RunConfig, parse
from asyncrl.coordinator.journal import TransactionalOutbox
from asyncrl.coordinator.peers import WrittenFiles
from asyncrl.errors import ConfigError
from asyncrl.launch import joined
from asyncrl.launch.joined import JoinedProcess, SentFiles, Ticket, claim_directory, release_directory
from asyncrl.launch.placement import PlannedProcess
from asyncrl.launch.process import CRASHED, ProcessSpec
from asyncrl.observe import files
from asyncrl.weights.disk import weights_directory
from asyncrl.wire.messages.channels import ToCoordinatorBulk
from asyncrl.wire.messages.shared import MAX_PIECE_BYTES, WrittenBytes
from asyncrl.wire.sockets import Gate, Hub, choose_endpoints


class Home:
    """The coordinator's end, and a machine elsewhere with one process."""

    def __init__(self, directory: Path) -> None:
        self.run_dir = directory / "home/t"
        self.there = directory / "there/t"
        self.run_dir.mkdir(parents=True)
        self.endpoints = choose_endpoints("127.0.0.1", 0)
        self.start()

    def start(self) -> None:
        self.gate = Gate(self.endpoints)
        self.hub = Hub(self.endpoints.bulk, ToCoordinatorBulk, self.gate)
        self.outbox: Any = TransactionalOutbox(self.hub, self.hub)
        self.files = WrittenFiles(self.run_dir, self.outbox)

    def close(self) -> None:
        self.hub.close()
        self.gate.close()

    def ticket(self, role: str = "rollout", index: int = 1, target: str = "os:abort") -> Ticket:
        base = {"name": "t", "run_dir": str(self.there.parent)}
        config: RunConfig = parse(base | {"model": {"path": str(self.there)}, "data": {"train": "d"}})
        process_spec = ProcessSpec(PlannedProcess(role, index, 1, target), "launch.1")
        return Ticket(process_spec, config, self.endpoints.for_role(role), "2026-11-24 00ff")

    def sender(self, role: str = "rollout", index: int = 1) -> SentFiles:
        (self.there / f"{role}-{index}").mkdir(parents=True, exist_ok=True)
        return SentFiles(self.there / f"{role}-{index}", self.ticket(role, index))

    def write(self, name: str, content: bytes) -> None:
        (self.there / name).parent.mkdir(parents=True, exist_ok=True)
        with (self.there / name).open("ab") as file:
            file.write(content)

    def during(self, act: Callable[[], Any]) -> Any:
        """What it returns, while files are taken."""
        with ThreadPoolExecutor(1) as pool:
            acting = pool.submit(act)
            while not acting.done():
                self.hub.socket.poll(5)
                while (received := self.hub.receive()) is not None:
                    self.files.append_bytes(*received, time.monotonic())
                self.outbox.flush()
            return acting.result()

    def read(self, name: str) -> bytes:
        return (self.run_dir / name).read_bytes()


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    made = Home(tmp_path)
    yield made
    made.close()


def test_files_are_added_once_also_after_a_restart_of_either_end(home: Home) -> None:
    long = b"x" * (2 * MAX_PIECE_BYTES + 5)
    (home.run_dir / "logs").mkdir()
    (home.run_dir / "logs/rollout-1.log").write_bytes(b"of an earlier launch\n")
    home.write("logs/rollout-1.log", long)
    home.write("timeline/rollout-1.jsonl", b"{}\n")
    for name in ("run.db", "logs/rollout-2.log", "ratios/step-1-1-0.jsonl"):
        home.write(name, b"not of this process")
    first = home.sender()
    assert home.during(first.send_new)
    home.write("logs/rollout-1.log", b"more")
    assert home.during(first.send_new) and home.during(first.send_new)
    first.link.close()
    second = home.sender()  # of a process that was started anew there
    home.close()
    home.start()
    home.write("logs/rollout-1.log", b", and more")
    assert home.during(second.send_new) and home.files.expects_more(time.monotonic())
    assert not home.files.expects_more(time.monotonic() + 60), "it may be gone"
    assert home.during(lambda: second.send_new(is_last=True)) and not home.files.expects_more(
        time.monotonic()
    )
    assert home.read("logs/rollout-1.log") == b"of an earlier launch\n" + long + b"more, and more"
    assert home.read("timeline/rollout-1.jsonl") == b"{}\n"
    assert {path.name for path in home.run_dir.rglob("*") if path.is_file()} == {
        *("rollout-1.log", "rollout-1.jsonl")
    }
    second.link.close()


def test_what_an_answer_was_lost_for_is_not_added_twice(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined, "SEND_TIMEOUT", 0.5)
    sender = home.sender()
    home.write("logs/rollout-1.log", b"a log")
    home.write("timeline/rollout-1.jsonl", b"once")
    assert home.during(sender.send_new)
    home.write("timeline/rollout-1.jsonl", b", only")
    answer = home.outbox.to_bulk
    lost = list[Any]()

    def lose_data(peer: bytes, message: Any) -> None:
        lost.append(message) if message.size == 10 and not lost else answer(peer, message)

    home.outbox.to_bulk = lose_data
    assert not home.during(sender.send_new) and lost
    assert home.during(sender.send_new) and home.read("timeline/rollout-1.jsonl") == b"once, only"
    for _ in range(2):  # as a socket that is closed still sends
        sender.link.send(WrittenBytes("timeline/rollout-1.jsonl", 10), (b".",))
    assert home.during(sender.send_new) and home.read("timeline/rollout-1.jsonl") == b"once, only."
    sender.link.close()


def test_a_full_disk_here_does_not_make_it_forget_what_it_sent(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = home.sender()
    home.write("logs/rollout-1.log", b"once")
    assert home.during(sender.send_new)

    def full(path: Path, content: bytes) -> int:
        path.open("wb").close()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full)
        assert home.during(sender.send_new)
    sender.link.close()
    again = home.sender()
    assert home.during(again.send_new) and home.read("logs/rollout-1.log") == b"once"
    again.link.close()


def test_who_was_silent_for_the_longest_time_is_forgotten_where_many_send(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.coordinator.peers.MAX_SENDERS", 2)
    for peer, now in (
        (b"rollout/0/a", 0.0),
        (b"rollout/1/b", 1.0),
        (b"rollout/0/a", 2.0),
        (b"rollout/2/c", 3.0),
    ):
        home.files.append_bytes(peer, WrittenBytes("logs/rollout-1.log", 0), [], now)
    assert list(home.files._senders) == [b"rollout/0/a", b"rollout/2/c"]


def test_the_day_of_the_run_is_never_half_written_for_others(home: Home) -> None:
    first = JoinedProcess(home.ticket())
    started = next((home.there / "elsewhere").iterdir()) / "t/started"
    with started.open() as read:
        second = JoinedProcess(home.ticket(index=2))
        assert read.read() == started.read_text() == "2026-11-24 00ff"
        assert not os.path.samestat(os.fstat(read.fileno()), started.stat())
    for one in (first, second):
        home.during(one.wait_for_exit)


def test_without_a_coordinator_files_wait(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined, "SEND_TIMEOUT", 0.2)
    sender = home.sender()
    home.close()
    home.write("logs/rollout-1.log", b"waits")
    assert not sender.send_new() and not sender.send_new(is_last=True)
    home.start()
    monkeypatch.setattr(joined, "SEND_TIMEOUT", 2.0)
    tries = (
        sender.send_new() for _ in range(15)
    )  # a connection that is dialled again loses what waits in it
    assert home.during(lambda: any(tries)) and home.read("logs/rollout-1.log") == b"waits"
    sender.link.close()


def test_a_rank_sends_its_ratios_and_those_that_were_deleted_stay_here(home: Home) -> None:
    sender = home.sender("trainer", 1)
    for step in (1, 2, 3):
        home.write(f"ratios/step-{step}-1-0.jsonl", b"{}\n")
        home.write(f"ratios/step-{step}-0-0.jsonl", b"of another rank")
        (home.there / f"ratios/step-{step - 1}-1-0.jsonl").unlink(missing_ok=True)
        assert home.during(sender.send_new)
    assert sorted(path.name for path in (home.run_dir / "ratios").iterdir()) == [
        f"step-{step}-1-0.jsonl" for step in (1, 2, 3)
    ]
    sender.link.close()


def test_a_long_log_is_cut_at_both_ends_of_the_line(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_LOG_BYTES", 1000)
    monkeypatch.setattr(files, "LOG_EDGE_BYTES", 10)
    sender = home.sender()
    home.write("logs/rollout-1.log", b"a" * 5000)
    home.write("timeline/rollout-1.jsonl", b"{}\n" * 1000)
    assert home.during(sender.send_new) and len(home.read("logs/rollout-1.log")) < 100
    assert home.read("timeline/rollout-1.jsonl") == b"{}\n" * 1000, "a timeline stays whole"
    files.bound_log(home.there / "logs/rollout-1.log")
    home.write("logs/rollout-1.log", b"goes on")
    home.during(sender.send_new)
    home.write("logs/rollout-1.log", b", and on")
    assert home.during(sender.send_new) and home.read("logs/rollout-1.log").endswith(b", and on")
    sender.link.close()


@pytest.mark.parametrize(
    "name",
    [
        *("../logs/rollout-1.log", "/logs/rollout-1.log", "logs/../../rollout-1.log", "logs/a/rollout-1.log"),
        *("run.db", "logs/rollout-1.log\n", "logs/coordinator-0.log", "ratios/step-1-1-0.jsonl"),
    ],
)
def test_names_that_are_no_files_of_the_sender_are_left_out(name: str, home: Home) -> None:
    sender = home.sender()
    taken = WrittenBytes("logs/rollout-1.log", 0)
    sender.link.send(msgspec.structs.replace(taken, name=name), (b"x",))
    assert home.during(sender.send_new), "what is refused does not disturb others"
    assert not [path for path in home.run_dir.rglob("*") if path.is_file() and path.stat().st_size]
    sender.link.close()


def test_no_message_adds_more_than_a_piece(home: Home) -> None:
    sender = home.sender()
    sender.link.send(WrittenBytes("logs/rollout-1.log", 0), (b"x" * MAX_PIECE_BYTES, b"y"))
    assert home.during(sender.send_new) and home.read("logs/rollout-1.log") == b"x" * MAX_PIECE_BYTES
    sender.link.close()


def test_what_a_killed_launch_has_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    cache = weights_directory("shm", tmp_path / "killed-here/run", "run", needed_bytes=0)
    for directory in (tmp_path / "killed-here/run", tmp_path / "killed-there/run", cache):
        directory.mkdir(parents=True)
    alive = claim_directory(tmp_path / "alive-here", "run", "here")
    assert not (tmp_path / "killed-here").exists() and not cache.exists()
    claim_directory(tmp_path / "other-here", "run", "here")
    assert {path.name for path in tmp_path.iterdir()} == {"alive-here", "other-here", "killed-there"}
    again = claim_directory(tmp_path / "alive-here", "run", "here")
    run_dir = tmp_path / "alive-here/run"
    cache = weights_directory("shm", run_dir, "run", needed_bytes=0)
    cache.mkdir()
    release_directory(alive, run_dir)
    assert cache.exists() and run_dir.parent.exists(), "another process uses them"
    release_directory(again, run_dir)
    assert not cache.exists() and not run_dir.parent.exists()


def test_a_directory_that_the_last_process_of_before_removes_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = tmp_path / "launch-here"
    real = fcntl.flock
    waited = list[int]()

    def removed_meanwhile(lock: int, how: int) -> None:
        if not waited:
            parent.rmdir()
        waited.append(lock)
        real(lock, how)

    monkeypatch.setattr(joined.fcntl, "flock", removed_meanwhile)
    lock = claim_directory(parent, "run", "here")
    assert os.path.samestat(os.fstat(lock), parent.stat()), "else another one removes it under this process"
    os.close(lock)


def test_last_words_and_the_exit_code_of_a_crash_come_home(home: Home) -> None:
    code, kept = home.during(lambda: JoinedProcess(home.ticket()).wait_for_exit())
    assert (code, kept) == (CRASHED, "")
    words = home.read("logs/rollout-1.log").decode()
    assert "rollout-1 starts" in words and words.rstrip().endswith("given)"), words
    assert not any((home.there / "elsewhere").iterdir())


def test_without_a_coordinator_last_words_are_kept_and_it_is_said_where(
    home: Home, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.setattr(joined, "SEND_TIMEOUT", 0.1)
    code, kept = JoinedProcess(home.ticket()).wait_for_exit(show_log=True)
    assert code == CRASHED
    log = Path(kept.partition(":")[2]) / "logs/rollout-1.log"
    assert b"rollout-1 crashed" in log.read_bytes() == capfdbinary.readouterr().out
    descriptor = os.open(log.parents[2], os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(descriptor)


def test_a_closed_terminal_does_not_end_the_role(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as terminal:
        monkeypatch.setattr("sys.stdout", terminal)
        code, kept = home.during(lambda: JoinedProcess(home.ticket()).wait_for_exit(show_log=True))
    assert (code, kept) == (CRASHED, "") and b"rollout-1 crashed" in home.read("logs/rollout-1.log")


def test_a_log_that_was_cut_is_shown_from_its_new_end(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"a" * 100)
    with path.open("rb") as log, path.open("ab") as role:
        assert joined.copy_log_to_stdout(log)
        os.truncate(path, 10)
        assert joined.copy_log_to_stdout(log)
        role.write(b"goes on")
        role.flush()
        assert joined.copy_log_to_stdout(log)
    assert capfdbinary.readouterr().out == b"a" * 100 + b"goes on"


def test_a_machine_without_the_launchers_directory_is_refused(home: Home) -> None:
    with pytest.raises(ConfigError, match="the launcher's directory /gone does not exist on this machine"):
        replace(home.ticket(), working_directory="/gone").enter_directory()
