"""Files of images in a worker: those that its episodes make, and those that it requests from the coordinator.

consumes: images of tools, environments and agents; ImageFiles (bulk)
waits for: files from the coordinator, by name
unblocks: engines, which read the images of a prompt

    EpisodeImages ──files_of(ids)──► WorkerImages ──ImageRequest──► coordinator
        ▲  └──unposted_files(…)──► records of turns and replies, once durable ──► WorkerImages
        └── add(image): tools, environment, agent
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial

from asyncrl.errors import AsyncrlError
from asyncrl.runtime.activity import Waits
from asyncrl.types import ImageRef, Turn
from asyncrl.vision.files import ImageError, StoredImage
from asyncrl.vision.image_ids import find_runs
from asyncrl.wire.messages.shared import MAX_REQUESTED_IMAGES, ImageFiles, ImageRequest
from asyncrl.wire.sockets import MAX_BYTES

CACHE_BYTES = 256 << 20  # files that a worker keeps
MAX_UNPOSTED_BYTES = MAX_BYTES // 2  # files that the next record of an episode brings; a turn needs room, too
RESEND_SECONDS = 2.0  # wait for an answer before sending again; doubled up to MAX_RESEND_SECONDS
MAX_RESEND_SECONDS = 30.0


class LostImageError(AsyncrlError):
    """The coordinator has no file of an image any more. The next attempt at the episode starts again, without
    the recorded turns that may need the image. At most `rollout.retries` attempts follow: an image of the
    data stays lost."""


class _FileRequest:
    """Waits for a file from the coordinator. `file`: None if the coordinator has lost the file. `send_at`:
    time of the event loop, in seconds, at which the request is due, for the first time or again."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.file: asyncio.Future[bytes | None] = loop.create_future()
        self.send_at = loop.time()
        self._resend_after = RESEND_SECONDS

    def postpone(self, now: float) -> None:
        """Set the time of the next repetition; the request is sent now."""
        self.send_at = now + self._resend_after
        self._resend_after = min(2 * self._resend_after, MAX_RESEND_SECONDS)


class WorkerImages:
    """Keeps the files of images that episodes of this worker need, up to CACHE_BYTES, and requests missing
    files. `send`: sends a message to the coordinator. Only `keep_file` may be called by other threads."""

    def __init__(self, send: Callable[[ImageRequest], Awaitable[None]], waits: Waits) -> None:
        self._send = send
        self._waits = waits
        self._files: OrderedDict[str, bytes] = OrderedDict()  # the least recently used first
        self._file_bytes = 0
        self._files_lock = threading.Lock()  # threads that read requests of agents keep files, too
        self._requested: dict[str, _FileRequest] = {}

    def keep_file(self, digest: str, file: bytes) -> None:
        """Keep a file that the coordinator has, too; the least recently used files go."""
        with self._files_lock:
            if digest in self._files:
                self._files.move_to_end(digest)
                return

            self._files[digest] = file
            self._file_bytes += len(file)
            while self._file_bytes > CACHE_BYTES and len(self._files) > 1:
                _, oldest_file = self._files.popitem(last=False)
                self._file_bytes -= len(oldest_file)

    async def files_of(self, digests: Sequence[str]) -> dict[str, bytes]:
        """Return the files of these images by digest; missing files are awaited. LostImageError if the
        coordinator has no file of an image any more."""
        with self._files_lock:
            files = {digest: self._files[digest] for digest in digests if digest in self._files}
            for digest in files:
                self._files.move_to_end(digest)

        missing = [digest for digest in dict.fromkeys(digests) if digest not in files]
        if missing:
            with self._waits.wait_named("images from the coordinator"):
                for start in range(0, len(missing), MAX_REQUESTED_IMAGES):
                    files |= await self._request_files(missing[start : start + MAX_REQUESTED_IMAGES])
        return files

    def receive_files(self, message: ImageFiles, frames: Sequence[bytes]) -> None:
        """Give the files of an answer, a frame for each that is not lost, to the episodes that wait."""
        for digest, file in message.files(frames).items():
            self.keep_file(digest, file)
            if (request := self._requested.pop(digest, None)) is not None:
                request.file.set_result(file)

        for digest in message.lost:
            if (request := self._requested.pop(digest, None)) is not None:
                request.file.set_result(None)  # an error without a waiting episode would be logged

    async def _request_files(self, digests: Sequence[str]) -> dict[str, bytes]:
        """Request files, once for all waiting episodes, and again if no answer comes: a restarted coordinator
        knows of no earlier request. Any of the waiting episodes sends what is due, because an episode may end
        while it waits. The episode's deadline ends the wait."""
        requests: dict[str, _FileRequest] = {}
        for digest in digests:
            if digest not in self._requested:
                self._requested[digest] = _FileRequest()
            requests[digest] = self._requested[digest]

        loop = asyncio.get_running_loop()
        while unanswered := {
            digest: request for digest, request in requests.items() if not request.file.done()
        }:
            now = loop.time()
            due_requests = {
                digest: request for digest, request in unanswered.items() if request.send_at <= now
            }
            for request in due_requests.values():
                request.postpone(now)  # before the await, so that no other episode sends it, too
            if due_requests:
                await self._send(ImageRequest(tuple(due_requests)))

            next_send_at = min(request.send_at for request in unanswered.values())
            await asyncio.wait(
                [request.file for request in unanswered.values()],
                timeout=max(0.0, next_send_at - loop.time()),
            )

        files: dict[str, bytes] = {}
        for digest, request in requests.items():
            if (file := request.file.result()) is None:
                raise LostImageError(f"image {digest} is no longer stored")
            files[digest] = file
        return files


class EpisodeImages:
    """Holds the images of one attempt at an episode. Files that the attempt makes stay here until they are
    durable, and then belong to the worker. `known_images`: those of the sample, which the coordinator has.
    Only `add` may be called by other threads."""

    def __init__(self, worker_images: WorkerImages, known_images: Iterable[ImageRef]) -> None:
        self._worker_images = worker_images
        self._own_files: dict[str, bytes] = {}  # made by this attempt, and not durable
        self._stored = {image.digest for image in known_images}  # stored, or in a posted record
        self._unposted_bytes = 0  # of the own files that are not in `_stored`
        self._lock = threading.Lock()  # threads that read requests of agents add images, too

    def add(self, image: StoredImage) -> ImageRef:
        """Take an image into the episode; return the reference for a reply or a message. ImageError if the
        next record would become too large with this image."""
        digest = image.ref.digest
        with self._lock:
            if digest in self._own_files:
                return image.ref
            if digest in self._stored:
                self._worker_images.keep_file(digest, image.file)
                return image.ref

            if self._unposted_bytes + len(image.file) > MAX_UNPOSTED_BYTES:
                raise ImageError(
                    f"the new images of a prompt or of the replies to a turn take more than "
                    f"{MAX_UNPOSTED_BYTES >> 20} MiB, including those of the episode's refused requests; "
                    "use fewer or smaller images"
                )
            self._own_files[digest] = image.file
            self._unposted_bytes += len(image.file)
            return image.ref

    async def files_of(self, ids: Sequence[int]) -> Mapping[str, bytes]:
        """Return the files of all images in a row of ids by digest. LostImageError."""
        digests = [run.digest for run in find_runs(ids)]
        # Before the await, because a file leaves when it becomes durable.
        own_files = {digest: self._own_files[digest] for digest in digests if digest in self._own_files}
        elsewhere = [digest for digest in digests if digest not in own_files]
        return own_files | (await self._worker_images.files_of(elsewhere) if elsewhere else {})

    def unposted_files(self, digests: Iterable[str]) -> tuple[bytes, ...]:
        """Return the files of those images that no posted record brings, in order and once each."""
        return tuple(
            self._own_files[digest]
            for digest in dict.fromkeys(digests)
            if digest not in self._stored and digest in self._own_files
        )

    def mark_posted(self, digests: Sequence[str], durable: asyncio.Future[None]) -> None:
        """Note that a posted record brings these images; `durable` is done when the record is durable. Call
        this after the post: a post that is cancelled while it waits for room brings nothing."""
        with self._lock:
            for digest in set(digests) - self._stored:
                self._stored.add(digest)
                self._unposted_bytes -= len(self._own_files.get(digest, b""))
        durable.add_done_callback(partial(self._release_files, tuple(digests)))

    def _release_files(self, digests: Sequence[str], durable: asyncio.Future[None]) -> None:
        """Hand files that are durable to the worker: the coordinator sends them again if necessary."""
        if durable.cancelled():
            return
        with self._lock:
            for digest in digests:
                if (file := self._own_files.pop(digest, None)) is not None:
                    self._worker_images.keep_file(digest, file)

    def discard_unposted(self) -> None:
        """Forget the files that no posted record brings: those of replies that were refused."""
        with self._lock:
            for digest in self._own_files.keys() - self._stored:
                self._unposted_bytes -= len(self._own_files.pop(digest))

    def recall_turns(self, turns: Sequence[Turn]) -> None:
        """Note that the images of recorded turns and replies are stored."""
        for turn in turns:
            self._stored.update(run.digest for run in find_runs(turn.context))
            self._stored.update(image.digest for image in images_of_replies(turn))


def images_of_replies(turn: Turn) -> list[ImageRef]:
    """Return the images of the replies to a turn: of tool replies, then of the observation."""
    images = [image for reply in turn.replies for image in reply.images]
    messages = turn.observation.messages if turn.observation else ()
    return images + [image for message in messages for image in message.images]
