"""Who may join a run that the launcher did not start: tokens that were given out, and the keys they enrolled.

consumes: invitations of the launcher, enrolments (control)
waits for: nothing; a token that was not used in time is taken back
unblocks: a process with a token
"""

from __future__ import annotations

import msgspec

import asyncrl
from asyncrl.coordinator.state import RunState, log
from asyncrl.observe.files import read_start
from asyncrl.store.reader import RunReader
from asyncrl.wire.addresses import incarnation_of
from asyncrl.wire.messages.shared import Enrol, Enrolled, Invite
from asyncrl.wire.sockets import TOKEN, Gate

FIRST_START = 1_000_000_000  # of their incarnations: the launcher counts its own starts from 1


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
        planned = {"rollout": state.config.rollout.workers, "engine": state.config.engine.keepers}
        self._planned = {role: count for role, count in planned.items() if count}  # more of these may join

    def invite(self, message: Invite, now: float) -> None:
        if message.role not in self._planned or message.token in self._gate.members:
            log.warning("no token for a process of role %r: only %s may join", message.role, [*self._planned])
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
        start = FIRST_START + len(self._enrolled)
        index = self._planned[role] + [*self._enrolled.values()].count(role)
        self._gate.members[message.key] = self._enrolled[message.key] = role
        kept = msgspec.json.encode((self.state.launch, self._enrolled)).decode()
        self.state.store.put_meta("enrolled", kept)
        log.info("a process was enrolled as %s-%d", role, index)
        name = incarnation_of(self.state.launch, start)
        config, started = msgspec.json.encode(self.state.config), read_start(self.state.run_dir)
        self.state.outbox.to_control(peer, Enrolled(role, index, name, asyncrl.__version__, config, started))

    def tick(self, now: float) -> None:
        """Take back tokens that are over."""
        for token in [token for token, (_, until) in self._tokens.items() if now > until]:
            del self._tokens[token], self._gate.members[token]
