"""Records what the tasks of a process do and wait for at once, in few spans: 512 slots have
thousands of waits a second.

    begin, end (any number of tasks, by name) ──► one span a name in PERIOD seconds ──► the timeline

Spans of one name are joined while they overlap, or follow within `gap` seconds; each keeps the number of
calls and their seconds together. A process writes at most NAMES * (1 / PERIOD + 1 / gap) lines a second, of
about 120 bytes; NAMES / PERIOD where all names are busy all the time.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import msgspec

from asyncrl.observe.metrics import duration
from asyncrl.observe.timeline import Timeline

PERIOD = 2.0  # seconds after which a span that goes on is cut; also what a crash may lose
GAP = 0.25  # seconds
NAMES = 32  # at a time; what begins beyond them is recorded as OTHER
OTHER = "other waits"
SHORTEST = 0.001  # seconds together; less is left out
AT_ONCE = 0.0001  # seconds; a call that ends sooner has waited for nothing, and is not counted

Begun = tuple[str, float]


class Joined(msgspec.Struct):
    """The span under way of one name, in monotonic seconds."""

    start: float
    changed: float  # when `running` last changed
    running: int = 0
    calls: int = 0
    seconds: float = 0.0
    longest: float = 0.0  # of the calls that ended

    def advance(self, now: float) -> None:
        self.seconds += self.running * (now - self.changed)
        self.changed = now


class Activity:
    """Durations are of a clock that cannot be set; only where spans lie is of the `wall` clock. `gap` 0:
    spans of one name are joined only while they overlap, and written when the last of them ends."""

    def __init__(
        self,
        timeline: Timeline,
        gap: float = GAP,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._timeline = timeline
        self._gap = gap
        self._clock = clock
        self._wall = wall
        self._joined: dict[str, Joined] = {}
        self._flushed = clock()

    def begin(self, name: str) -> Begun:
        """A task begins. Returns what to `end` it with."""
        now = self._clock()
        if name not in self._joined and len(self._joined) >= NAMES:
            name = OTHER
        joined = self._joined.get(name)
        if joined is None or (not joined.running and now - joined.changed > self._gap):
            if joined is not None:
                self._write(name, joined, now)
            joined = self._joined[name] = Joined(now, now)
        joined.advance(now)
        joined.running += 1
        joined.calls += 1
        return name, now

    def end(self, begun: Begun) -> None:
        """A task ends."""
        name, began = begun
        now = self._clock()
        joined = self._joined[name]
        joined.advance(now)
        joined.running -= 1
        took = now - began
        if took < AT_ONCE and self._gap:
            joined.calls = max(joined.calls - 1, 0)
            joined.seconds = joined.seconds - took
        joined.longest = max(joined.longest, took)
        if not joined.running and not self._gap:
            self._write(name, self._joined.pop(name), now)

    def tick(self) -> None:
        """To be called now and then: every PERIOD seconds it writes what there is."""
        if self._clock() - self._flushed >= PERIOD:
            self.flush()

    def flush(self) -> None:
        """Write the spans so far; those that go on begin anew."""
        now = self._flushed = self._clock()
        for name, joined in list(self._joined.items()):
            if joined.running:
                joined.advance(now)
                self._joined[name] = Joined(now, now, joined.running)
            else:
                del self._joined[name]
            self._write(name, joined, now)

    def _write(self, name: str, joined: Joined, now: float) -> None:
        if joined.seconds >= SHORTEST or not self._gap:
            ahead = self._wall() - now
            start = joined.start + ahead
            end = joined.changed + ahead
            seconds = round(joined.seconds, 6)
            longest = round(joined.longest, 6)
            self._timeline.record(name, start, end, calls=joined.calls, seconds=seconds, longest=longest)


DECODE = "decode"  # at least one turn is sampled; by a server: `decode on <its name>`


class BusyTimer:
    """Busy while at least one turn is being sampled. The totals decide how much is sampled at once, so they
    are of a clock that cannot be set; only the spans are of the `wall` clock."""

    def __init__(
        self,
        timeline: Timeline,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._all, self._servers = (Activity(timeline, gap, clock, wall) for gap in (0.0, GAP))
        self._born = self._since = clock()
        self._running = 0
        self._busy = 0.0

    @contextmanager
    def turn(self, server: str = "") -> Iterator[None]:
        """The body samples a turn, on a server of this name or an engine of its own."""
        if not self._running:
            self._since = self._clock()
        self._running += 1
        sampling = self._all.begin(DECODE)
        named = self._servers.begin(f"{DECODE} on {server}") if server else None
        try:
            yield
        finally:
            if named:
                self._servers.end(named)
            self._all.end(sampling)
            self._running -= 1
            if not self._running:
                self._busy += self._clock() - self._since

    def tick(self) -> None:
        """To be called now and then: what is not written yet, a crash loses."""
        self._all.tick()
        self._servers.tick()

    def flush(self) -> None:
        """Write the spans so far."""
        self._all.flush()
        self._servers.flush()

    @property
    def seconds(self) -> tuple[float, float]:
        """(busy, idle) since the start."""
        now = self._clock()
        busy = self._busy + (now - self._since if self._running else 0.0)
        return busy, now - self._born - busy


# -- waiting by name ---------------------------------------------------------------------------------------


FRESHER = "fresher weights"  # how the timeline calls a turn's wait for an engine that it may use
MIN_REPORTED = 1.0  # seconds; shorter waits are normal and not reported


class Notifier:
    """Wakes all tasks that wait for a condition, to check it again."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        event = self._event
        self._event = asyncio.Event()
        event.set()

    async def wait(self) -> None:
        await self._event.wait()


ASLEEP = "the engine sleeps while the trainer has its devices"
Entered = Callable[[], AbstractContextManager[None]]


class Sleeps:
    """Whether the engines of a sampler sleep, and what lasts meanwhile."""

    def __init__(self, asleep: bool = False) -> None:
        self.asleep = asleep
        self._under_way: dict[ExitStack, tuple[Entered, Entered]] = {}

    @contextmanager
    def during(self, awake: Entered = nullcontext, asleep: Entered = nullcontext) -> Iterator[None]:
        """The body waits for engines: within `awake()`, or within `asleep()` whenever they sleep."""
        with ExitStack() as state:
            self._under_way[state] = awake, asleep
            try:
                state.enter_context((awake, asleep)[self.asleep]())
                yield
            finally:
                del self._under_way[state]

    def change(self, asleep: bool) -> None:
        """They have fallen asleep, or are awake."""
        if asleep != self.asleep:
            self.asleep = asleep
            for state, sides in self._under_way.items():
                state.close()
                state.enter_context(sides[asleep]())


class Waits:
    """The waits under way in one process, oldest first; `activity` records them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, activity: Activity | None = None) -> None:
        self._clock = clock
        self._activity = activity
        self._open: dict[int, tuple[float, str, float]] = {}  # since when, for what, until when
        self._numbers = itertools.count()

    @contextmanager
    def named(self, name: str, seconds: float = 0.0, span: str = "") -> Iterator[None]:
        """The body waits for what `name` says; `seconds`: the deadline that this has of its own; `span`: its
        name in the timeline, where `name` has numbers that change."""
        number = next(self._numbers)
        now = self._clock()
        self._open[number] = (now, name, now + seconds)
        begun = self._activity.begin(span or name) if self._activity else None
        try:
            yield
        finally:
            del self._open[number]
            if self._activity and begun:
                self._activity.end(begun)

    def longest(self) -> str:
        """The oldest wait if it is longer than MIN_REPORTED, with the number of such waits; else ''."""
        if not self._open:
            return ""
        since, name, _ = next(iter(self._open.values()))
        seconds = self._clock() - since
        if seconds < MIN_REPORTED:
            return ""
        same = sum(other == name for _, other, _ in self._open.values())
        return f"{name} ({duration(seconds)}{f', {same} episodes' if same > 1 else ''})"

    @property
    def in_time(self) -> bool:
        """A wait with a deadline of its own is not over that: however long it is, it is no stall."""
        now = self._clock()
        return any(now < until for _, _, until in self._open.values())
