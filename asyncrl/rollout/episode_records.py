"""Posts the records of an attempt at an episode, and waits until the newest turn is durable."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import msgspec

from asyncrl.buffer.payloads import TurnPart
from asyncrl.rollout.images import EpisodeImages, images_of_replies
from asyncrl.runtime.activity import Waits
from asyncrl.types import Turn, TurnReply
from asyncrl.vision.image_ids import find_runs
from asyncrl.wire.messages.shared import Attempt
from asyncrl.wire.messages.worker import Generated, Record, Replied, Sampled
from asyncrl.wire.outbox import Outbox

_encode = msgspec.msgpack.Encoder().encode


@dataclass
class EpisodeRecords:
    """Posts the records of one attempt to the outbox, which numbers the records and sends them again until
    the coordinator has stored them. Not `buffer.records.EpisodeRecord`, the coordinator's record of an
    episode."""

    attempt: Attempt
    outbox: Outbox
    waits: Waits
    images: EpisodeImages
    _newest_turn_durable: asyncio.Future[None] | None = None  # None: durable from the start

    async def post_turn(self, turn: Turn, session: int, seconds: float) -> None:
        """Post a turn, `seconds` after the episode began; the replies are posted later. `session`: the number
        that `EpisodeSampling.generate` got as `row`; an agent's row gets its final number only with its first
        turn."""
        record, frame = generated(self.attempt, turn, seconds, session)
        digests = [run.digest for run in find_runs(turn.context)]
        self._newest_turn_durable = await self._post_with_images(record, frame, digests)

    async def post_part(self, part: TurnPart, seconds: float) -> None:
        """Post new tokens of an unfinished turn."""
        await self.post_record(Sampled(0, self.attempt, seconds), _encode(part))

    async def post_reply(self, turn: Turn) -> None:
        """Post the replies to a turn: tool replies and the observation. Images of this episode that
        are in no posted turn or reply are forgotten. ProtocolError: as `Outbox.post_record`."""
        frame = _encode(TurnReply(turn.replies, turn.observation))
        digests = [image.digest for image in images_of_replies(turn)]
        await self._post_with_images(Replied(0, self.attempt, turn.index), frame, digests)
        self.images.discard_unposted()

    async def post_record(self, record: Record, *frames: bytes) -> asyncio.Future[None]:
        """Hand a record to the outbox once the window has room. The future is done when the record is
        durable. ProtocolError: as `Outbox.post_record`."""
        wait_name = "acks: the window of unacknowledged records is full"
        with self.waits.wait_named(wait_name) if self.outbox.is_full else nullcontext():
            return await self.outbox.post_record(record, *frames)

    async def until_durable(self) -> None:
        """Wait until the newest turn would survive a crash, because the receiver may cause side effects. The
        wait ends with the ack, the episode's deadline or the worker's lease."""
        if self._newest_turn_durable is not None and not self._newest_turn_durable.done():
            with self.waits.wait_named("acks: turns that are not yet durable"):
                await asyncio.shield(self._newest_turn_durable)

    async def _post_with_images(
        self, record: Record, frame: bytes, digests: Sequence[str]
    ) -> asyncio.Future[None]:
        """Post a record with the files of those images that no record has brought yet."""
        durable = await self.post_record(record, frame, *self.images.unposted_files(digests))
        self.images.mark_posted(digests, durable)
        return durable


def generated(
    attempt: Attempt, turn: Turn, seconds: float = 0.0, session: int = 0
) -> tuple[Generated, bytes]:
    """Return the record of a turn, `seconds` after the episode began, and the frame: the turn without
    replies."""
    frame = _encode(msgspec.structs.replace(turn, replies=(), observation=None))
    return Generated(0, attempt, turn.index, seconds, session), frame
