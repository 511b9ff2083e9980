"""Notes: the findings of checks before a run; and the checks, functions that yield notes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from asyncrl.launch.inputs import Inputs

Level = Literal["ok", "warning", "error", "skipped"]


class Note(NamedTuple):
    """One finding of a check."""

    level: Level
    text: str
    subject: str = ""  # name of the check, once collected


def ok(text: str) -> Note:
    return Note("ok", text)


def warning(text: str) -> Note:
    return Note("warning", text)


@dataclass(frozen=True)
class Check:
    """A function that yields notes, with the name of the check. `required_checks`: names of checks without
    which this check would find nothing new; the check is skipped if one of them fails."""

    name: str
    required_checks: tuple[str, ...]
    run: Callable[[Inputs], Iterable[Note]]

    def __call__(self, inputs: Inputs) -> Iterable[Note]:
        return self.run(inputs)


def preflight_check(
    name: str, requires: tuple[str, ...] = ()
) -> Callable[[Callable[[Inputs], Iterable[Note]]], Check]:
    """Make a Check of a generator of notes, which raises ConfigError for faults that must be corrected."""
    return lambda run: Check(name, requires, run)
