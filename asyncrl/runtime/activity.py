"""Records the simultaneous work and waits of a process's tasks in few spans: 512 slots have thousands of
waits a second.

    begin_call, end_call (any number of tasks, by name) ──► one span a name in FLUSH_SECONDS ──► the timeline

Spans of one name are joined while they overlap, or follow within `gap` seconds; a joined span has the number
of calls and the sum of their seconds. A process writes at most MAX_NAMES * (1 / FLUSH_SECONDS + 1 / gap)
lines a second, of about 120 bytes; MAX_NAMES / FLUSH_SECONDS where all names are busy all the time.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import msgspec

from asyncrl.observe.metrics import duration_text
from asyncrl.observe.timeline import Timeline

FLUSH_SECONDS = 2.0  # after which a span that goes on is cut; a crash may lose so many seconds
JOIN_GAP_SECONDS = 0.25  # longest pause between two joined spans
MAX_NAMES = 32  # at a time; calls of more names are recorded as OTHER
OTHER = "other waits"
MIN_SPAN_SECONDS = 0.001  # of all calls of a span together; shorter spans are left out
INSTANT_SECONDS = 0.0001  # a shorter call has not waited, and is not counted

StartedCall = tuple[str, float]


class JoinedSpan(msgspec.Struct):
    """The span under way for one name, in monotonic seconds."""

    start: float
    changed: float  # when `running` last changed
    running: int = 0
    calls: int = 0
    seconds: float = 0.0
    longest: float = 0.0  # seconds of the longest call that ended

    def advance(self, now: float) -> None:
        self.seconds += self.running * (now - self.changed)
        self.changed = now


class Activity:
    """Records calls by name. Durations are by a clock that cannot be set; only the position of spans is by
    the `wall` clock. `gap` 0: spans of one name are joined only while overlapping, and written when the last
    call ends."""

    def __init__(
        self,
        timeline: Timeline,
        gap: float = JOIN_GAP_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._timeline = timeline
        self._gap = gap
        self._clock = clock
        self._wall = wall
        self._span_by_name: dict[str, JoinedSpan] = {}
        self._flushed_at = clock()

    def begin_call(self, name: str) -> StartedCall:
        """Note that a task begins. Returns a token for `end_call`."""
        now = self._clock()
        if name not in self._span_by_name and len(self._span_by_name) >= MAX_NAMES:
            name = OTHER

        span = self._span_by_name.get(name)
        if span is None or (not span.running and now - span.changed > self._gap):
            if span is not None:
                self._write_span(name, span, now)
            span = self._span_by_name[name] = JoinedSpan(now, now)

        span.advance(now)
        span.running += 1
        span.calls += 1

        return name, now

    def end_call(self, started_call: StartedCall) -> None:
        """Note that a task ends."""
        name, began_at = started_call
        now = self._clock()
        span = self._span_by_name[name]
        span.advance(now)
        span.running -= 1

        call_seconds = now - began_at
        if call_seconds < INSTANT_SECONDS and self._gap:
            span.calls = max(span.calls - 1, 0)
            span.seconds -= call_seconds

        span.longest = max(span.longest, call_seconds)
        if not span.running and not self._gap:
            self._write_span(name, self._span_by_name.pop(name), now)

    def flush_if_due(self) -> None:
        """Write the spans so far if FLUSH_SECONDS have passed. Call now and then."""
        if self._clock() - self._flushed_at >= FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write the spans so far; unfinished spans begin anew."""
        now = self._clock()
        self._flushed_at = now
        for name, span in list(self._span_by_name.items()):
            if span.running:
                span.advance(now)
                self._span_by_name[name] = JoinedSpan(now, now, span.running)
            else:
                del self._span_by_name[name]
            self._write_span(name, span, now)

    def _write_span(self, name: str, span: JoinedSpan, now: float) -> None:
        if span.seconds >= MIN_SPAN_SECONDS or not self._gap:
            wall_offset = self._wall() - now
            self._timeline.record(
                name,
                span.start + wall_offset,
                span.changed + wall_offset,
                calls=span.calls,
                seconds=round(span.seconds, 6),
                longest=round(span.longest, 6),
            )


DECODE = "decode"  # at least one turn is sampled; by a server: `decode on <its name>`


class BusyTimer:
    """Measures how long at least one turn is being sampled. The totals decide how many turns are sampled at
    once, so they are measured by a clock that cannot be set; only the spans are by the `wall` clock."""

    def __init__(
        self,
        timeline: Timeline,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._all_turns = Activity(timeline, 0.0, clock, wall)
        self._server_turns = Activity(timeline, JOIN_GAP_SECONDS, clock, wall)
        self._started_at = clock()
        self._busy_since = self._started_at
        self._running_turns = 0
        self._busy_seconds = 0.0

    @contextmanager
    def busy_span(self, server: str = "") -> Iterator[None]:
        """Measure the body, which samples a turn, on a server of this name or on the process's own engine."""
        if not self._running_turns:
            self._busy_since = self._clock()

        self._running_turns += 1
        decode_call = self._all_turns.begin_call(DECODE)
        server_call = self._server_turns.begin_call(f"{DECODE} on {server}") if server else None
        try:
            yield
        finally:
            if server_call:
                self._server_turns.end_call(server_call)

            self._all_turns.end_call(decode_call)
            self._running_turns -= 1
            if not self._running_turns:
                self._busy_seconds += self._clock() - self._busy_since

    def flush_if_due(self) -> None:
        """Write the spans so far if FLUSH_SECONDS have passed. A crash loses spans that are not written."""
        self._all_turns.flush_if_due()
        self._server_turns.flush_if_due()

    def flush(self) -> None:
        """Write the spans so far."""
        self._all_turns.flush()
        self._server_turns.flush()

    @property
    def seconds(self) -> tuple[float, float]:
        """Return (busy, idle) seconds since the start."""
        now = self._clock()
        busy = self._busy_seconds + (now - self._busy_since if self._running_turns else 0.0)
        return busy, now - self._started_at - busy


# -- waiting by name ---------------------------------------------------------------------------------------


FRESHER = "fresher weights"  # in the timeline: a turn's wait for an engine with a new enough version
MIN_REPORTED = 1.0  # seconds; shorter waits are normal and not reported


class Notifier:
    """Wakes all tasks that wait for a condition, so that each checks the condition again."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        event = self._event
        self._event = asyncio.Event()
        event.set()

    async def wait(self) -> None:
        await self._event.wait()


ASLEEP = "the engine sleeps while the trainer has its devices"
MakeContext = Callable[[], AbstractContextManager[None]]


class Sleeps:
    """Knows whether the engines of a sampler sleep, and switches the contexts of bodies that wait for
    engines."""

    def __init__(self, asleep: bool = False) -> None:
        self.asleep = asleep
        self._open_states: dict[ExitStack, tuple[MakeContext, MakeContext]] = {}

    @contextmanager
    def during(self, awake: MakeContext = nullcontext, asleep: MakeContext = nullcontext) -> Iterator[None]:
        """Run the body, which waits for engines, within `awake()`, or within `asleep()` whenever engines
        sleep."""
        with ExitStack() as state_stack:
            self._open_states[state_stack] = awake, asleep
            try:
                state_stack.enter_context(asleep() if self.asleep else awake())
                yield
            finally:
                del self._open_states[state_stack]

    def set_asleep(self, asleep: bool) -> None:
        """Note that the engines have fallen asleep, or are awake."""
        if asleep != self.asleep:
            self.asleep = asleep
            for state_stack, contexts in self._open_states.items():
                state_stack.close()
                state_stack.enter_context(contexts[asleep]())


class Waits:
    """The waits under way in one process, oldest first; `activity` records them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, activity: Activity | None = None) -> None:
        self._clock = clock
        self._activity = activity
        self._open_waits: dict[int, tuple[float, str, float]] = {}  # (since, name, deadline)
        self._numbers = itertools.count()

    @contextmanager
    def wait_named(self, name: str, seconds: float = 0.0, span: str = "") -> Iterator[None]:
        """Record the body as a wait with this name. `seconds`: the wait's own deadline; `span`: the name in
        the timeline, where `name` contains changing numbers."""
        number = next(self._numbers)
        now = self._clock()
        self._open_waits[number] = (now, name, now + seconds)

        started_call = self._activity.begin_call(span or name) if self._activity else None
        try:
            yield
        finally:
            del self._open_waits[number]
            if self._activity and started_call:
                self._activity.end_call(started_call)

    def longest_wait(self) -> str:
        """Describe the oldest wait, with the number of waits of this name; '' if shorter than
        MIN_REPORTED."""
        if not self._open_waits:
            return ""

        since, name, _ = next(iter(self._open_waits.values()))
        seconds = self._clock() - since
        if seconds < MIN_REPORTED:
            return ""

        same_waits = sum(wait_name == name for _, wait_name, _ in self._open_waits.values())
        return f"{name} ({duration_text(seconds)}{f', {same_waits} episodes' if same_waits > 1 else ''})"

    @property
    def within_deadline(self) -> bool:
        """True if a wait is within its own deadline: such a wait, however long, is no stall."""
        now = self._clock()
        return any(now < until for _, _, until in self._open_waits.values())
