"""Failures as values, and errors as one line."""

from __future__ import annotations

import pytest

from asyncrl.errors import one_line, recorded


def test_recorded_keeps_an_exception_and_goes_on() -> None:
    with recorded() as failure:
        raise ValueError("two\n  lines")
    assert failure and failure.line == "ValueError: two lines"
    assert "raise ValueError" in failure.trace


def test_recorded_without_a_failure_is_false_and_empty() -> None:
    with recorded() as failure:
        pass
    assert not failure and failure.line == failure.trace == ""


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_recorded_lets_interrupts_travel(error: type[BaseException]) -> None:
    with pytest.raises(error), recorded():
        raise error


def test_one_line_is_cut_and_never_empty() -> None:
    assert one_line(ValueError()) == "ValueError"
    assert len(one_line(ValueError("x" * 999), limit=50)) == 50
