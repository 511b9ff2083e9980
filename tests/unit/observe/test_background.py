"""Calls that are made in a thread of their own."""

from __future__ import annotations

import logging
import threading

import pytest

from asyncrl.observe.background import Background


def test_calls_that_raise_are_counted_and_told_once_and_the_next_one_is_made(
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls, made = Background("calls", 10), threading.Event()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            calls.call(lambda: [][0])
        calls.call(made.set)
        assert calls.close(30)
    assert made.is_set() and calls.lost == 2
    assert [record.message for record in caplog.records] == ["calls: IndexError: list index out of range"]


def test_calls_beyond_the_most_are_lost() -> None:
    calls, go = Background("calls", 1), threading.Event()
    begun = threading.Event()
    calls.call(lambda: (begun.set(), go.wait(30))[0])
    assert begun.wait(30)
    calls.call(lambda: None)
    calls.call(lambda: None)
    assert calls.lost == 1 and not calls.idle
    go.set()
    assert calls.close(30)
