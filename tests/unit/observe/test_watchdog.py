"""Which wait has lasted too long."""

from __future__ import annotations

from asyncrl.observe.watchdog import Watchdog


def test_a_wait_is_overdue_past_its_limit_and_says_its_name() -> None:
    dog = Watchdog()
    dog.begin("rank 1", limit=10, now=0)
    assert dog.verdict(10) is None
    overdue = dog.verdict(11)
    assert overdue is not None and str(overdue) == "waited 11 s for rank 1 (limit 10 s)"


def test_progress_starts_a_wait_anew_and_an_end_forgets_it() -> None:
    dog = Watchdog()
    dog.begin("a", limit=10, now=0)
    dog.moved("a", now=9)
    dog.moved("unknown", now=9)
    assert dog.verdict(18) is None
    assert dog.verdict(20) is not None
    dog.end("a")
    dog.end("a")
    assert dog.verdict(99) is None


def test_a_wait_that_is_open_keeps_its_start() -> None:
    dog = Watchdog()
    dog.begin("a", limit=10, now=0)
    dog.begin("a", limit=10, now=8)
    assert dog.verdict(11) is not None


def test_the_worst_wait_is_named() -> None:
    dog = Watchdog()
    dog.begin("long but patient", limit=90, now=0)
    dog.begin("short", limit=1, now=50)
    overdue = dog.verdict(100)
    assert overdue is not None and overdue.name == "short"
