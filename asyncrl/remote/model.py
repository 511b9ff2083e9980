"""A chat model behind an OpenAI-compatible URL: messages in, text out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from asyncrl.errors import UNDECODABLE, ConfigError, one_line
from asyncrl.remote.http import RemoteError, check_url, post
from asyncrl.types import Message


class _Content(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    message: _Content


class _Completion(msgspec.Struct, frozen=True):
    choices: tuple[_Choice, ...]


_completion = msgspec.json.Decoder(_Completion).decode


@dataclass(frozen=True)
class RemoteModel:
    """`url` is the base URL as OpenAI clients take it, ending with `/v1`.

    `api_key_env` names the environment variable that holds the key; empty: none is sent. `timeout` is in
    seconds, of one `chat` with its repetitions. A `temperature` below 0 and `max_tokens` of 0 are not sent,
    as some models refuse them. Instances hold no connection: those are shared within an event loop and closed
    by `close_sessions`. ConfigError: a bad URL, or no such key.
    """

    url: str
    model: str
    api_key_env: str = ""
    timeout: float = 60.0
    retries: int = 2
    temperature: float = 0.0
    max_tokens: int = 1024

    def __post_init__(self) -> None:
        check_url(self.url)
        bearer(self.api_key_env)

    async def chat(self, messages: Sequence[Message]) -> str:
        """The model's next message, which may be ''. Raises RemoteError."""
        url = f"{self.url.rstrip('/')}/chat/completions"
        body = {
            "model": self.model,
            "messages": [replace(message, reasoning="").openai() for message in messages],
            **({"temperature": self.temperature} if self.temperature >= 0 else {}),
            **({"max_tokens": self.max_tokens} if self.max_tokens > 0 else {}),
        }
        answer = await post(
            url, body, seconds=self.timeout, retries=self.retries, headers=bearer(self.api_key_env)
        )
        try:
            return _completion(answer).choices[0].message.content or ""
        except (*UNDECODABLE, IndexError) as error:
            raise RemoteError(f"{url}: the answer is no chat completion ({one_line(error)})") from error


def bearer(api_key_env: str) -> dict[str, str]:
    """The header with the key of that environment variable; none without a name. ConfigError: it is empty."""
    if not api_key_env:
        return {}
    key = os.environ.get(api_key_env)
    if not key:
        raise ConfigError(f"the environment variable {api_key_env} holds no key; set it")
    return {"Authorization": f"Bearer {key}"}
