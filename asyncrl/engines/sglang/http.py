"""The HTTP interface of one SGLang server: a method per endpoint, ids and labels in, structs and errors out.

Every call has a deadline. Nothing is sent twice: the caller decides what may be repeated. Failures become

    no answer in time, connection refused or cut      ServerGone
    401, 403                                          KeyRejected
    400                                               EngineRefused
    503                                               EngineBusy
    a weight endpoint that refuses or fails           WeightsError
    everything else that is not a success             EngineError

each with the server's own text. Keys: requests that describe or sample use the API key; requests that change
the server use the admin key where the server has an admin key (and then refuses the API key).
"""

from __future__ import annotations

import math
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any, Literal, TypeVar

import msgspec

from asyncrl.engines.sglang.stream import BASE_LABEL, MetaInfo, check_image_sizes, decode_event
from asyncrl.engines.sglang.transport import HttpTransport, KeyRejected, ServerGone, error_text
from asyncrl.errors import UNDECODABLE, AsyncrlError, EngineError
from asyncrl.weights.manifest import WeightsError

__all__ = ["KeyRejected", "ServerApi", "ServerGone"]

T = TypeVar("T")
PauseMode = Literal["abort", "retract", "in_place"]

GET_SECONDS = 10.0
"""Deadline for a request that the server answers without its scheduler."""
LOAD_SECONDS = 2.0
"""Deadline for a request whose answer is optional."""
CLEANUP_SECONDS = 5.0
"""Deadline for closing a session on a server that may be stuck."""
ADMIN_SECONDS = 60.0
"""Deadline for a command to the scheduler, unless the call sets another deadline."""
UPDATED_MODEL = "target"
"""Model on a server that receives broadcast weights, not the draft model for speculative decoding."""
INVALID_LABEL = "broken"
"""Label of weights that the server did not receive from any run."""


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
    lora_target_modules: list[str] | None = None
    max_loras_per_batch: int = 8
    max_loaded_loras: int | None = None
    quantization: str | None = None
    speculative_algorithm: str | None = None
    speculative_draft_model_path: str | None = None


class ModelInfo(msgspec.Struct, frozen=True):
    """The part of `/model_info` about the weights in use, which follows updates."""

    model_path: str
    weight_version: str = BASE_LABEL
    model_type: str | None = None
    architectures: tuple[str, ...] | None = None


class Load(msgspec.Struct, frozen=True):
    """Describes one data-parallel rank in the answer of `/v1/loads`. `token_usage`: the fraction of the
    rank's KV memory that requests hold, without prefixes that are only kept for reuse."""

    token_usage: float


class Loads(msgspec.Struct, frozen=True):
    loads: tuple[Load, ...]


class ServedModel(msgspec.Struct, frozen=True):
    """An entry of `/v1/models`. `parent`: the base model, if the entry is an adapter."""

    id: str
    parent: str | None = None


class ServedModels(msgspec.Struct, frozen=True):
    data: tuple[ServedModel, ...]


class ServerApi(HttpTransport):
    """The server at `url`, with its keys. Used within one event loop."""

    # -- questions ------------------------------------------------------------------------------------

    async def ready(self) -> bool:
        """True if the server takes new requests: started, and not paused. Cheap, unlike `/health`, which
        samples a token and takes 20 s to answer during a pause."""
        status = await self.status("/ready", GET_SECONDS)
        if status not in (200, 503):
            raise EngineError(
                f"server {self.url}: /ready returned status {status}; is this an SGLang server?"
            )
        return status == 200

    async def alive(self) -> bool:
        """True if the server's HTTP process answers at all, paused or not."""
        try:
            await self.ready()
        except EngineError:
            return False
        return True

    async def get_struct(self, path: str, answer_type: type[T], seconds: float = GET_SECONDS) -> T:
        """Return the answer to a question. Raises EngineError if the answer is of another form."""
        content = await self.call("GET", path, seconds)
        try:
            return msgspec.json.decode(content, type=answer_type)
        except UNDECODABLE as error:
            description = f"server {self.url}: cannot parse the response from {path}"
            raise EngineError(f"{description}: {error}") from error

    async def server_info(self) -> ServerInfo:
        return await self.get_struct("/server_info", ServerInfo, ADMIN_SECONDS)

    async def model_info(self) -> ModelInfo:
        return await self.get_struct("/model_info", ModelInfo)

    async def weight_label(self) -> str:
        """Return the label of the last update, or "default" for the weights that the server was started
        with."""
        return (await self.model_info()).weight_version

    async def kv_use(self) -> float | None:
        """Return the fraction of KV memory that requests hold, in [0, 1], at the fullest data-parallel rank.
        None if the server does not answer at once."""
        try:
            answer = await self.get_struct("/v1/loads?include=core", Loads, LOAD_SECONDS)
        except EngineError:
            return None
        return max((min(1.0, max(0.0, load.token_usage)) for load in answer.loads), default=None)

    async def adapters(self) -> set[str]:
        """Return the names of the loaded adapters."""
        models = await self.get_struct("/v1/models", ServedModels)
        return {model.id for model in models.data if model.parent is not None}

    async def try_admin_key(self) -> None:
        """Raise KeyRejected unless the admin key is accepted. Changes nothing: the command aborts no
        request."""
        await self._send_command("/abort_request", {}, GET_SECONDS)

    # -- requests -------------------------------------------------------------------------------------

    def generate(
        self, body: dict[str, Any], silence: float
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Open the stream of one request: the JSON payloads of its events. Leaving the context before the end
        cuts the connection, which aborts the request. Raises ServerGone, also from the iterator, if the
        server cuts the connection or is silent for `silence` seconds."""
        return self.stream("/generate", {**body, "stream": True}, silence)

    async def generate_whole(self, body: dict[str, Any], seconds: float = ADMIN_SECONDS) -> bytes:
        """Return the JSON answer to a request that is not streamed."""
        return await self.call("POST", "/generate", seconds, body)

    async def score(
        self,
        ids: tuple[int, ...],
        seconds: float,
        *,
        adapter: str = "",
        prompt: Mapping[str, Any] | None = None,
    ) -> tuple[float, ...]:
        """Return log-probs of ids[1:] under the weights in use, at temperature 1; NaN where the server has no
        log-prob. A new salt keeps the server from using KV that other weights left in the cache. `adapter`:
        the name of the adapter to use. `prompt`: as in `read`."""
        meta_info = await self.read(
            ids, seconds, start=0, salt=uuid.uuid4().hex, adapter=adapter, prompt=prompt
        )
        return tuple(
            math.nan if entry.logprob is None else entry.logprob
            for entry in meta_info.input_token_logprobs[1:]
        )

    async def read(
        self,
        ids: tuple[int, ...],
        seconds: float,
        *,
        start: int,
        salt: str,
        top: int = 0,
        adapter: str = "",
        prompt: Mapping[str, Any] | None = None,
    ) -> MetaInfo:
        """Have the server read `ids`. Returns entries of ids[start:], the first without a log-prob, later
        entries at temperature 1, with the `top` likeliest tokens at each position. KV up to `start` from
        earlier calls with the same `salt` is used again. `prompt`: the fields of the request for ids with
        images, see `PromptWriter`."""
        body: dict[str, Any] = {
            **(prompt or {"input_ids": ids}),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": start,
            "top_logprobs_num": top,
            "cache_salt": salt,
        }
        if adapter:
            body["lora_path"] = adapter

        meta_info = decode_event(await self.generate_whole(body, seconds)).meta_info
        if "image_data" in body:
            check_image_sizes(meta_info.prompt_tokens, len(ids))

        scored_ids = [entry.id for entry in meta_info.input_token_logprobs]
        expected_ids = ids[start:]
        # A server names the last id of its vocabulary, and the ids of images, 0, beside their own log-probs.
        if len(scored_ids) != len(expected_ids) or any(
            scored_id not in (expected_id, 0)
            for scored_id, expected_id in zip(scored_ids, expected_ids, strict=True)
        ):
            raise EngineError(f"server {self.url} did not score the token IDs that it received")

        return meta_info

    # -- control --------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode) -> None:
        """Hold new requests. Running requests: `abort` ends them, `retract` frees their KV cache (to be
        computed again), `in_place` freezes them as they are. The caller must `resume`."""
        await self._send_command("/pause_generation", {"mode": mode})

    async def resume(self, seconds: float = ADMIN_SECONDS) -> None:
        await self._send_command("/continue_generation", {}, seconds)

    async def flush_cache(self, wait: float = 0.0, seconds: float = ADMIN_SECONDS) -> None:
        """Empty the prefix cache, giving requests `wait` s to end. EngineError if any still runs."""
        await self._send_command(f"/flush_cache?timeout={wait:g}", {}, wait + seconds)

    async def release_memory(self) -> None:
        """Give up KV cache, prefixes and weights. Ends a server where requests run, also if paused
        `in_place`, and where a request waits for its grammar."""
        await self._send_command("/release_memory_occupation", {"tags": ["kv_cache", "weights"]})

    async def resume_memory(self, part: Literal["kv_cache", "weights"]) -> None:
        """Take the memory of a part again, without its content, except for buffers that are no weights. Ends
        a server that has not given up this part."""
        await self._send_command("/resume_memory_occupation", {"tags": [part]})

    # -- weights: WeightsError carries the server's text ------------------------------------------------

    async def invalidate(self, seconds: float = ADMIN_SECONDS) -> None:
        """End all requests, and give the weights a label that no run uses: clients discard all tokens until
        the next load. In a pause `in_place`, requests end when the pause ends, without another token under
        the old label."""
        body = {"new_version": INVALID_LABEL, "abort_all_requests": True}
        await self._change_weights("/update_weight_version", body, seconds)

    async def relabel(self, label: str) -> None:
        """Give the weights another label. Requests go on, under the new label."""
        body = {"new_version": label, "abort_all_requests": False}
        await self._change_weights("/update_weight_version", body, ADMIN_SECONDS)

    async def update_from_disk(self, path: str, label: str, seconds: float = ADMIN_SECONDS) -> None:
        """Load a directory in Hugging Face layout. Unless paused, waits for every running request. The prefix
        cache is kept: an update that shall empty the cache but cannot half fails."""
        body = {"model_path": path, "weight_version": label, "flush_cache": False}
        await self._change_weights("/update_weights_from_disk", body, seconds)

    async def load_adapter(self, name: str, path: str, seconds: float = ADMIN_SECONDS) -> None:
        """Load a directory in PEFT's layout, while requests run."""
        await self._change_weights("/load_lora_adapter", {"lora_name": name, "lora_path": path}, seconds)

    async def unload_adapter(self, name: str, seconds: float = ADMIN_SECONDS) -> None:
        """Unload an adapter after the last request that uses it; until then the server loads no other
        adapter. The server remembers the path: a later request with this name loads the adapter again, if its
        files still exist."""
        await self._change_weights("/unload_lora_adapter", {"lora_name": name}, seconds)

    async def begin_update(self) -> None:
        await self._change_weights("/begin_weight_update", {"selector": UPDATED_MODEL}, ADMIN_SECONDS)

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
        """Join a process group as ranks `rank_offset`... Rank 0 must be listening before this call: without
        rank 0 the server's scheduler hangs, and so the whole server."""
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
        """Receive tensors that rank 0 broadcasts as one block of bytes. `label`: the version that these
        tensors complete; None: more tensors follow."""
        body: dict[str, Any] = {
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(shape) for shape in shapes],
            "group_name": group,
            "flush_cache": False,
            "load_format": "flattened_bucket",
            "selector": UPDATED_MODEL,
        }
        if label is not None:
            body["weight_version"] = label

        await self._change_weights("/update_weights_from_distributed", body, seconds)

    async def destroy_group(self, name: str, seconds: float = ADMIN_SECONDS) -> None:
        await self._change_weights("/destroy_weights_update_group", {"group_name": name}, seconds)

    # -- plumbing -------------------------------------------------------------------------------------

    async def _send_command(self, path: str, body: dict[str, Any], seconds: float = ADMIN_SECONDS) -> None:
        await self.call("POST", path, seconds, body, admin=True)

    async def _change_weights(self, path: str, body: dict[str, Any], seconds: float) -> None:
        """Send a command about weights. Raises WeightsError, also when the server reports a failure with
        status 200."""
        content = await self.call("POST", path, seconds, body, admin=True, failure=WeightsError)
        answer = msgspec.json.decode(content) if content else {}
        if isinstance(answer, dict) and not answer.get("success", True):
            raise WeightsError(f"server {self.url}: {path}: {error_text(content)}")


@asynccontextmanager
async def update_session(server: ServerApi) -> AsyncIterator[None]:
    """Enter this context around the calls that change weights through a process group: a server takes
    broadcast weights within a session only, one session at a time."""
    try:
        await server.begin_update()
    except WeightsError:  # an earlier session is open, whose owner died
        await server.end_update()
        await server.begin_update()

    try:
        yield
    except BaseException:
        with suppress(AsyncrlError):  # the error of the body says more
            await server.end_update(CLEANUP_SECONDS)
        raise

    await server.end_update()
