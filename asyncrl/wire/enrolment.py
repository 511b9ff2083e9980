"""Admits a process that the launcher did not start: a token lets a single key of a role enrol, once.

    launcher ──Invite(public half of the token)──► coordinator      the owner of the token may enrol
        └── a person passes on the token ──► the process ──Enrol(public half of its own key)──► coordinator

A token is a separate key pair, with the coordinator's address and public key. A used token is worthless to a
reader; the secret key of the process never leaves that process.
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

RETRY_SECONDS = 0.1
TOKEN_KNOWN_SECONDS = 2.0  # time until the coordinator knows a new token
KEY_LENGTH = 40  # characters of a key in Z85


def invitation(endpoints: Endpoints, role: str, seconds: float) -> tuple[Invite, str]:
    """Return the message for the coordinator, and the token: a line of text, which is secret."""
    token_key = new_key_pair()
    keys = {COORDINATOR: msgspec.structs.replace(endpoints.keys[COORDINATOR], secret=""), TOKEN: token_key}
    token_content = msgspec.msgpack.encode(msgspec.structs.replace(endpoints, keys=keys))
    return Invite(token_key.public, role, seconds), base64.urlsafe_b64encode(token_content).decode()


def read_token(token: str | bytes) -> Endpoints:
    """Return the address and keys in a token. ConfigError for an invalid token."""
    try:
        endpoints = msgspec.msgpack.decode(base64.urlsafe_b64decode(token.strip()), type=Endpoints)
        token_keys = (
            endpoints.keys[COORDINATOR].public,
            endpoints.keys[TOKEN].public,
            endpoints.keys[TOKEN].secret,
        )
        key_lengths = {len(key.encode("ascii")) for key in token_keys}
        if not endpoints.control.startswith("tcp://") or key_lengths != {KEY_LENGTH}:
            raise ValueError
    except (*UNDECODABLE, ValueError, KeyError):
        raise ConfigError("this is not a valid token for a run; copy the complete token") from None

    return endpoints


def enrol(token: str, seconds: float = 30.0) -> tuple[Endpoints, Enrolled]:
    """Make a key pair for this process, enrol the public half, and return the coordinator's endpoints with
    that key pair, and the role of this process. ConfigError: the token is invalid, or is refused, or nobody
    answers in time."""
    token_endpoints = read_token(token)
    own_key = new_key_pair()
    started_at = time.monotonic()
    request = Enrol(own_key.public)
    while (enrolled := _request_enrolment(token_endpoints, request, started_at + seconds)) is None:
        if time.monotonic() > started_at + TOKEN_KNOWN_SECONDS:
            raise ConfigError(
                f"the coordinator at {token_endpoints.control} rejects this token, which was used, has "
                "expired, or belongs to another launch; get a new token"
            )
        time.sleep(RETRY_SECONDS)

    keys = {COORDINATOR: token_endpoints.keys[COORDINATOR], enrolled.role: own_key}
    return msgspec.structs.replace(token_endpoints, keys=keys), enrolled


def _request_enrolment(token_endpoints: Endpoints, message: Enrol, deadline: float) -> Enrolled | None:
    """Ask once; None: the token is refused. ConfigError where nobody answers."""
    name = identity(TOKEN, 0, token_endpoints.keys[TOKEN].public)
    link = Link(token_endpoints.control, ToToken, name, token_endpoints.keys)
    try:
        with suppress(DeadlineError):  # a refused connection has no queue
            link.send(message)
        while not link.refused:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"no answer from {token_endpoints.control}; check that the run is still active"
                )
            if (received := link.receive(RETRY_SECONDS)) is not None:
                return cast(Enrolled, received[0])
    finally:
        link.close()

    return None
