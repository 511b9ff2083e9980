"""Models behind an OpenAI-compatible URL, which judge or play the user."""

from asyncrl.remote.http import RemoteError, check_url, close_sessions, post
from asyncrl.remote.model import RemoteModel, bearer

__all__ = ["RemoteError", "RemoteModel", "bearer", "check_url", "close_sessions", "post"]
