"""The publisher's thread: the latest version wins, nobody waits, errors reach the owner."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.trainer import publishing
from asyncrl.trainer.publishing import PublisherThread
from asyncrl.types import PolicyVersion
from asyncrl.weights.manifest import Superseded, WeightsRef
from asyncrl.weights.snapshot import Snapshot
from asyncrl.wire.messages.trainer import Published
from asyncrl.wire.sockets import Endpoints
from tests.fakes.weights import snapshot_of

DEADLINE = 60.0
COPY_SECONDS = 0.25


def version(number: int) -> Snapshot:
    return snapshot_of({"a": torch.ones(1)}, PolicyVersion(0, number))


class Slow:
    """A writer that writes when it is let to; `started` once per write."""

    directory = Path("/nowhere")

    def __init__(self) -> None:
        self.started = threading.Semaphore(0)
        self.go = threading.Semaphore(0)
        self.announced: list[int] = []
        self.fails: Exception | None = None
        writer: Any = self
        self.publisher = PublisherThread(writer, Endpoints("", ""))
        self.publisher._announce_version = self.announce  # type: ignore[method-assign]

    def write_version(self, snapshot: Snapshot) -> WeightsRef:
        self.started.release()
        assert self.go.acquire(timeout=DEADLINE)
        if self.fails is not None:
            raise self.fails
        return WeightsRef(snapshot.version, "")

    def announce(self, announcement: Published) -> None:
        assert announcement.write_s >= 0 and announcement.snapshot_s == COPY_SECONDS
        self.announced.append(announcement.ref.version.step)

    def submit(self, number: int) -> None:
        self.publisher.submit_snapshot(version(number), COPY_SECONDS)


def test_a_newer_version_replaces_one_that_waits():
    slow = Slow()
    slow.submit(1)
    assert slow.started.acquire(timeout=DEADLINE)
    for number in (2, 3, 4):
        slow.submit(number)
    slow.go.release(2)
    assert slow.publisher.close(DEADLINE)
    assert slow.announced == [1, 4]


def test_a_version_that_is_gone_is_passed_over():
    slow = Slow()
    slow.fails = Superseded("a newer one")
    slow.go.release()
    slow.submit(1)
    assert slow.started.acquire(timeout=DEADLINE)
    slow.submit(2)
    assert slow.started.acquire(timeout=DEADLINE)
    slow.fails = None
    slow.go.release()
    assert slow.publisher.close(DEADLINE)
    assert slow.announced == [2] and slow.publisher.error is None


def test_a_full_disk_is_waited_for_and_the_newest_version_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "FULL_RETRY_SECONDS", 0.0)
    slow = Slow()
    slow.fails = OSError(errno.ENOSPC, "no space left on device")
    slow.go.release()
    slow.submit(1)
    assert slow.started.acquire(timeout=DEADLINE)
    assert slow.started.acquire(timeout=DEADLINE), "it is not tried again"
    assert "no space" in slow.publisher.full_error
    slow.submit(2)
    slow.go.release()
    assert slow.started.acquire(timeout=DEADLINE)
    slow.fails = None
    slow.go.release()
    assert slow.publisher.close(DEADLINE)
    assert slow.announced == [2] and not slow.publisher.full_error and slow.publisher.error is None


def test_what_a_write_failed_with_is_raised_at_the_next():
    slow = Slow()
    slow.fails = OSError("no such device")
    slow.submit(1)
    slow.go.release()
    assert slow.publisher.close(DEADLINE)
    with pytest.raises(OSError, match="no such"):
        slow.submit(2)


def test_closing_does_not_wait_longer_than_its_limit():
    slow = Slow()
    slow.submit(1)
    assert slow.started.acquire(timeout=DEADLINE)
    assert not slow.publisher.close(0.05)
    slow.go.release()
    assert slow.publisher.close(DEADLINE)
