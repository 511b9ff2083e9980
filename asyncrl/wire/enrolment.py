"""Lets in a process that the launcher did not start: a token lets one key of one role enrol, once.

    launcher ──Invite(public half of the token)──► coordinator      who has the token is let in, to enrol
        └── a person passes on the token ──► the process ──Enrol(public half of its own key)──► coordinator

A token is a key pair of its own, with the coordinator's address and public key. Who reads it after its use
can do nothing with it; the secret key of the process never leaves that process.
"""

from __future__ import annotations

import base64
import time
from contextlib import suppress
from typing import cast

import msgspec

from asyncrl.errors import UNDECODABLE, ConfigError, DeadlineError
from asyncrl.wire.messages.channels import ToToken
from asyncrl.wire.messages.shared import Enrol, Enrolled, Invite
from asyncrl.wire.sockets import COORDINATOR, TOKEN, Endpoints, Link, identity, new_key_pair

TRY_SECONDS = 0.1
KNOWN_SECONDS = 2.0  # until the coordinator knows a token that was just made
Z85_BYTES = 40  # of a key, as text


def invitation(endpoints: Endpoints, role: str, seconds: float) -> tuple[Invite, str]:
    """Returns the message for the coordinator, and the token: a line of text, which is secret."""
    key = new_key_pair()
    keys = {COORDINATOR: msgspec.structs.replace(endpoints.keys[COORDINATOR], secret=""), TOKEN: key}
    content = msgspec.msgpack.encode(msgspec.structs.replace(endpoints, keys=keys))
    return Invite(key.public, role, seconds), base64.urlsafe_b64encode(content).decode()


def read_token(token: str | bytes) -> Endpoints:
    """Return the address and keys in a token. ConfigError when it is not one."""
    try:
        given = msgspec.msgpack.decode(base64.urlsafe_b64decode(token.strip()), type=Endpoints)
        keys = (given.keys[COORDINATOR].public, given.keys[TOKEN].public, given.keys[TOKEN].secret)
        if not given.control.startswith("tcp://") or {len(key.encode("ascii")) for key in keys} != {
            Z85_BYTES
        }:
            raise ValueError
    except (*UNDECODABLE, ValueError, KeyError):
        raise ConfigError("this is no token of a run; copy all of it") from None
    return given


def enrol(token: str, seconds: float = 30.0) -> tuple[Endpoints, Enrolled]:
    """Make a key pair for this process, let the coordinator know its public half, and return where it is
    dialled, with that pair, and what this process is from now on. ConfigError: the token is none, or is
    refused, or nobody answers in time."""
    given = read_token(token)
    key = new_key_pair()
    begin = time.monotonic()
    while (answer := _asked(given, Enrol(key.public), begin + seconds)) is None:
        if time.monotonic() > begin + KNOWN_SECONDS:
            raise ConfigError(
                f"the coordinator at {given.control} refuses this token: it was used, is over, or is of "
                "another launch; get a new one"
            )
        time.sleep(TRY_SECONDS)
    keys = {COORDINATOR: given.keys[COORDINATOR], answer.role: key}
    return msgspec.structs.replace(given, keys=keys), answer


def _asked(given: Endpoints, message: Enrol, until: float) -> Enrolled | None:
    """Ask once; None: the token is refused. ConfigError where nobody answers."""
    link = Link(given.control, ToToken, identity(TOKEN, 0, given.keys[TOKEN].public), given.keys)
    try:
        with suppress(DeadlineError):  # where the token was refused before, there is no queue
            link.send(message)
        while not link.refused:
            if time.monotonic() > until:
                raise ConfigError(f"nobody answers at {given.control}: is the run up?")
            if (answer := link.receive(TRY_SECONDS)) is not None:
                return cast(Enrolled, answer[0])
    finally:
        link.close()
    return None
