"""Run tests and write what became of each as JSON. It runs inside a sandbox, where only pytest is there.

    python3 -s watch.py RESULT SECONDS DIRECTORY PYTEST-ARGUMENTS…

A test that takes SECONDS of CPU time, or waits four times as long, ends all of it.

RESULT: {"outcomes": {test: [passed|failed|skipped, message]}, "errors": {file that is not imported: message},
"lines": {test: {file: [line]}}, "seconds": {test: of CPU}, "versions": {"python": …, "pytest": …}}. `lines`
are those of files in DIRECTORY ("": of none) that a test ran. /tests/run_pytest.py starts pytest, as in the
task.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Generator
from types import CodeType, FrameType
from typing import Any

import pytest

WAITING = 4
ENOUGH = 1000
"""Steps of a function that are watched in each test: a loop of a million runs no other lines later on."""


class Watcher:
    def __init__(self, seconds: float, directory: str) -> None:
        self.limit = seconds
        self.directory = directory
        self.outcomes: dict[str, tuple[str, str]] = {}
        self.errors: dict[str, str] = {}
        self.seconds: dict[str, float] = {}
        self.lines: dict[str, defaultdict[str, list[int]]] = {}
        self.codes: dict[CodeType, list[Any]] = {}  # steps left, lines; of this test
        self.wind()

    def wind(self) -> None:
        """Wind up the timers that end this process."""
        signal.setitimer(signal.ITIMER_PROF, self.limit)
        signal.setitimer(signal.ITIMER_REAL, WAITING * self.limit)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the result of setup, call, teardown or a part of a test: the worst result counts."""
        outcome = "skipped" if hasattr(report, "wasxfail") else report.outcome
        worst, _ = self.outcomes.get(report.nodeid, ("", ""))
        if outcome == "failed" and worst != "failed":
            crash = getattr(report.longrepr, "reprcrash", None)
            self.outcomes[report.nodeid] = (outcome, getattr(crash, "message", None) or str(report.longrepr))
        elif outcome == "skipped" or (report.when == "call" and not worst):
            self.outcomes[report.nodeid] = (outcome, "")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.errors[report.nodeid] = str(report.longrepr).strip().rpartition("\n")[2]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self.wind()
        started = time.process_time()

        if self.directory:
            self.codes.clear()
            threading.settrace(self.enter)
            sys.settrace(self.enter)

        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
            self.seconds[item.nodeid] = time.process_time() - started
            lines_of_test = self.lines[item.nodeid] = defaultdict(list)
            for code, (_, seen) in self.codes.items():
                if seen:
                    lines_of_test[code.co_filename.removeprefix(self.directory + "/")] += sorted(seen)

    def enter(self, frame: FrameType, event: str, argument: object) -> Any:
        if (watched := self.codes.get(code := frame.f_code)) is None:
            left = ENOUGH if code.co_filename.startswith(self.directory) else 0
            watched = self.codes[code] = [left, set()]
        return self.step if watched[0] > 0 else None

    def step(self, frame: FrameType, event: str, argument: object) -> Any:
        watched = self.codes[frame.f_code]
        if event == "line":
            watched[0] -= 1
            watched[1].add(frame.f_lineno)
        return self.step if watched[0] > 0 else None


def main() -> None:
    result, seconds, directory, *arguments = sys.argv[1:]
    watcher = Watcher(float(seconds), directory)
    del sys.path[0]  # the directory of this file
    status = runpy.run_path("/tests/run_pytest.py")["main"](arguments, plugins=[watcher])

    with open(result, "w") as file:
        records = {name: getattr(watcher, name) for name in ("outcomes", "errors", "lines", "seconds")}
        versions = {"python": ".".join(map(str, sys.version_info[:2])), "pytest": pytest.__version__}
        json.dump(records | {"versions": versions}, file)

    sys.stdout.flush()
    os._exit(status)  # whatever threads the tests left


if __name__ == "__main__":
    main()
