"""Who may join a run that the launcher did not start: tokens that were given out, and the keys they enrolled.

consumes: invitations of the launcher, enrolments (control)
waits for: nothing; a token that was not used in time is taken back
unblocks: a process with a token
"""

from __future__ import annotations

import msgspec

from asyncrl.coordinator.state import RunState, log
from asyncrl.store.reader import RunReader
from asyncrl.wire.messages.shared import Enrol, Enrolled, Invite
from asyncrl.wire.sockets import TOKEN, Gate

ENROLLED = ("rollout",)  # roles that may join


def enrolled_keys(reader: RunReader, launch: str) -> dict[str, str]:
    """Public key -> role, of those that were enrolled in this launch. The gate has to know them before anyone
    can connect: ZeroMQ does not dial again after it was refused."""
    kept, keys = msgspec.json.decode(reader.meta("enrolled", '["", {}]'), type=tuple[str, dict[str, str]])
    return keys if kept == launch else {}


class EnrolmentHandler:
    """Changes who the gate lets in. Public keys that were enrolled are kept for a restart of this process;
    tokens that nobody has used are not."""

    def __init__(self, state: RunState, gate: Gate) -> None:
        self.state, self._gate = state, gate
        self._tokens: dict[str, tuple[str, float]] = {}  # role, and when it is over
        self._enrolled = enrolled_keys(state.store.read, state.launch)

    def invite(self, message: Invite, now: float) -> None:
        if message.role not in ENROLLED or message.token in self._gate.members:
            log.warning("no token for a process of role %r: only %s may join", message.role, ENROLLED)
            return
        self._tokens[message.token] = (message.role, now + message.seconds)
        self._gate.members[message.token] = TOKEN

    def enrol(self, peer: bytes, message: Enrol) -> None:
        """The peer's name ends with its token, which is taken back at once: a second use is refused."""
        token = peer.decode().split("/", 2)[2]
        if token not in self._tokens or message.key in self._gate.members:
            return
        role, _ = self._tokens.pop(token)
        del self._gate.members[token]
        self._gate.members[message.key] = self._enrolled[message.key] = role
        kept = msgspec.json.encode((self.state.launch, self._enrolled)).decode()
        self.state.store.put_meta("enrolled", kept)
        log.info("a process was enrolled as %s", role)
        self.state.outbox.to_control(peer, Enrolled(role))

    def tick(self, now: float) -> None:
        """Take back tokens that are over."""
        for token in [token for token, (_, until) in self._tokens.items() if now > until]:
            del self._tokens[token], self._gate.members[token]
