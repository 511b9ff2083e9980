"""Files of images in a worker: requested once, kept, and posted with the records that bring them."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence

import pytest

from asyncrl.rollout import images
from asyncrl.rollout.episode_records import EpisodeRecords
from asyncrl.rollout.images import EpisodeImages, LostImageError, WorkerImages, images_of_replies
from asyncrl.runtime.activity import Waits
from asyncrl.types import (
    IMAGE_MARK,
    Generation,
    ImageRef,
    Message,
    Observation,
    StopReason,
    ToolCall,
    ToolReply,
    Turn,
)
from asyncrl.vision.files import ImageError, StoredImage, image_digest
from asyncrl.vision.image_ids import image_ids
from asyncrl.wire.messages.shared import Attempt, ImageFiles, ImageRequest
from asyncrl.wire.messages.worker import Records, Sampled
from asyncrl.wire.outbox import Outbox

FILES = {image_digest(file): file for file in (b"first image", b"second image", b"third image")}
FIRST, SECOND, THIRD = FILES


class Coordinator:
    """Answers requests for images, or loses as many as it is told to."""

    def __init__(self, lose: int = 0) -> None:
        self.requests: list[tuple[str, ...]] = []
        self.worker = WorkerImages(self._receive, Waits())
        self._lose = lose

    async def _receive(self, request: ImageRequest) -> None:
        self.requests.append(request.digests)
        if self._lose:
            self._lose -= 1
            return
        lost = tuple(digest for digest in request.digests if digest not in FILES)
        answer = ImageFiles(request.digests, lost)
        frames = [FILES[digest] for digest in request.digests if digest in FILES]
        asyncio.get_running_loop().call_soon(self.worker.receive_files, answer, frames)


def turn(context: tuple[int, ...], replies: tuple[ToolReply, ...] = ()) -> Turn:
    return Turn(0, context, Generation((), (), (), StopReason.STOP), replies)


def stored(digest: str) -> StoredImage:
    return StoredImage(ImageRef(digest, 32, 32), FILES[digest])


async def test_a_file_is_requested_once() -> None:
    coordinator = Coordinator()
    ids = (1, *image_ids(FIRST, 4), 2, *image_ids(SECOND, 4))
    episodes = [EpisodeImages(coordinator.worker, ()) for _ in range(3)]

    at_once = await asyncio.gather(*(episode.files_of(ids) for episode in episodes))
    assert at_once == [{FIRST: FILES[FIRST], SECOND: FILES[SECOND]}] * 3
    assert await episodes[0].files_of(ids) == at_once[0]
    await EpisodeImages(coordinator.worker, ()).files_of(ids)
    assert coordinator.requests == [(FIRST, SECOND)]


async def test_only_new_files_are_requested() -> None:
    coordinator = Coordinator()
    digest_lists = ([FIRST], [FIRST, SECOND], [SECOND, THIRD])
    await asyncio.gather(*map(coordinator.worker.files_of, digest_lists))
    assert coordinator.requests == [(FIRST,), (SECOND,), (THIRD,)]


async def test_a_lost_request_is_sent_again_once_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "RESEND_SECONDS", 0.01)
    coordinator = Coordinator(lose=2)
    for files in await asyncio.gather(*(coordinator.worker.files_of([FIRST]) for _ in range(3))):
        assert files == {FIRST: FILES[FIRST]}
    assert coordinator.requests == [(FIRST,)] * 3


async def test_another_episode_repeats_the_request_of_an_episode_that_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(images, "RESEND_SECONDS", 0.01)
    coordinator = Coordinator(lose=1)
    cancelled_read = asyncio.ensure_future(coordinator.worker.files_of([FIRST]))
    waiting_read = asyncio.ensure_future(coordinator.worker.files_of([FIRST]))
    await asyncio.sleep(0)
    cancelled_read.cancel()
    assert await waiting_read == {FIRST: FILES[FIRST]}


async def test_pauses_between_requests_double() -> None:
    request = images._FileRequest()
    pauses: list[float] = []
    for _ in range(6):
        now = request.send_at
        request.postpone(now)
        pauses.append(request.send_at - now)
    assert pauses == pytest.approx([2.0, 4.0, 8.0, 16.0, 30.0, 30.0])


async def test_an_image_that_is_not_stored_fails_the_episode() -> None:
    coordinator = Coordinator()
    with pytest.raises(LostImageError, match=f"image {'0' * 29} is no longer stored"):
        await coordinator.worker.files_of([FIRST, "0" * 29])
    assert await coordinator.worker.files_of([FIRST]) == {FIRST: FILES[FIRST]}


async def test_a_lost_image_for_which_nobody_waits_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    coordinator = Coordinator(lose=1)
    cancelled_read = asyncio.ensure_future(coordinator.worker.files_of([FIRST]))
    await asyncio.sleep(0)
    cancelled_read.cancel()
    await asyncio.wait([cancelled_read])
    coordinator.worker.receive_files(ImageFiles((FIRST,), lost=(FIRST,)), [])
    del cancelled_read
    gc.collect()
    assert not caplog.records


async def test_the_least_recently_used_files_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "CACHE_BYTES", len(FILES[FIRST]) + len(FILES[SECOND]))
    coordinator = Coordinator()
    for digest in (FIRST, SECOND, FIRST, THIRD, FIRST):
        await coordinator.worker.files_of([digest])
    assert coordinator.requests == [(FIRST,), (SECOND,), (THIRD,)]


async def test_records_carry_new_images_once() -> None:
    episode = EpisodeImages(Coordinator().worker, [ImageRef(FIRST, 32, 32)])
    for digest in (FIRST, SECOND):
        episode.add(stored(digest))

    assert episode.unposted_files([FIRST, SECOND, SECOND]) == (FILES[SECOND],), "the data has the first image"
    episode.mark_posted([FIRST, SECOND], asyncio.Future())
    assert episode.unposted_files([SECOND]) == ()
    assert await episode.files_of(image_ids(SECOND, 4)) == {SECOND: FILES[SECOND]}


async def test_images_of_recorded_turns_are_stored() -> None:
    reply = ToolReply(ToolCall("look", "{}"), IMAGE_MARK, images=(ImageRef(SECOND, 32, 32),))
    observation = Observation((Message("user", IMAGE_MARK, images=(ImageRef(THIRD, 32, 32),)),))
    recorded = Turn(0, image_ids(FIRST, 4), turn(()).generation, (reply,), observation=observation)
    assert [image.digest for image in images_of_replies(recorded)] == [SECOND, THIRD]

    episode = EpisodeImages(Coordinator().worker, ())
    episode.recall_turns([recorded])
    for digest in FILES:
        episode.add(stored(digest))
    assert episode.unposted_files(FILES) == ()


async def send_nothing(records: Records, frames: Sequence[bytes]) -> None:
    """Stand in for a coordinator that never answers."""


async def test_a_cancelled_post_brings_no_image() -> None:
    outbox = Outbox(send_nothing, window=1)
    episode = EpisodeImages(Coordinator().worker, ())
    episode.add(stored(FIRST))
    attempt = Attempt("episode", 0)
    records = EpisodeRecords(attempt, outbox, Waits(), episode)
    await records.post_record(Sampled(0, attempt, 0.0), b"fills the window")

    with_image = turn(image_ids(FIRST, 4))
    cancelled_post = asyncio.ensure_future(records.post_turn(with_image, session=0, seconds=1.0))
    await asyncio.sleep(0)
    cancelled_post.cancel()
    await asyncio.wait([cancelled_post])

    assert episode.unposted_files([FIRST]) == (FILES[FIRST],), "the next record brings the file"
    outbox.acknowledge(1)
    await records.post_turn(with_image, session=0, seconds=2.0)
    assert episode.unposted_files([FIRST]) == ()


async def test_a_request_of_more_files_than_are_kept_asks_once_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(images, "CACHE_BYTES", 1)
    coordinator = Coordinator()
    for _ in range(2):
        assert await coordinator.worker.files_of([*FILES, *FILES]) == FILES
    assert coordinator.requests == [(FIRST, SECOND, THIRD), (FIRST, SECOND)]


async def test_room_for_images_comes_back_with_each_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_UNPOSTED_BYTES", len(FILES[FIRST]) + len(FILES[SECOND]))
    episode = EpisodeImages(Coordinator().worker, ())
    episode.add(stored(FIRST))
    episode.add(stored(SECOND))
    episode.add(stored(SECOND))
    with pytest.raises(ImageError, match="use fewer or smaller images"):
        episode.add(stored(THIRD))

    durable: asyncio.Future[None] = asyncio.Future()
    episode.mark_posted([FIRST], durable)
    episode.add(stored(THIRD))
    durable.set_result(None)
    await asyncio.sleep(0)  # callbacks of the future
    with pytest.raises(ImageError):
        episode.add(StoredImage(ImageRef("0" * 29, 32, 32), b"fourth image"))
    episode.discard_unposted()
    assert episode._unposted_bytes == 0 and episode.unposted_files(FILES) == ()


async def test_durable_files_are_kept_within_the_bound_of_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "CACHE_BYTES", len(FILES[FIRST]))
    coordinator = Coordinator()
    episode = EpisodeImages(coordinator.worker, ())
    durable: asyncio.Future[None] = asyncio.Future()
    for digest in FILES:
        episode.add(stored(digest))
    episode.mark_posted([FIRST, SECOND], durable)
    assert await episode.files_of(image_ids(FIRST, 4)) == {FIRST: FILES[FIRST]}

    durable.set_result(None)
    await asyncio.sleep(0)  # callbacks of the future
    for digest in (FIRST, SECOND):
        episode.add(stored(digest))  # an equal image comes again
    ids = tuple(image_id for digest in FILES for image_id in image_ids(digest, 4))
    assert await episode.files_of(ids) == FILES
    assert coordinator.requests == [(FIRST,)], "one durable file is kept, and the file that is not durable"
