"""Tracks the processes of a run: admission, replacement, leases and missing processes.

consumes: invitations of the launcher, enrolments (control); files of processes on other machines (bulk)
waits for: a sign of life of each process, at most launch.lease seconds
unblocks: a process with a token; the work of a lost process, through `lost`
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import msgspec

import asyncrl
from asyncrl.coordinator.journal import TransactionalOutbox
from asyncrl.coordinator.state import RunState, log
from asyncrl.observe.files import bound_log, read_start
from asyncrl.store.reader import RunReader
from asyncrl.wire.addresses import incarnation_of, is_older, launch_of
from asyncrl.wire.messages import shared
from asyncrl.wire.sockets import TOKEN, Gate, role_of


class Hello(Protocol):
    """The first message of a process, repeated after silence. Role and index identify the process."""

    @property
    def index(self) -> int: ...
    @property
    def incarnation(self) -> str: ...


class Connected(Protocol):
    """A process that has reported in. `name` is for people, `seen` the time of the newest message."""

    peer: bytes
    name: str
    seen: float

    @property
    def hello(self) -> Hello: ...


P = TypeVar("P", bound=Connected)
LossHandler = Callable[[P, str, float], None]  # called with a lost process, the reason and the time


class Peers(Generic[P]):
    """The connected processes of a role, at most one for each index.

    Args:
        planned: number of processes that the launcher starts; further processes may join.
        lost: called with each lost process. None: leases never end.
    """

    def __init__(
        self, state: RunState, role: str, planned: int = 0, lost: LossHandler[P] | None = None
    ) -> None:
        self._lease = state.config.launch.lease
        self._fleet = state.fleet
        self._outbox = state.journal.outbox
        self._role = role
        self._planned_count = planned
        self._on_lost = lost
        self._connected: dict[bytes, P] = {}
        # By index: incarnation of the lost process, and time of the loss.
        self._lost_processes: dict[int, tuple[str, float]] = {}

    def __iter__(self) -> Iterator[P]:
        return iter(self._connected.values())

    def __len__(self) -> int:
        return len(self._connected)

    def get(self, peer: bytes) -> P | None:
        """Return the process of this identity, or None if the process is not connected yet."""
        return self._connected.get(peer)

    def accept_hello(self, new_process: P, now: float, newest_incarnation: str = "") -> P | None:
        """Handle the hello of a process, first or repeated, and return the process's record.

        That is `new_process`, made from the hello, if the process has not joined before. A process that was
        replaced by a later start, or that belongs to an earlier launch, has to end: the result is None.

        Args:
            newest_incarnation: newest incarnation of the role; '': of the process with the same index.
        """
        peer = new_process.peer
        incarnation = new_process.hello.incarnation
        index = new_process.hello.index

        process = self._connected.get(peer)
        same_index = [process] if process else [rival for rival in self if rival.hello.index == index]
        if same_index and not newest_incarnation:
            newest_incarnation = same_index[0].hello.incarnation

        is_foreign = launch_of(incarnation) not in ("", self._fleet.launch)
        if is_foreign or is_older(incarnation, newest_incarnation):
            log.warning(
                "%s has been replaced; telling the old process to exit", peer.decode(errors="replace")
            )
            self._outbox.to_control(peer, shared.Stop("another process has replaced this one"))
            return None

        if process is None or process.hello.incarnation != incarnation:
            for replaced in same_index:
                self.remove_process(replaced.peer, "replaced by a new process", now)
            process = new_process
            self._connected[peer] = process
            self._lost_processes.pop(index, None)
            log.info("%s joined", process.name)

        process.seen = now
        return process

    def note_contact(self, peer: bytes, now: float) -> None:
        """Note a message of a process, which is a sign of life."""
        if (process := self._connected.get(peer)) is not None:
            process.seen = now

    def remove_process(self, peer: bytes, reason: str, now: float) -> None:
        """Remove a lost process, and report the loss so that other processes get its work."""
        if (process := self._connected.pop(peer, None)) is not None:
            log.warning("%s lost (%s)", process.name, reason)
            self._lost_processes[process.hello.index] = process.hello.incarnation, now
            if self._on_lost is not None:
                self._on_lost(process, reason, now)

    def remove_silent(self, now: float) -> None:
        """Remove the processes whose lease is over."""
        for process in self.silent_processes(now):
            self.remove_process(process.peer, f"silent for {self._lease:g} s", now)

    def silent_processes(self, now: float) -> list[P]:
        """Return the processes that were silent for longer than a lease."""
        return [process for process in self if now - process.seen > self._lease]

    def extend_leases(self, now: float, gap: float) -> None:
        """Extend leases by the `gap` seconds in which the coordinator did not run."""
        for process in self:
            process.seen = now
        self._lost_processes = {
            index: (incarnation, lost_at + gap)
            for index, (incarnation, lost_at) in self._lost_processes.items()
        }

    def send_stop(self, reason: str) -> None:
        for process in self:
            self._outbox.to_control(process.peer, shared.Stop(reason))

    @property
    def vacant_indices(self) -> dict[int, str]:
        """Planned indices without a process, with the incarnation of the lost process ('' without one)."""
        occupied = {process.hello.index for process in self}
        free_indices = (index for index in range(self._planned_count) if index not in occupied)
        return {index: self._lost_processes.get(index, ("", 0.0))[0] for index in free_indices}

    def missing_processes(self, now: float) -> tuple[list[str], list[shared.Replace]]:
        """Return a wait for each missing process, and the processes to be replaced.

        A process that was lost more than `liveness.start_seconds` ago hangs and is to be replaced. The new
        process has as much time.
        """
        time_limit = self._fleet.liveness.start_seconds
        vacant_indices = self.vacant_indices
        replacements = list[shared.Replace]()

        for index in vacant_indices:
            incarnation, lost_at = self._lost_processes.get(index, ("", now))
            if incarnation and now - lost_at > time_limit:
                reason = f"{self._role}-{index} has been silent for {time_limit:g} s"
                replacements.append(shared.Replace(self._role, reason, incarnation))
                self._lost_processes[index] = incarnation, now

        lost_indices = self._lost_processes.keys()
        waits = [
            f"{self._role}-{index} is silent and gets no work"
            if index in lost_indices
            else f"{self._role}-{index} is starting"
            for index in vacant_indices
        ]
        return waits, replacements


FIRST_START = 1_000_000_000  # start numbers of enrolled processes; the launcher counts its own starts from 1


def enrolled_keys(reader: RunReader, launch: str) -> dict[str, str]:
    """Return the roles of processes enrolled in this launch, by public key.

    The gate needs the keys before any process connects, as ZeroMQ does not dial again after a refusal.
    """
    stored_launch, keys = msgspec.json.decode(
        reader.meta("enrolled", '["", {}]'), type=tuple[str, dict[str, str]]
    )
    return keys if stored_launch == launch else {}


class EnrolmentHandler:
    """Changes which processes the gate admits.

    Enrolled public keys survive a restart of the coordinator; unused tokens do not.
    """

    def __init__(self, state: RunState, gate: Gate) -> None:
        self.config = state.config
        self.run_dir = state.run_dir
        self.fleet = state.fleet
        self.journal = state.journal
        self._gate = gate
        self._open_tokens: dict[str, tuple[str, float]] = {}  # by token: role, and time of expiry
        self._enrolled_roles = enrolled_keys(state.journal.store.reader, state.fleet.launch)
        planned = {"rollout": state.config.rollout.workers, "engine": state.config.engine.server_count}
        # Further processes of these roles may join.
        self._planned_processes = {role: count for role, count in planned.items() if count}

    def add_token(self, message: shared.Invite, now: float) -> None:
        if message.role not in self._planned_processes or message.token in self._gate.role_by_key:
            log.warning(
                "rejecting a token for the role %r; only these roles can join: %s",
                message.role,
                ", ".join(self._planned_processes),
            )
            return

        self._open_tokens[message.token] = (message.role, now + message.seconds)
        self._gate.role_by_key[message.token] = TOKEN

    def enrol_process(self, peer: bytes, message: shared.Enrol) -> None:
        """Enrol the process whose peer name ends with a token. The token cannot be used a second time."""
        token = peer.decode().split("/", 2)[2]
        if token not in self._open_tokens or message.key in self._gate.role_by_key:
            return

        role, _ = self._open_tokens.pop(token)
        del self._gate.role_by_key[token]

        start_number = FIRST_START + len(self._enrolled_roles)
        index = self._planned_processes[role] + [*self._enrolled_roles.values()].count(role)
        self._gate.role_by_key[message.key] = self._enrolled_roles[message.key] = role
        stored_keys = msgspec.json.encode((self.fleet.launch, self._enrolled_roles)).decode()
        self.journal.store.put_meta("enrolled", stored_keys)
        log.info("enrolled a process as %s-%d", role, index)

        incarnation = incarnation_of(self.fleet.launch, start_number)
        config = msgspec.json.encode(self.config)
        run_start = read_start(self.run_dir)
        self.journal.outbox.to_control(
            peer, shared.Enrolled(role, index, incarnation, asyncrl.__version__, config, run_start)
        )

    def expire_tokens(self, now: float) -> None:
        """Take back expired tokens."""
        for token in [token for token, (_, expires_at) in self._open_tokens.items() if now > expires_at]:
            del self._open_tokens[token], self._gate.role_by_key[token]


SENDER_TIMEOUT = 10.0  # seconds of silence after which no more files are expected from a process
MAX_SENDERS = 4096  # remembered senders: a killed process does not announce its last message


class WrittenFiles:
    """Appends files of processes on other machines to the run directory."""

    def __init__(self, run_dir: Path, outbox: TransactionalOutbox) -> None:
        self._run_dir = run_dir
        self._outbox = outbox
        # By peer: the last file, begin and end of the last bytes, and the time of their arrival.
        self._senders: dict[bytes, tuple[str, int, int, float]] = {}

    def append_bytes(
        self, peer: bytes, message: shared.WrittenBytes, frames: list[bytes], now: float
    ) -> None:
        """Append new bytes of a file. There is no reply if the disk is full or the file is another role's."""
        role = role_of(peer)
        kind, _, file_name = message.name.partition("/")
        if not file_name.startswith("step-" if kind == "ratios" and role == "trainer" else f"{role}-"):
            log.warning(
                "ignoring %s from %s: the file belongs to another process", message.name, peer.decode()
            )
            return

        name, last_offset, received_bytes, _ = self._senders.get(peer, ("", 0, 0, now))
        if name != message.name or message.offset < last_offset:  # a truncated log begins anew
            received_bytes = message.offset

        path = self._run_dir / message.name
        data = b"".join(frames)[: shared.MAX_PIECE_BYTES]

        try:
            if new_bytes := data[received_bytes - message.offset :]:
                path.parent.mkdir(exist_ok=True)
                with path.open("ab") as output:
                    output.write(new_bytes)
                if kind == "logs":
                    bound_log(path)
        except OSError as error:
            log.error("%s: not written (%s)", path, error)
            return

        self._senders.pop(peer, None)
        if not message.last:
            self._senders[peer] = message.name, message.offset, received_bytes + len(new_bytes), now
        if len(self._senders) > MAX_SENDERS:
            del self._senders[next(iter(self._senders))]  # silent for the longest time

        self._outbox.to_bulk(peer, shared.WrittenTaken(message.name, received_bytes + len(new_bytes)))

    def expects_more(self, now: float) -> bool:
        """Return True while a process has more to send."""
        return any(now - last_contact < SENDER_TIMEOUT for *_, last_contact in self._senders.values())
