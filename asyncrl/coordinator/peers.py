"""The processes of a run: who may join it, who replaces whom, whose lease is over, and who is missing.

consumes: invitations of the launcher, enrolments (control); what processes on other machines write (bulk)
waits for: a sign of life of each process, at most launch.lease seconds
unblocks: a process with a token; what a lost process held, through `lost`
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

import msgspec

import asyncrl
from asyncrl.coordinator.state import RunState, log
from asyncrl.observe.files import bound_log, read_start
from asyncrl.store.reader import RunReader
from asyncrl.wire.addresses import incarnation_of, is_older, launch_of
from asyncrl.wire.messages import shared
from asyncrl.wire.sockets import TOKEN, Gate, role_of


class Hello(Protocol):
    """Is the first message of a process, repeated after silence. Its place is the pair of role and index."""

    @property
    def index(self) -> int: ...
    @property
    def incarnation(self) -> str: ...


class Connected(Protocol):
    """A process that has reported in. `name` is for people, `seen` the time of its newest message."""

    peer: bytes
    name: str
    seen: float

    @property
    def hello(self) -> Hello: ...


P = TypeVar("P", bound=Connected)
Lost = Callable[[P, str, float], None]  # what is lost, why, and when


class Peers(Generic[P]):
    """Holds connected processes, at most one a place.

    Args:
        planned: number of processes that the launcher starts; more may join.
        lost: called with each process that is lost. None: their lease never ends.
    """

    def __init__(self, state: RunState, role: str, planned: int = 0, lost: Lost[P] | None = None) -> None:
        self._state = state
        self._role = role
        self._planned = planned
        self._lost = lost
        self._here: dict[bytes, P] = {}
        self._gone: dict[int, tuple[str, float]] = {}  # by index: the process that was lost, and when

    def __iter__(self) -> Iterator[P]:
        return iter(self._here.values())

    def __len__(self) -> int:
        return len(self._here)

    def get(self, peer: bytes) -> P | None:
        """Return the process of this identity; None: it is not connected, and will say hello."""
        return self._here.get(peer)

    def hello(
        self, peer: bytes, message: Hello, now: float, join: Callable[[], P], newest: str = ""
    ) -> P | None:
        """A process reports in, for the first time or again: `join` makes its record. None: a process that
        was started later has its place (or is the `newest` of its role), or an earlier launch started it; it
        is told to end."""
        known = self._here.get(peer)
        same = [known] if known else [one for one in self if one.hello.index == message.index]
        newest = newest or (same[0].hello.incarnation if same else "")

        foreign = launch_of(message.incarnation) not in ("", self._state.launch)
        if foreign or is_older(message.incarnation, newest):
            log.warning("%s was replaced: it is told to end", peer.decode(errors="replace"))
            self._state.outbox.to_control(peer, shared.Stop("another process has taken its place"))
            return None

        if known is None or known.hello.incarnation != message.incarnation:
            for old in same:
                self.lose(old.peer, "replaced by a new process", now)
            known = self._here[peer] = join()
            self._gone.pop(message.index, None)
            log.info("%s joined", known.name)

        known.seen = now
        return known

    def heard(self, peer: bytes, now: float) -> None:
        """Any message is a sign of life."""
        if (known := self._here.get(peer)) is not None:
            known.seen = now

    def lose(self, peer: bytes, why: str, now: float) -> None:
        """The process is gone; what it held goes to others."""
        if (known := self._here.pop(peer, None)) is not None:
            log.warning("%s lost (%s)", known.name, why)
            self._gone[known.hello.index] = known.hello.incarnation, now
            if self._lost is not None:
                self._lost(known, why, now)

    def tick(self, now: float) -> None:
        """Lose those whose lease is over."""
        for one in self.silent(now):
            self.lose(one.peer, f"silent for {self._state.config.launch.lease:g} s", now)

    def silent(self, now: float) -> list[P]:
        """Processes that were not heard of for longer than a lease."""
        return [one for one in self if now - one.seen > self._state.config.launch.lease]

    def extend(self, now: float, gap: float) -> None:
        """The coordinator did not run for `gap` seconds: nobody was silent in that time."""
        for one in self:
            one.seen = now
        self._gone = {index: (name, at + gap) for index, (name, at) in self._gone.items()}

    def stop(self, reason: str) -> None:
        for one in self:
            self._state.outbox.to_control(one.peer, shared.Stop(reason))

    @property
    def vacant(self) -> dict[int, str]:
        """The planned places without a process: by index, the one that was lost; '': none was there."""
        here = {one.hello.index for one in self}
        free = (index for index in range(self._planned) if index not in here)
        return {index: self._gone.get(index, ("", 0.0))[0] for index in free}

    def missing(self, now: float) -> tuple[list[str], list[shared.Replace]]:
        """A wait for each planned process that is silent, or still starts. One that was lost `liveness.start`
        seconds ago hangs: it is to be replaced, and the next one has as long."""
        limit = self._state.liveness.start
        places = self.vacant
        hanging = list[shared.Replace]()

        for index in places:
            name, since = self._gone.get(index, ("", now))
            if name and now - since > limit:
                why = f"{self._role}-{index} has been silent for {limit:g} s"
                hanging.append(shared.Replace(self._role, why, name))
                self._gone[index] = name, now

        return [f"{self._role}-{index} is silent, or starts: it is not used" for index in places], hanging


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
        self.state = state
        self._gate = gate
        self._tokens: dict[str, tuple[str, float]] = {}  # role, and when it is over
        self._enrolled = enrolled_keys(state.store.read, state.launch)
        planned = {"rollout": state.config.rollout.workers, "engine": state.config.engine.keepers}
        self._planned = {role: count for role, count in planned.items() if count}  # more of these may join

    def invite(self, message: shared.Invite, now: float) -> None:
        if message.role not in self._planned or message.token in self._gate.members:
            log.warning("no token for a process of role %r: only %s may join", message.role, [*self._planned])
            return

        self._tokens[message.token] = (message.role, now + message.seconds)
        self._gate.members[message.token] = TOKEN

    def enrol(self, peer: bytes, message: shared.Enrol) -> None:
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
        config = msgspec.json.encode(self.state.config)
        started = read_start(self.state.run_dir)
        self.state.outbox.to_control(
            peer, shared.Enrolled(role, index, name, asyncrl.__version__, config, started)
        )

    def tick(self, now: float) -> None:
        """Take back tokens that are over."""
        for token in [token for token, (_, until) in self._tokens.items() if now > until]:
            del self._tokens[token], self._gate.members[token]


SENDER_SECONDS = 10.0  # of silence, after which nothing more is expected of who sends files
MOST_SENDERS = 4096  # that are known: a process that is killed does not say that it was its last


class WrittenFiles:
    """Adds what processes on other machines write to the files of the run directory."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        # The last file of each, where its last bytes begin, where they end, and when they came.
        self._senders: dict[bytes, tuple[str, int, int, float]] = {}

    def written(self, peer: bytes, message: shared.WrittenBytes, frames: list[bytes], now: float) -> None:
        """Take bytes of a file, once each. No answer where the disk is full, or the file another role's."""
        role, (kind, _, file) = role_of(peer), message.name.partition("/")
        if not file.startswith("step-" if kind == "ratios" and role == "trainer" else f"{role}-"):
            log.warning("%s sends %s, which is not its own", peer.decode(), message.name)
            return

        name, start, have, _ = self._senders.get(peer, ("", 0, 0, now))
        if name != message.name or message.offset < start:  # a log that was cut is shorter
            have = message.offset

        path = self._state.run_dir / message.name
        data = b"".join(frames)[: shared.PIECE]

        try:
            if new := data[have - message.offset :]:
                path.parent.mkdir(exist_ok=True)
                with path.open("ab") as written:
                    written.write(new)
                if kind == "logs":
                    bound_log(path)
        except OSError as error:
            log.error("%s: not written (%s)", path, error)
            return

        self._senders.pop(peer, None)
        if not message.last:
            self._senders[peer] = message.name, message.offset, have + len(new), now
        if len(self._senders) > MOST_SENDERS:
            del self._senders[next(iter(self._senders))]  # silent for the longest time

        self._state.outbox.to_bulk(peer, shared.WrittenTaken(message.name, have + len(new)))

    def expected(self, now: float) -> bool:
        """True while somebody has more to send."""
        return any(now - heard < SENDER_SECONDS for *_, heard in self._senders.values())
