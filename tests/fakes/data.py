"""Samples as a coordinator finds them."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence

import pytest

from asyncrl.data import Samples
from asyncrl.types import Message, Sample


def rows(count: int) -> list[Sample]:
    return [Sample(row, "s", (Message("user", f"{row}?"),), "1") for row in range(count)]


def stored(samples: Sequence[Sample]) -> Samples:
    """In a file without a name."""
    with tempfile.TemporaryFile() as file:
        return Samples.write(file, [samples])


def give(monkeypatch: pytest.MonkeyPatch, samples: Sequence[Sample]) -> None:
    """Give the samples to every opener of a run's samples."""
    monkeypatch.setattr(Samples, "open", lambda path: stored(samples))
