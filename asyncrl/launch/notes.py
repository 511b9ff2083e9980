"""Defines what a check before a run is, and what it says."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from asyncrl.launch.data import Inputs

Level = Literal["ok", "warning", "error", "skipped"]


class Note(NamedTuple):
    """One thing that a check has found."""

    level: Level
    text: str
    check: str = ""  # by which one, once it is collected


def ok(text: str) -> Note:
    return Note("ok", text)


def warning(text: str) -> Note:
    return Note("warning", text)


@dataclass(frozen=True)
class Check:
    """`needs`: names of checks without which this one says nothing new; it is skipped if one fails."""

    name: str
    needs: tuple[str, ...]
    run: Callable[[Inputs], Iterable[Note]]

    def __call__(self, inputs: Inputs) -> Iterable[Note]:
        return self.run(inputs)


def check(name: str, needs: tuple[str, ...] = ()) -> Callable[[Callable[[Inputs], Iterable[Note]]], Check]:
    """Make a check of a generator of notes. It raises ConfigError for what has to be corrected."""
    return lambda run: Check(name, needs, run)
