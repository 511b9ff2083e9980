"""Calls that are made in a thread of their own."""

from __future__ import annotations

import logging
import sys
import threading

import pytest

from asyncrl.errors import UserCodeError
from asyncrl.observe.background import BackgroundCalls


def test_calls_that_raise_are_counted_and_logged_once_and_the_next_one_is_made(
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls = BackgroundCalls("calls", 10)
    call_made = threading.Event()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            calls.call(lambda: [][0])
        calls.call(call_made.set)
        assert calls.close(30)
    assert call_made.is_set() and calls.lost_calls == 2
    assert [record.message for record in caplog.records] == ["calls: IndexError: list index out of range"]


def test_calls_beyond_the_most_are_lost() -> None:
    calls = BackgroundCalls("calls", 1)
    go = threading.Event()
    call_begun = threading.Event()
    calls.call(lambda: (call_begun.set(), go.wait(30))[0])
    assert call_begun.wait(30)
    calls.call(lambda: None)
    calls.call(lambda: None)
    assert calls.lost_calls == 1 and not calls.idle
    go.set()
    assert calls.close(30)


def test_a_call_that_hangs_is_waited_for_once_and_one_that_is_lost_not_at_all() -> None:
    calls = BackgroundCalls("calls", 1)
    go = threading.Event()
    with pytest.raises(TimeoutError, match=r"no answer within 0\.05 s"):
        calls.ask(lambda: go.wait(60), 0.05)
    assert calls._call_started is not None
    calls._call_started -= 1000  # it has hung for long
    with pytest.raises(TimeoutError, match="no answer within 500 s"):
        calls.ask(lambda: None, 500)
    with pytest.raises(TimeoutError, match="earlier calls are still waiting for an answer"):
        calls.ask(lambda: None, 2000)
    assert not calls.close(500)
    go.set()


def test_a_library_that_ends_the_program_is_answered_and_its_thread_goes_on() -> None:
    calls = BackgroundCalls("calls", 10)
    with pytest.raises(UserCodeError, match="SystemExit: 3"):
        calls.ask(lambda: sys.exit(3), 60)
    calls.call(lambda: sys.exit(4))
    assert calls.ask(lambda: 5, 60) == 5 and calls.lost_calls == 1 and calls.close(60)
