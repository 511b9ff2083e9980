"""Models behind an OpenAI-compatible URL, which judge or play the user."""

from asyncrl.remote.http import RemoteError, close_sessions, post
from asyncrl.remote.model import RemoteModel

__all__ = ["RemoteError", "RemoteModel", "close_sessions", "post"]
