"""Environments served over OpenEnv's WebSocket, one connection per episode.

    {"type": "reset" | "step", "data": …} ──► {"type": "observation", "data": {observation, reward, done}}
                                         └──► {"type": "error", "data": {message, code}}

Its own client blocks a thread per episode and changes the process's proxy settings, so the protocol, which is
small, is implemented here.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import msgspec

from asyncrl.environments.base import Environment, environments, extra_info, text_observation
from asyncrl.errors import UNDECODABLE, AsyncrlError, one_line
from asyncrl.remote import check_url, proxy_of
from asyncrl.types import Message, Observation, Sample

MAX_BYTES = 4 << 20  # of one message
INVALID = "VALIDATION_ERROR"  # the action, not the environment, was wrong


class OpenEnvError(AsyncrlError):
    """The server refused, failed, or did not answer in time."""


class _StepResult(msgspec.Struct, frozen=True):
    observation: dict[str, Any] = {}
    reward: float | None = None
    done: bool = False


class _FieldError(msgspec.Struct, frozen=True):
    loc: tuple[str | int, ...] = ()
    msg: str = ""


class _ServerError(msgspec.Struct, frozen=True):
    message: str = ""
    code: str = ""
    errors: tuple[_FieldError, ...] = ()

    @property
    def problems(self) -> str:
        """Return what is wrong with an action."""
        return "; ".join(f"{'.'.join(map(str, flaw.loc))}: {flaw.msg}" for flaw in self.errors)[:300]


class _Frame(msgspec.Struct, frozen=True):
    type: str
    data: msgspec.Raw


_action = msgspec.json.Decoder(dict[str, Any]).decode
_answer = msgspec.json.Decoder(_Frame).decode
_result = msgspec.json.Decoder(_StepResult, strict=False).decode
_trouble = msgspec.json.Decoder(_ServerError).decode


@environments.register("openenv")
class OpenEnv(Environment):
    """A server of OpenEnv (`openenv.core.env_server`), which must allow as many sessions as episodes run.

    `url`: its base. `action`: the field of an action that a turn's text goes to; empty: the turn is, or has
    in a fence, the action as a JSON object. `show`: the field of the observation that the model reads; empty:
    all of it, as JSON. An action that the server finds invalid is answered with its errors and earns
    `unreadable`. `reset` is given a `seed`, the row of the sample, and what is in `extra_info.openenv`.
    `timeout`: seconds per answer.
    """

    def __init__(
        self, *, url: str, action: str = "", show: str = "", unreadable: float = 0.0, timeout: float = 30.0
    ) -> None:
        check_url(url)
        self._url = "ws" + url.removeprefix("http").rstrip("/") + "/ws"
        self._action = action
        self._show = show
        self._unreadable = unreadable
        self._timeout = timeout
        self.timeout = 2 * timeout + 1.0  # `reset` connects as well; the errors below say more
        self._session: aiohttp.ClientSession | None = None
        self._socket: Any = None

    async def reset(self, sample: Sample) -> Observation:
        self._session = aiohttp.ClientSession()
        arguments = {"seed": sample.row, **extra_info(sample).get("openenv", {})}
        try:
            async with asyncio.timeout(self._timeout):
                url = "http" + self._url.removeprefix("ws")  # as proxies know it
                self._socket = await self._session.ws_connect(
                    url, max_msg_size=MAX_BYTES, proxy=proxy_of(url)
                )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise OpenEnvError(f"{self._url}: no connection ({one_line(error)})") from error
        found = await self._exchange("reset", arguments)
        if isinstance(found, _ServerError):
            raise OpenEnvError(f"{self._url}: {found.code}: {found.message[:200]}")
        return self._observed(found)

    async def step(self, message: Message) -> Observation:
        action = self._read(message.content)
        if action is None:
            return text_observation("error: write the action as one JSON object.", self._unreadable)
        found = await self._exchange("step", action)
        if isinstance(found, _StepResult):
            return self._observed(found)
        if found.code == INVALID:
            return text_observation(f"error: {found.problems or found.message[:300]}", self._unreadable)
        raise OpenEnvError(f"{self._url}: {found.code}: {found.message[:200]}")

    async def close(self) -> None:
        if self._socket is not None:
            await self._socket.close()
        if self._session is not None:
            await self._session.close()

    def _read(self, text: str) -> dict[str, Any] | None:
        if self._action:
            return {self._action: text}
        try:
            return _action(_fenced(text) or text)
        except (ValueError, RecursionError):  # or nested too deeply
            return None

    async def _exchange(self, kind: str, data: dict[str, Any]) -> _StepResult | _ServerError:
        """Send one message and receive one."""
        try:
            async with asyncio.timeout(self._timeout):
                await self._socket.send_str(json.dumps({"type": kind, "data": data}))
                message = await self._socket.receive()
            if message.type is not aiohttp.WSMsgType.TEXT:
                raise OpenEnvError(f"{self._url}: the connection ended ({message.type.name})")
            answer = _answer(message.data)
            return _trouble(answer.data) if answer.type == "error" else _result(answer.data)
        except TimeoutError:
            raise OpenEnvError(f"{self._url}: no answer to {kind} within {self._timeout:g} s") from None
        except (aiohttp.ClientError, ConnectionError, *UNDECODABLE) as error:
            raise OpenEnvError(f"{self._url}: {kind} failed ({one_line(error)})") from error

    def _observed(self, found: _StepResult) -> Observation:
        if not self._show:
            text = json.dumps(found.observation, ensure_ascii=False)
        elif self._show in found.observation:
            shown = found.observation[self._show]
            text = shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False)
        else:
            raise OpenEnvError(f"no field {self._show!r}; the observation has {', '.join(found.observation)}")
        return text_observation(text, found.reward or 0.0, found.done)


def _fenced(text: str) -> str:
    """Return the last JSON object between two fences, or ''."""
    for part in reversed(text.split("```")[1:-1]):
        body = part.removeprefix("json").strip()
        if body.startswith("{") and body.endswith("}"):
            return body
    return ""
