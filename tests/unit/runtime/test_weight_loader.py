"""Failed loads: whether a version's files are to blame, or the process that loads them."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncrl.errors import EngineError
from asyncrl.observe.timeline import Timeline
from asyncrl.runtime import weight_loader
from asyncrl.runtime.weight_loader import LOAD_TRIES, PROCESS_PATIENCE, LoadFailures, WeightLoader
from asyncrl.types import PolicyVersion
from asyncrl.weights import disk
from asyncrl.weights.manifest import Manifest, WeightsError, WeightsRef
from asyncrl.wire.messages.shared import Loaded
from tests.fakes.weights import publish


@contextmanager
def no_descriptors() -> Iterator[None]:
    """No file can be opened in the body."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class ReadingEngine:
    """Reads and verifies a version's files, as engines do; `error` is raised afterwards."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    async def load(self, ref: WeightsRef) -> Manifest:
        manifest, _ = await asyncio.to_thread(disk.read_arrays, ref)
        if self.error is not None:
            raise self.error
        return manifest

    async def score(self, ids: tuple[int, ...]) -> tuple[float, ...]:
        return ()


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def overwrite(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 0xFF
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "during", "error", "process_failed"),
    [
        (None, no_descriptors, None, True),
        (None, nullcontext, MemoryError(), True),
        (None, nullcontext, EngineError("the engine failed"), True),
        (None, nullcontext, caused(WeightsError("server x: failed"), EngineError("HTTP 500")), True),
        (None, nullcontext, TimeoutError(), True),
        (
            None,
            nullcontext,
            caused(WeightsError("the sender cannot be reached"), ConnectionRefusedError()),
            False,
        ),
        (None, nullcontext, WeightsError("tensor w does not match its manifest entry"), False),
        (overwrite, nullcontext, None, False),
        (Path.unlink, nullcontext, None, False),
    ],
    ids=["descriptors", "memory", "broken", "server", "late", "no trainer", "mismatch", "damaged", "gone"],
)
async def test_a_failed_load_says_who_failed(
    tmp_path: Path,
    damage: Callable[[Path], None] | None,
    during: Callable[[], Any],
    error: Exception | None,
    process_failed: bool,
) -> None:
    ref = publish({"w": torch.ones(4)}, tmp_path / "weights", PolicyVersion(1, 0))
    if damage is not None:
        damage(Path(ref.path) / disk.PAYLOAD)

    async def engine() -> ReadingEngine:
        return ReadingEngine(error)

    loader = WeightLoader("train", Timeline(tmp_path / "timeline.jsonl"), 60.0, engine)
    loader.offer_version(ref)
    with during():
        answer = await loader.load_next()
    assert answer.error and answer.process_failed is process_failed, answer.error


@pytest.mark.parametrize(("damaged", "seconds"), [(0, PROCESS_PATIENCE), (1, 600.0)])
def test_a_process_that_fails_has_less_patience(
    monkeypatch: pytest.MonkeyPatch, damaged: int, seconds: float
) -> None:
    """One answer that blames the files: the next trainer may have others."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(weight_loader, "time", SimpleNamespace(monotonic=lambda: clock.now))
    failures = LoadFailures()
    ref = WeightsRef(PolicyVersion(1, 0), "")
    for number in range(LOAD_TRIES):
        lacking = number >= damaged
        failures.add_answer(Loaded(ref, "train", "", 0.0, "Too many open files", process_failed=lacking))
    clock.now = seconds - 1
    assert not failures.give_up_reason(600.0)
    clock.now = seconds
    assert "Too many open files" in failures.give_up_reason(600.0)
