"""The HTTP interface of one SGLang server: a method per endpoint, ids and labels in, structs and errors out.

Every call has a deadline. Nothing is sent twice: the caller decides what may be repeated. Failures become

    no answer in time, connection refused or cut      ServerGone
    401, 403                                          KeyRejected
    400                                               EngineRefused
    503                                               EngineBusy
    a weight endpoint that refuses or fails           WeightsError
    everything else that is not a success             EngineError

each with the server's own text. Keys: what describes or samples takes the API key; what changes the server
takes the admin key where it has one (and then refuses the API key).
"""

from __future__ import annotations

import math
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec

from asyncrl.engines.sglang.stream import BASE_LABEL, MetaInfo, decode_event
from asyncrl.engines.sglang.transport import HttpTransport, KeyRejected, ServerGone, error_text
from asyncrl.errors import UNDECODABLE, AsyncrlError, ConfigError, EngineError
from asyncrl.weights.manifest import WeightsError

__all__ = ["KeyRejected", "ServerApi", "ServerGone"]

T = TypeVar("T")
PauseMode = Literal["abort", "retract", "in_place"]

GET_SECONDS = 10.0
"""Deadline of a question that the server answers by itself, without its scheduler."""
LOAD_SECONDS = 2.0
"""Deadline of a question that may as well go without an answer."""
CLEANUP_SECONDS = 5.0  # for a server that may be stuck to end a session
ADMIN_SECONDS = 60.0
"""Deadline of a command to the scheduler, unless the call says otherwise."""
INVALID_LABEL = "broken"
"""The label of weights that no run gave the server."""


class ServerInfo(msgspec.Struct, frozen=True):
    """The part of `/server_info` that says how the server was started."""

    version: str
    model_path: str
    tp_size: int = 1
    dp_size: int = 1
    max_req_input_len: int | None = None
    max_total_num_tokens: int | None = None
    enable_memory_saver: bool = False
    enable_return_routed_experts: bool = False
    enable_lora: bool | None = None
    max_lora_rank: int | None = None
    max_loras_per_batch: int = 8
    max_loaded_loras: int | None = None


class ModelInfo(msgspec.Struct, frozen=True):
    """The part of `/model_info` about the weights in use, which follows updates."""

    model_path: str
    weight_version: str = BASE_LABEL
    model_type: str | None = None
    architectures: tuple[str, ...] | None = None


class Load(msgspec.Struct, frozen=True):
    """Describes one data-parallel rank in the answer of `/v1/loads`. `token_usage`: share of its KV memory
    that requests hold; prefixes that are only kept for reuse are not counted."""

    token_usage: float


class Loads(msgspec.Struct, frozen=True):
    loads: tuple[Load, ...]


class ServedModel(msgspec.Struct, frozen=True):
    """An entry of `/v1/models`. `parent`: of an adapter, the model that it is for."""

    id: str
    parent: str | None = None


class ServedModels(msgspec.Struct, frozen=True):
    data: tuple[ServedModel, ...]


class ServerApi:
    def __init__(self, url: str, api_key: str = "", admin_key: str = "") -> None:
        self._transport = HttpTransport(url, api_key, admin_key)

    @property
    def url(self) -> str:
        return self._transport.url

    # -- questions ------------------------------------------------------------------------------------

    async def ready(self) -> bool:
        """True if the server takes new requests: it has started and is not paused. Cheap, unlike `/health`,
        which samples a token, and which says nothing for 20 s during a pause."""
        status = await self._transport.status("/ready", GET_SECONDS)
        if status not in (200, 503):
            raise EngineError(f"server {self.url}: /ready answered {status}; is this an SGLang server?")
        return status == 200

    async def alive(self) -> bool:
        """True if the server's HTTP process answers at all, paused or not."""
        try:
            await self.ready()
        except EngineError:
            return False
        return True

    async def server_info(self) -> ServerInfo:
        return await self._get_struct("/server_info", ServerInfo, ADMIN_SECONDS)

    async def model_info(self) -> ModelInfo:
        return await self._get_struct("/model_info", ModelInfo, GET_SECONDS)

    async def weight_label(self) -> str:
        """The label of the last update, or what the server was started with ("default")."""
        return (await self.model_info()).weight_version

    async def kv_use(self) -> float | None:
        """Share of the KV memory that requests hold, in [0, 1], of the fullest data-parallel rank. None where
        the server does not say so, or not at once."""
        try:
            answer = await self._get_struct("/v1/loads?include=core", Loads, LOAD_SECONDS)
        except EngineError:
            return None
        return max((min(1.0, max(0.0, load.token_usage)) for load in answer.loads), default=None)

    async def adapters(self) -> set[str]:
        """Return the names of those that are loaded."""
        models = await self._get_struct("/v1/models", ServedModels, GET_SECONDS)
        return {model.id for model in models.data if model.parent is not None}

    async def try_admin_key(self) -> None:
        """KeyRejected unless it opens what changes the server. Nothing is changed: no request is named."""
        await self._send_command("/abort_request", {}, GET_SECONDS)

    # -- requests -------------------------------------------------------------------------------------

    def generate(
        self, body: dict[str, Any], silence: float
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Open a stream of one request: the JSON payloads of its events. Leaving the context before the end
        cuts the connection, which aborts the request. ServerGone, also from the iterator: the connection was
        cut by the other side, or nothing came for `silence` seconds."""
        return self._transport.stream("/generate", {**body, "stream": True}, silence)

    def set_asleep(self, asleep: bool) -> None:
        """While it does, its streams may be silent for ever."""
        self._transport.set_asleep(asleep)

    async def generate_whole(self, body: dict[str, Any], seconds: float = ADMIN_SECONDS) -> bytes:
        """The JSON answer to a request that is not streamed."""
        return await self._transport.call("POST", "/generate", seconds, body)

    async def score(self, ids: tuple[int, ...], seconds: float, adapter: str = "") -> tuple[float, ...]:
        """Return log-probs of ids[1:] under the weights in use, at temperature 1; NaN where the server has
        none. All are computed anew, not read from what other weights left in the cache. `adapter`: the name
        of the one to use."""
        meta_info = await self.read(ids, seconds, 0, salt=uuid.uuid4().hex, adapter=adapter)
        scored_entries = meta_info.input_token_logprobs[1:]
        return tuple(math.nan if entry.logprob is None else entry.logprob for entry in scored_entries)

    async def read(
        self, ids: tuple[int, ...], seconds: float, start: int, *, salt: str, top: int = 0, adapter: str = ""
    ) -> MetaInfo:
        """Have `ids` read; entries of ids[start:] come back, the first without log-prob, the others at
        temperature 1, whatever that of the request, with the `top` likeliest tokens at each place. What calls
        with the same `salt` have read up to `start` is not computed again."""
        body = {
            **({"lora_path": adapter} if adapter else {}),
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": start,
            "top_logprobs_num": top,
            "cache_salt": salt,
        }

        meta_info = decode_event(await self.generate_whole(body, seconds)).meta_info
        scored_ids = [entry.id for entry in meta_info.input_token_logprobs]
        expected_ids = ids[start:]
        # A server names the last id of its vocabulary 0, beside its own log-prob.
        if len(scored_ids) != len(expected_ids) or any(
            scored_id not in (expected_id, 0)
            for scored_id, expected_id in zip(scored_ids, expected_ids, strict=True)
        ):
            raise EngineError(f"server {self.url} scored other ids than it was given")

        return meta_info

    # -- control --------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode) -> None:
        """Hold new requests. Running ones: `abort` ends them, `retract` frees their KV cache (it is computed
        again), `in_place` freezes them as they are. The caller must `resume`."""
        await self._send_command("/pause_generation", {"mode": mode}, ADMIN_SECONDS)

    async def resume(self, seconds: float = ADMIN_SECONDS) -> None:
        await self._send_command("/continue_generation", {}, seconds)

    async def flush_cache(self, wait: float = 0.0, seconds: float = ADMIN_SECONDS) -> None:
        """Empty the prefix cache, giving requests `wait` s to end. EngineError if any still runs."""
        await self._send_command(f"/flush_cache?timeout={wait:g}", {}, wait + seconds)

    async def release_memory(self) -> None:
        """Give up KV cache, prefixes and weights. It ends a server where requests run, also paused
        `in_place`, and where one waits for its grammar."""
        await self._send_command(
            "/release_memory_occupation", {"tags": ["kv_cache", "weights"]}, ADMIN_SECONDS
        )

    async def resume_memory(self, part: Literal["kv_cache", "weights"]) -> None:
        """Take the memory of a part again: without content, but for buffers that are no weights. It ends a
        server that has not given the part up."""
        await self._send_command("/resume_memory_occupation", {"tags": [part]}, ADMIN_SECONDS)

    # -- weights: WeightsError carries the server's text ------------------------------------------------

    async def invalidate(self, seconds: float = ADMIN_SECONDS) -> None:
        """End all requests, and give the weights a label that no run uses: clients discard what the server
        samples until the next load. In a pause `in_place`, requests end when it does, without another token
        under the old label."""
        body = {"new_version": INVALID_LABEL, "abort_all_requests": True}
        await self._change_weights("/update_weight_version", body, seconds)

    async def update_from_disk(self, path: str, label: str, seconds: float = ADMIN_SECONDS) -> None:
        """Load a directory in Hugging Face layout. Unless paused, waits for every running request. The
        prefix cache is kept: where it cannot be emptied, an update that is to do so half fails (0.5.23) or
        ends the server (0.5.20)."""
        body = {"model_path": path, "weight_version": label, "flush_cache": False}
        await self._change_weights("/update_weights_from_disk", body, seconds)

    async def load_adapter(self, name: str, path: str, seconds: float = ADMIN_SECONDS) -> None:
        """Load a directory in PEFT's layout, beside what runs."""
        await self._change_weights("/load_lora_adapter", {"lora_name": name, "lora_path": path}, seconds)

    async def unload_adapter(self, name: str, seconds: float = ADMIN_SECONDS) -> None:
        """Waits for the requests that use it, and until then the server loads no other. It remembers the
        path: a request that names the adapter later loads it again, if there is still something there."""
        await self._change_weights("/unload_lora_adapter", {"lora_name": name}, seconds)

    async def begin_update(self) -> None:
        await self._change_weights("/begin_weight_update", {}, ADMIN_SECONDS)

    async def end_update(self, seconds: float = ADMIN_SECONDS) -> None:
        await self._change_weights("/end_weight_update", {}, seconds)

    async def init_group(
        self,
        address: str,
        port: int,
        rank_offset: int,
        world_size: int,
        name: str,
        backend: str,
        seconds: float = ADMIN_SECONDS,
    ) -> None:
        """Join a process group as ranks `rank_offset`... Rank 0 must be listening before this is called:
        without it the server's scheduler, and with it everything, hangs."""
        body = {
            "master_address": address,
            "master_port": port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": name,
            "backend": backend,
        }

        await self._change_weights("/init_weights_update_group", body, seconds)

    async def update_from_group(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group: str,
        label: str | None,
        seconds: float = ADMIN_SECONDS,
    ) -> None:
        """Receive tensors that rank 0 broadcasts as one block of bytes. `label`: the version this completes;
        None: more is to come."""
        body: dict[str, Any] = {
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(shape) for shape in shapes],
            "group_name": group,
            "flush_cache": False,
            "load_format": "flattened_bucket",
        }
        if label is not None:
            body["weight_version"] = label

        await self._change_weights("/update_weights_from_distributed", body, seconds)

    async def destroy_group(self, name: str, seconds: float = ADMIN_SECONDS) -> None:
        await self._change_weights("/destroy_weights_update_group", {"group_name": name}, seconds)

    async def close(self) -> None:
        await self._transport.close()

    # -- plumbing -------------------------------------------------------------------------------------

    async def _get_struct(self, path: str, answer_type: type[T], seconds: float) -> T:
        content = await self._transport.call("GET", path, seconds)
        try:
            return msgspec.json.decode(content, type=answer_type)
        except UNDECODABLE as error:
            description = f"server {self.url}: {path} answered what is not understood"
            raise EngineError(f"{description}: {error}") from error

    async def _send_command(self, path: str, body: dict[str, Any], seconds: float) -> None:
        await self._transport.call("POST", path, seconds, body, admin=True)

    async def _change_weights(self, path: str, body: dict[str, Any], seconds: float) -> None:
        """WeightsError also when the server says with status 200 that it failed."""
        content = await self._transport.call("POST", path, seconds, body, admin=True, failure=WeightsError)
        answer = msgspec.json.decode(content) if content else {}
        if isinstance(answer, dict) and not answer.get("success", True):
            raise WeightsError(f"server {self.url}: {path}: {error_text(content)}")


# -- what differs between the supported versions of SGLang -------------------------------------------------


@dataclass(frozen=True)
class UpdateProtocol:
    """The protocol of one version. `modes`: what it can do with requests under way at an update. `sessions`:
    it accepts broadcast weights within a session only, of which there is one at a time."""

    pause_modes: tuple[PauseMode, ...]
    needs_session: bool

    @asynccontextmanager
    async def update_session(self, server: ServerApi) -> AsyncIterator[None]:
        """To be entered around the calls that change weights through a process group."""
        if not self.needs_session:
            yield
            return

        try:
            await server.begin_update()
        except WeightsError:  # one is open: its owner died
            await server.end_update()
            await server.begin_update()

        try:
            yield
        except BaseException:
            with suppress(AsyncrlError):  # the error of the body says more
                await server.end_update(CLEANUP_SECONDS)
            raise

        await server.end_update()


# It cannot empty its cache while retracted requests wait.
WITHOUT_SESSIONS = UpdateProtocol(("in_place", "abort"), needs_session=False)
WITH_SESSIONS = UpdateProtocol(("in_place", "retract", "abort"), needs_session=True)
PROTOCOLS: Mapping[str, UpdateProtocol] = {
    "0.5.20": WITHOUT_SESSIONS,
    "0.5.22": WITH_SESSIONS,
    "0.5.23": WITH_SESSIONS,
}


def protocol_of(version: str, url: str) -> UpdateProtocol:
    """ConfigError for a version that the project does not know."""
    try:
        return PROTOCOLS[version]
    except KeyError:
        supported_versions = ", ".join(PROTOCOLS)
        raise ConfigError(f"server {url} runs SGLang {version}; supported are {supported_versions}") from None
