"""Models behind an OpenAI-compatible URL, which judge or play the user."""

from asyncrl.remote.http import (
    SCORER_PREFIX,
    RemoteError,
    RemoteLost,
    RemoteModel,
    bearer_header,
    check_url,
    close_sessions,
    post_json,
    proxy_of,
    scorer_url,
)
