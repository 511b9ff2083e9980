"""The outbox: in sequence, kept until acknowledged, bounded, sent again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from asyncrl.errors import DeadlineError, ProtocolError
from asyncrl.wire.messages.shared import Attempt
from asyncrl.wire.messages.worker import Record, Replied
from asyncrl.wire.outbox import RESEND, Outbox
from tests.fakes.loop import settle

A = Attempt("a", 0)
B = Attempt("b", 0)


class Wire:
    """Takes what is sent, and can refuse or hold it."""

    def __init__(self) -> None:
        self.seqs: list[int] = []
        self.open = asyncio.Event()
        self.open.set()
        self.refusals = 0

    async def send(self, record: Record, frames: Sequence[bytes]) -> None:
        await self.open.wait()
        if self.refusals:
            self.refusals -= 1
            raise DeadlineError("coordinator took no record")
        self.seqs.append(record.seq)


def replied(attempt: Attempt = A) -> Replied:
    return Replied(0, attempt, 0)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def outboxed(test):
    """Run an async test with a started outbox whose window takes two records of 1000 bytes."""

    def runner() -> None:
        async def main() -> None:
            wire, clock = Wire(), Clock()
            outbox = Outbox(wire.send, window=2000, clock=clock)
            task = asyncio.create_task(outbox.run())
            async with asyncio.timeout(60):
                await test(outbox, wire, clock)
            assert not task.done()
            task.cancel()

        asyncio.run(main())

    return runner


@outboxed
async def test_records_are_numbered_and_durable_when_acked(outbox: Outbox, wire: Wire, clock: Clock) -> None:
    first, second = await outbox.post(replied()), await outbox.post(replied(B))
    await settle()
    assert wire.seqs == [1, 2]
    assert not first.done()
    assert outbox.attempts == {A, B}
    outbox.ack(1)
    assert first.done()
    assert not second.done()
    assert outbox.attempts == {B}
    outbox.ack(1)  # a repeated ack
    outbox.ack(2)
    assert second.done()
    assert outbox.acked == 2
    await outbox.flushed()


@outboxed
async def test_an_ack_is_cumulative(outbox: Outbox, wire: Wire, clock: Clock) -> None:
    futures = [await outbox.post(replied()) for _ in range(3)]
    outbox.ack(3)
    assert all(future.done() for future in futures)


@outboxed
async def test_a_full_window_makes_posts_wait(outbox: Outbox, wire: Wire, clock: Clock) -> None:
    await outbox.post(replied(), b"x" * 1000)
    await outbox.post(replied(), b"x" * 1000)
    waiting = asyncio.create_task(outbox.post(replied(), b"x" * 9000))
    await settle()
    assert outbox.full
    assert not waiting.done()
    outbox.ack(1)
    await settle()
    assert waiting.done()
    await settle()
    assert wire.seqs == [1, 2, 3]


@outboxed
async def test_a_record_larger_than_the_window_goes_alone(outbox: Outbox, wire: Wire, clock: Clock) -> None:
    await outbox.post(replied(), b"x" * 9000)
    await settle()
    assert wire.seqs == [1]


@outboxed
async def test_rewind_sends_the_unacknowledged_again_in_order(
    outbox: Outbox, wire: Wire, clock: Clock
) -> None:
    for _ in range(3):
        await outbox.post(replied())
    await settle()
    outbox.ack(1)
    outbox.rewind()
    await outbox.post(replied())
    await settle()
    assert wire.seqs == [1, 2, 3, 2, 3, 4]


@outboxed
async def test_a_rewind_while_sending_loses_nothing(outbox: Outbox, wire: Wire, clock: Clock) -> None:
    wire.open.clear()
    await outbox.post(replied())
    await outbox.post(replied())
    await settle()  # the first is on its way
    outbox.rewind()
    wire.open.set()
    await settle()
    assert wire.seqs == [1, 1, 2]


@outboxed
async def test_an_ack_while_sending_skips_nothing(outbox: Outbox, wire: Wire, clock: Clock) -> None:
    for _ in range(3):
        await outbox.post(replied())
    await settle()
    wire.open.clear()
    outbox.rewind()
    await settle()  # 1 is on its way again
    outbox.ack(2)
    wire.open.set()
    await settle()
    assert wire.seqs == [1, 2, 3, 1, 3]


@outboxed
async def test_nothing_is_sent_while_paused(outbox: Outbox, wire: Wire, clock: Clock) -> None:
    await outbox.post(replied())
    await settle()
    outbox.pause()
    await outbox.post(replied())
    await settle()
    assert wire.seqs == [1]
    outbox.rewind()
    await settle()
    assert wire.seqs == [1, 1, 2]


@outboxed
async def test_without_acks_all_is_sent_again_less_and_less_often(
    outbox: Outbox, wire: Wire, clock: Clock
) -> None:
    await outbox.post(replied())
    await settle()
    for now, sent in ((RESEND, 1), (RESEND + 1, 2), (2 * RESEND + 2, 2), (3 * RESEND + 2, 3)):
        clock.now = now
        outbox.check()
        await settle()
        assert len(wire.seqs) == sent, now


@outboxed
async def test_a_send_past_its_deadline_is_tried_again(outbox: Outbox, wire: Wire, clock: Clock) -> None:
    wire.refusals = 2
    await outbox.post(replied())
    await settle()
    assert wire.seqs == [1]


@outboxed
async def test_an_ack_for_a_cancelled_waiter_is_fine(outbox: Outbox, wire: Wire, clock: Clock) -> None:
    durable = await outbox.post(replied())
    durable.cancel()
    outbox.ack(1)
    assert outbox.acked == 1


@outboxed
async def test_a_record_that_no_socket_takes_is_refused(outbox: Outbox, wire: Wire, clock: Clock) -> None:
    """It would be sent again for ever; so the episode fails."""
    outbox._most = 1000
    with pytest.raises(ProtocolError, match="a Replied of 1256 bytes; at most 1000"):
        await outbox.post(replied(), b"x" * 1000)
    await outbox.post(replied(), b"x")
    await settle()
    assert wire.seqs == [1]
