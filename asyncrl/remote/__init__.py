"""Models behind an OpenAI-compatible URL, which judge or play the user."""

from asyncrl.remote.http import RemoteError, RemoteModel, bearer, check_url, close_sessions, post
