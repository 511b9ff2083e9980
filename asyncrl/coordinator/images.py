"""Sends the files of images to workers and trainer ranks, and stores those that episodes bring.

consumes: ImageRequest (bulk); files in the records of turns and replies
waits for: nothing
unblocks: episodes that are about to sample, ranks that are about to train
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from asyncrl.coordinator.state import RunState, log
from asyncrl.data.run_images import RunImages
from asyncrl.episodes.image_checks import run_image_layout
from asyncrl.errors import ProtocolError
from asyncrl.store.schema import StoreError
from asyncrl.types import Turn
from asyncrl.vision.files import MAX_STORED_BYTES, image_digest, is_image_file
from asyncrl.vision.image_ids import has_image_ids
from asyncrl.vision.layout import layout_or_refusal
from asyncrl.wire.messages.shared import ImageFiles, ImageRequest


class ImageHandler:
    """Reads and stores the files of images."""

    def __init__(self, state: RunState) -> None:
        self._store = state.journal.store
        self._outbox = state.journal.outbox
        self._images = RunImages.open(state.run_dir, self._store.reader)
        _, self._refusal = layout_or_refusal(partial(run_image_layout, state.config))

    def send_files(self, peer: bytes, message: ImageRequest) -> None:
        """Send the files that a peer asks for."""
        frames: list[bytes] = []
        lost: list[str] = []
        for digest in message.digests:
            file = self._read_file(digest)
            if file is None:
                lost.append(digest)
            else:
                frames.append(file)

        self._outbox.to_bulk(peer, ImageFiles(message.digests, tuple(lost)), frames)

    def check_turn(self, uid: str, turn: Turn) -> None:
        """Check that the run reads images if a turn has any: a trainer rank could not go on. ProtocolError
        if not. The trainer compares the files with the ids, and leaves out episodes in which they differ."""
        if self._refusal and (has_image_ids(turn.context) or has_image_ids(turn.taught)):
            raise ProtocolError(f"episode {uid}, turn {turn.index}: image ids, but {self._refusal}")

    def store_files(self, uid: str, turn: int, files: Sequence[bytes]) -> None:
        """Store the files that came with a turn, or with the replies to a turn. ProtocolError for a frame
        that is no image."""
        for file in files:
            if len(file) > MAX_STORED_BYTES or not is_image_file(file):
                raise ProtocolError(
                    f"episode {uid}, turn {turn}: a frame of {len(file)} bytes is not an image"
                )
            self._store.put_image(uid, turn, image_digest(file), file)

    def _read_file(self, digest: str) -> bytes | None:
        try:
            return self._images.file_of(digest)
        except StoreError as error:
            log.error("image %s: %s", digest, error)
            return None
