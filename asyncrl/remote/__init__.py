"""Models behind an OpenAI-compatible URL, which judge or play the user."""

from asyncrl.remote.http import (
    SCORER,
    RemoteError,
    RemoteLost,
    RemoteModel,
    bearer,
    check_url,
    close_sessions,
    post,
    proxy_of,
    scorer_url,
)
