"""The signals that ask a run to end."""

from __future__ import annotations

import signal

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # SIGHUP: the terminal was closed


def ignore_endings() -> None:
    """In a process of a role, which the launcher stops in order: a signal to all processes of a job would end
    it without the last checkpoint. A handler, as programs that it starts would inherit SIG_IGN."""
    for number in ENDING:
        signal.signal(number, lambda *_: None)
