"""In place of the coordinator's sockets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncrl.wire.messages.shared import WireMessage


class Sent:
    """Takes the place of the sockets, and keeps the mail that would have left after the commit."""

    refused = 0

    def __init__(self) -> None:
        self.mail: list[tuple[bytes, WireMessage]] = []
        self.frames: list[tuple[Any, list[bytes]]] = []  # messages with frames
        self.unreachable: set[bytes] = set()

    def to_control(self, peer: bytes, message: WireMessage, frames: Sequence[bytes] = ()) -> None:
        self.mail.append((peer, message))
        if frames:
            self.frames.append((message, list(frames)))

    to_bulk = to_control

    def flush(self) -> None: ...

    def clear(self) -> None: ...

    def take(self, kind: type) -> list[tuple[bytes, Any]]:
        """The messages of a kind since the last call."""
        taken_mail = [(peer, message) for peer, message in self.mail if isinstance(message, kind)]
        self.mail = [(peer, message) for peer, message in self.mail if not isinstance(message, kind)]
        return taken_mail
