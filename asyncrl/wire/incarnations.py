"""Names of process starts. Those of one launch are in order: what a dead process sent can arrive after its
successor's first message, and must not be taken for the newer one's."""

from __future__ import annotations


def incarnation_of(launch: str, start: int) -> str:
    """The name of the start number `start` within a launch."""
    return f"{launch}.{start}"


def launch_of(incarnation: str) -> str:
    """The launch that a process was started by; "" of a name in another form."""
    return incarnation.rpartition(".")[0]


def is_older(one: str, other: str) -> bool:
    """True if `one` was started before `other` in the same launch. Any text may come: int() would raise for
    thousands of digits."""
    (launch, _, start), (its, _, later) = one.rpartition("."), other.rpartition(".")
    numbers = start.isdecimal() and later.isdecimal()
    return launch == its and numbers and (len(start), start) < (len(later), later)
