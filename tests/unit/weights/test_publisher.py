"""The publisher's thread: the latest wins, nobody waits, errors reach the owner."""

from __future__ import annotations

import errno
import threading

import pytest
import torch

from asyncrl.types import PolicyVersion
from asyncrl.weights import publisher
from asyncrl.weights.manifest import Superseded, WeightsRef
from asyncrl.weights.publisher import Publisher
from asyncrl.weights.snapshot import Snapshot
from tests.fakes.weights import snapshot_of

DEADLINE = 60.0


def version(number: int) -> Snapshot:
    return snapshot_of({"a": torch.ones(1)}, PolicyVersion(0, number))


class Slow:
    """Writes when it is let to; `started` once per write."""

    def __init__(self) -> None:
        self.started, self.go = threading.Semaphore(0), threading.Semaphore(0)
        self.announced: list[int] = []
        self.fails: Exception | None = None
        self.publisher = Publisher(self.write, self.announce)

    def write(self, snapshot: Snapshot) -> WeightsRef:
        self.started.release()
        assert self.go.acquire(timeout=DEADLINE)
        if self.fails is not None:
            raise self.fails
        return WeightsRef(snapshot.version, "")

    def announce(self, ref: WeightsRef, snapshot_s: float, write_s: float) -> None:
        assert write_s >= 0
        self.announced.append(ref.version.step)


def test_a_newer_version_replaces_one_that_waits():
    slow = Slow()
    slow.publisher.submit(version(1))
    assert slow.started.acquire(timeout=DEADLINE)
    for number in (2, 3, 4):
        slow.publisher.submit(version(number))
    slow.go.release(2)
    assert slow.publisher.close(DEADLINE)
    assert slow.announced == [1, 4]


def test_a_version_that_is_gone_is_passed_over():
    slow = Slow()
    slow.fails = Superseded("a newer one")
    slow.go.release()
    slow.publisher.submit(version(1))
    assert slow.started.acquire(timeout=DEADLINE)
    slow.publisher.submit(version(2))
    assert slow.started.acquire(timeout=DEADLINE)
    slow.fails = None
    slow.go.release()
    assert slow.publisher.close(DEADLINE)
    assert slow.announced == [2] and slow.publisher.error is None


def test_a_full_disk_is_waited_for_and_the_newest_version_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "FULL_RETRY", 0.0)
    slow = Slow()
    slow.fails = OSError(errno.ENOSPC, "no space left on device")
    slow.go.release()
    slow.publisher.submit(version(1))
    assert slow.started.acquire(timeout=DEADLINE)
    assert slow.started.acquire(timeout=DEADLINE), "it is not tried again"
    assert "no space" in slow.publisher.full
    slow.publisher.submit(version(2))
    slow.go.release()
    assert slow.started.acquire(timeout=DEADLINE)
    slow.fails = None
    slow.go.release()
    assert slow.publisher.close(DEADLINE)
    assert slow.announced == [2] and not slow.publisher.full and slow.publisher.error is None


def test_what_a_write_failed_with_is_raised_at_the_next():
    slow = Slow()
    slow.fails = OSError("no such device")
    slow.publisher.submit(version(1))
    slow.go.release()
    assert slow.publisher.close(DEADLINE)
    with pytest.raises(OSError, match="no such"):
        slow.publisher.submit(version(2))


def test_closing_does_not_wait_longer_than_it_is_told():
    slow = Slow()
    slow.publisher.submit(version(1))
    assert slow.started.acquire(timeout=DEADLINE)
    assert not slow.publisher.close(0.05)
    slow.go.release()
    assert slow.publisher.close(DEADLINE)
