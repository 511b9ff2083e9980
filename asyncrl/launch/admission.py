"""Tokens with which processes join a run under way: a command asks the launcher for one, through a FIFO.

    asyncrl invite ── makes RUN/invite-ROLE-…, which only its user may open ──► launcher
          ▲                                                                        │ Invite to the
          └─────────────────────── the token, written into it ◄────────────────────┘ coordinator

Only the launcher has the keys of the run, and they are in no file.
"""

from __future__ import annotations

import os
import secrets
import select
from contextlib import suppress
from pathlib import Path

from asyncrl.errors import ConfigError
from asyncrl.wire.enrolment import invitation
from asyncrl.wire.sockets import Endpoints, Link

TOKEN_SECONDS = 600.0  # in which a token must be used
ANSWER_SECONDS = 10.0  # for the launcher, which looks ten times a second
TOKEN_BYTES = 4096  # what a FIFO takes at once


class Admission:
    """The launcher's side."""

    def __init__(self, run_dir: Path, endpoints: Endpoints) -> None:
        self._run_dir, self._endpoints = run_dir, endpoints

    def tick(self, link: Link) -> None:
        """Answer all who ask. A token is of use once the coordinator has read the Invite."""
        for path in self._run_dir.glob("invite-*"):
            with suppress(OSError):  # nobody reads any more
                fifo = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
                path.unlink()
                with os.fdopen(fifo, "w") as asking:
                    invite, token = invitation(self._endpoints, path.name.split("-")[1], TOKEN_SECONDS)
                    link.send(invite)
                    asking.write(token)


def ask_for_token(run_dir: Path, role: str, seconds: float = ANSWER_SECONDS) -> str:
    """The command's side. ConfigError when no launcher answers in time."""
    path = run_dir / f"invite-{role}-{secrets.token_hex(4)}"  # others may ask at the same time
    os.mkfifo(path, 0o600)
    fifo = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        ready, _, _ = select.select([fifo], [], [], seconds)
        if token := os.read(fifo, TOKEN_BYTES) if ready else b"":
            return token.decode()
    finally:
        os.close(fifo)
        path.unlink(missing_ok=True)
    raise ConfigError(
        f"{run_dir}: its launcher does not answer within {seconds:g} s: is the run up, here, and yours?"
    )
