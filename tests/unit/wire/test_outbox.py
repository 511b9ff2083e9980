"""The outbox: in sequence, kept until acknowledged, bounded, sent again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from asyncrl.errors import DeadlineError, ProtocolError
from asyncrl.wire.messages.shared import Attempt
from asyncrl.wire.messages.worker import MAX_RECORDS, Records, Replied
from asyncrl.wire.outbox import RESEND_SECONDS, Outbox
from tests.fakes.loop import settle

A = Attempt("a", 0)
B = Attempt("b", 0)


class Played:
    """An outbox whose window takes two records of 1000 bytes, and the wire that it sends them on."""

    def __init__(self) -> None:
        self.seqs: list[int] = []
        self.sizes: list[int] = []  # records of each message
        self.open = asyncio.Event()
        self.open.set()
        self.refusals = 0
        self.now = 0.0
        self.posts: list[asyncio.Task[asyncio.Future[None]]] = []
        self.outbox = Outbox(self.send, window=2000, clock=lambda: self.now)

    async def send(self, records: Records, frames: Sequence[bytes]) -> None:
        await self.open.wait()
        if self.refusals:
            self.refusals -= 1
            raise DeadlineError("coordinator took no record")
        records_with_frames = [*records.with_frames(frames)]
        assert [len(record_frames) for _, record_frames in records_with_frames] == [1] * len(
            records_with_frames
        ), "each has its frame"
        self.seqs += [record.seq for record, _ in records_with_frames]
        self.sizes.append(len(records_with_frames))

    def durable(self, seq: int) -> bool:
        return self.posts[seq - 1].result().done()

    def act(self, word: str) -> None:
        match word[0], word[1:]:
            case "p", size:
                frame = b"x" * int(size or 0)
                self.posts.append(asyncio.create_task(self.outbox.post_record(Replied(0, A, 0), frame)))
            case "a", seq:
                self.outbox.acknowledge(int(seq))
            case "r", _:
                self.outbox.send_again()
            case "z", _:
                self.outbox.pause_sending()
            case "x", count:
                self.refusals = int(count)
            case "@", now:
                self.now = float(now)
                self.outbox.resend_overdue()
            case "(", _:
                self.open.clear()
            case ")", _:
                self.open.set()
            case "=", seqs:
                assert self.seqs == [int(seq) for seq in seqs.split(",")]
            case "d" | "u" as state, seq:
                assert self.durable(int(seq)) is (state == "d")
            case "w", seq:
                assert self.outbox.is_full and not self.posts[int(seq) - 1].done()


@pytest.mark.parametrize(
    "events",
    [
        pytest.param("p p =1,2 u1 a1 d1 u2 a1 a2 d2", id="records are numbered, and durable when acked"),
        pytest.param("p p p a3 d1 d2 d3", id="an ack is cumulative"),
        pytest.param("p1000 p1000 p9000 w3 a1 =1,2,3", id="a full window makes posts wait"),
        pytest.param("p9000 =1", id="a record larger than the window goes alone"),
        pytest.param("p p p =1,2,3 a1 r p =1,2,3,2,3,4", id="what is not acked is sent again in order"),
        pytest.param("( p p r ) =1,1,2", id="a rewind while sending loses nothing"),
        pytest.param("p p p =1,2,3 ( r a2 p ) =1,2,3,1,2,3,4", id="an ack while sending skips nothing"),
        pytest.param("p =1 z p =1 r =1,1,2", id="nothing is sent while paused"),
        pytest.param(
            f"p @{RESEND_SECONDS} =1 @{RESEND_SECONDS + 1} =1,1 @{2 * RESEND_SECONDS + 2} =1,1 "
            f"@{3 * RESEND_SECONDS + 2} =1,1,1",
            id="without acks all is sent again, less and less often",
        ),
        pytest.param("x2 p =1", id="a send past its deadline is tried again"),
    ],
)
async def test_records(events: str) -> None:
    """`p9` posts a record of 9 bytes, `a1` acks up to 1, `r` rewinds, `z` pauses, `@5`: it is 5 s. The wire
    refuses the next two: `x2`; holds all: `(` to `)`. These were sent: `=1,2`; record 1 is durable: `d1`, is
    not: `u1`; waits for room: `w1`."""
    played = Played()
    running = asyncio.create_task(played.outbox.run_sender())
    for word in events.split():
        played.act(word)
        await settle()
    assert not running.done()
    running.cancel()


async def test_what_waits_goes_together() -> None:
    played = Played()
    large = Outbox(played.send)
    for size in (*[9] * (MAX_RECORDS + 1), 2 << 20, 9):
        await large.post_record(Replied(0, A, 0), b"x" * size)
    running = asyncio.create_task(large.run_sender())
    await settle()
    running.cancel()
    assert played.sizes == [MAX_RECORDS, 1, 1, 1] and played.seqs == list(range(1, MAX_RECORDS + 4))


async def test_attempts_are_those_of_records_that_are_not_acked() -> None:
    outbox = Played().outbox
    first = await outbox.post_record(Replied(0, A, 0))
    await outbox.post_record(Replied(0, B, 0))
    assert outbox.attempts == {A, B}
    first.cancel()  # nobody waits for it any more
    outbox.acknowledge(1)
    assert outbox.attempts == {B} and outbox.acked_seq == 1
    outbox.acknowledge(2)
    await outbox.wait_until_flushed()


async def test_a_record_that_no_socket_takes_is_refused() -> None:
    """It would be sent again for ever; so the episode fails."""
    played = Played()
    played.outbox._max_record_bytes = 1000
    with pytest.raises(ProtocolError, match="a record of type Replied has 1256 bytes, but at most 1000"):
        await played.outbox.post_record(Replied(0, A, 0), b"x" * 1000)
    running = asyncio.create_task(played.outbox.run_sender())
    await played.outbox.post_record(Replied(0, A, 0), b"x")
    await settle()
    assert played.seqs == [1]
    running.cancel()
