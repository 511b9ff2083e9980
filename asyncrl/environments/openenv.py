"""Environments served over OpenEnv's WebSocket, one connection per episode.

    {"type": "reset" | "step", "data": …} ──► {"type": "observation", "data": {observation, reward, done}}
                                         └──► {"type": "error", "data": {message, code}}

OpenEnv's client blocks a thread per episode and changes the process's proxy settings, so this module
implements the protocol, which is small."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import msgspec

from asyncrl.environments.base import Environment, environments, text_observation
from asyncrl.errors import UNDECODABLE, AsyncrlError, one_line
from asyncrl.remote import check_url, proxy_of
from asyncrl.types import Message, Observation, Sample

MAX_MESSAGE_BYTES = 4 << 20
INVALID_ACTION = "VALIDATION_ERROR"  # the server's code for a wrong action


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
        """Describe the problems of an action."""
        return "; ".join(f"{'.'.join(map(str, flaw.loc))}: {flaw.msg}" for flaw in self.errors)[:300]


class _Frame(msgspec.Struct, frozen=True):
    type: str
    data: msgspec.Raw


_decode_action = msgspec.json.Decoder(dict[str, Any]).decode
_decode_frame = msgspec.json.Decoder(_Frame).decode
_decode_result = msgspec.json.Decoder(_StepResult, strict=False).decode
_decode_error = msgspec.json.Decoder(_ServerError).decode


@environments.register("openenv")
class OpenEnv(Environment):
    """Play on a server of OpenEnv (`openenv.core.env_server`), which must allow a session for each running
    episode.

    `url`: the server's base URL. `action`: the field of an action that takes a turn's text; empty: the turn
    is the action as a JSON object, or contains the object in a fence. `show`: the field of the observation
    for the model; empty: the entire observation as JSON. An action that the server rejects is answered with
    the server's errors and earns `unreadable`. `reset` gets a `seed`, the row of the sample, and the fields
    of `extra_info.openenv`. `timeout`: seconds per answer."""

    def __init__(
        self, *, url: str, action: str = "", show: str = "", unreadable: float = 0.0, timeout: float = 30.0
    ) -> None:
        check_url(url)
        self._url = "ws" + url.removeprefix("http").rstrip("/") + "/ws"
        self._action_field = action
        self._shown_field = show
        self._unreadable = unreadable
        self._answer_seconds = timeout
        self.timeout = 2 * timeout + 1.0  # `reset` also connects; the errors below say more
        self._session: aiohttp.ClientSession | None = None
        self._websocket: Any = None

    async def reset(self, sample: Sample) -> Observation:
        self._session = aiohttp.ClientSession()
        arguments = {"seed": sample.row, **sample.extra_info.get("openenv", {})}

        try:
            async with asyncio.timeout(self._answer_seconds):
                url = "http" + self._url.removeprefix("ws")  # settings of proxies name http
                self._websocket = await self._session.ws_connect(
                    url, max_msg_size=MAX_MESSAGE_BYTES, proxy=proxy_of(url)
                )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise OpenEnvError(f"{self._url}: cannot connect ({one_line(error)})") from error

        answer = await self._exchange_messages("reset", arguments)
        if isinstance(answer, _ServerError):
            raise OpenEnvError(f"{self._url}: {answer.code}: {answer.message[:200]}")
        return self._make_observation(answer)

    async def step(self, message: Message) -> Observation:
        action = self._read_action(message.content)
        if action is None:
            return text_observation("error: write the action as one JSON object.", self._unreadable)

        answer = await self._exchange_messages("step", action)
        if isinstance(answer, _StepResult):
            return self._make_observation(answer)
        if answer.code == INVALID_ACTION:
            return text_observation(f"error: {answer.problems or answer.message[:300]}", self._unreadable)
        raise OpenEnvError(f"{self._url}: {answer.code}: {answer.message[:200]}")

    async def close(self) -> None:
        if self._websocket is not None:
            await self._websocket.close()
        if self._session is not None:
            await self._session.close()

    def _read_action(self, text: str) -> dict[str, Any] | None:
        if self._action_field:
            return {self._action_field: text}
        try:
            return _decode_action(_last_fenced_object(text) or text)
        except (ValueError, RecursionError):  # RecursionError: nested too deeply
            return None

    async def _exchange_messages(self, message_type: str, data: dict[str, Any]) -> _StepResult | _ServerError:
        """Send one message and receive the answer."""
        try:
            async with asyncio.timeout(self._answer_seconds):
                await self._websocket.send_str(json.dumps({"type": message_type, "data": data}))
                message = await self._websocket.receive()
            if message.type is not aiohttp.WSMsgType.TEXT:
                raise OpenEnvError(f"{self._url}: the connection was closed ({message.type.name})")
            frame = _decode_frame(message.data)
            return _decode_error(frame.data) if frame.type == "error" else _decode_result(frame.data)
        except TimeoutError:
            raise OpenEnvError(
                f"{self._url}: no answer to {message_type} within {self._answer_seconds:g} s"
            ) from None
        except (aiohttp.ClientError, ConnectionError, *UNDECODABLE) as error:
            raise OpenEnvError(f"{self._url}: {message_type} failed ({one_line(error)})") from error

    def _make_observation(self, step_result: _StepResult) -> Observation:
        if not self._shown_field:
            text = json.dumps(step_result.observation, ensure_ascii=False)
        elif self._shown_field in step_result.observation:
            shown_value = step_result.observation[self._shown_field]
            text = (
                shown_value if isinstance(shown_value, str) else json.dumps(shown_value, ensure_ascii=False)
            )
        else:
            raise OpenEnvError(
                f"show: the observation has no field {self._shown_field!r}; its fields are "
                f"{', '.join(step_result.observation)}"
            )
        return text_observation(text, step_result.reward or 0.0, step_result.done)


def _last_fenced_object(text: str) -> str:
    """Return the last JSON object between two fences, or ''."""
    for fence_part in reversed(text.split("```")[1:-1]):
        json_text = fence_part.removeprefix("json").strip()
        if json_text.startswith("{") and json_text.endswith("}"):
            return json_text
    return ""
