"""Checks servers of other versions of SGLang than the tested one: a server is accepted if it does what the
run needs.

    check_routes       before the start         routes and fields of requests, in /openapi.json
                                                ──► fields of answers
    check_behaviour    before the first load    log-probs of a text ──► a request across a pause, in the
                                                run's mode ──► the label of the weights
                                                ──► a session of updates (weights.transport=collective)

The first changes nothing, so that a server in use can be checked. The second is for the server's supervisor.
What neither shows is checked at each load: the label is read back, and log-probs of a fixed text are compared
with the trainer's.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from asyncrl.config import RunConfig
from asyncrl.engines.base import EngineBusy, Request, Sampling
from asyncrl.engines.sglang.http import ADMIN_SECONDS, ServerApi, ServerGone, update_session
from asyncrl.engines.sglang.stream import MetaInfo, StreamedTurn, decode_event
from asyncrl.errors import AsyncrlError, ConfigError, EngineError, one_line
from asyncrl.types import NO_VERSION

log = logging.getLogger("asyncrl.server_supervisor")

TESTED_VERSION = "0.5.23"
"""SGLang version that the tests use; a server with this version needs no further check."""
PROMPT_IDS = tuple(range(10, 26))
"""Short prompt of token IDs that exist in every vocabulary."""
SAMPLED_TOKENS = 48
"""Number of tokens in the request that is sampled across a pause."""
STEP_SECONDS = 300.0
"""Deadline for each step of `check_behaviour`; a server may compile kernels for its first requests."""
FLUSH_SECONDS = 2.0
"""Time limit for aborted requests to leave the server."""
MAX_LOGPROB_GAP = 1.0
"""Maximum difference, in nats, between the sampled and the scored log-prob of a token; in bfloat16, the
difference can be a few tenths."""

PASSING_ERRORS = (ServerGone, EngineBusy)
"""Errors that do not depend on the version, after which the server's supervisor tries again."""

BodyFields = dict[str, tuple[str, ...]]
"""Fields of JSON request bodies, by the path of the route."""
SCORE_ROUTES: BodyFields = {
    "/ready": (),
    "/server_info": (),
    "/model_info": (),
    "/generate": (
        "input_ids",
        "sampling_params",
        "return_logprob",
        "logprob_start_len",
        "top_logprobs_num",
        "cache_salt",
    ),
}
CLASSIFY_ROUTES: BodyFields = {
    "/ready": (),
    "/server_info": (),
    "/model_info": (),
    "/classify": ("input_ids",),
}
SAMPLE_ROUTES: BodyFields = {
    "/generate": (*SCORE_ROUTES["/generate"], "rid", "stream"),
    "/abort_request": (),
    "/pause_generation": ("mode",),
    "/continue_generation": (),
    "/flush_cache": (),
    "/update_weight_version": ("new_version", "abort_all_requests"),
}
DISK_UPDATE_ROUTES: BodyFields = {
    "/update_weights_from_disk": ("model_path", "weight_version", "flush_cache"),
}
GROUP_UPDATE_ROUTES: BodyFields = {
    "/init_weights_update_group": (
        "master_address",
        "master_port",
        "rank_offset",
        "world_size",
        "group_name",
        "backend",
    ),
    "/begin_weight_update": ("selector",),
    "/update_weights_from_distributed": (
        "selector",
        "names",
        "dtypes",
        "shapes",
        "group_name",
        "flush_cache",
        "load_format",
        "weight_version",
    ),
    "/end_weight_update": (),
    "/destroy_weights_update_group": ("group_name",),
}
ADAPTER_ROUTES: BodyFields = {
    "/generate": (*SAMPLE_ROUTES["/generate"], "lora_path"),
    "/load_lora_adapter": ("lora_name", "lora_path"),
    "/unload_lora_adapter": ("lora_name",),
    "/v1/models": (),
}
SLEEP_ROUTES: BodyFields = {
    "/release_memory_occupation": ("tags",),
    "/resume_memory_occupation": ("tags",),
}


class Schema(msgspec.Struct, frozen=True):
    """A JSON schema: a reference to another schema, or an object with properties."""

    ref: str = msgspec.field(default="", name="$ref")
    properties: dict[str, msgspec.Raw] = {}


class MediaType(msgspec.Struct, frozen=True):
    schema: Schema = Schema()


class RequestBody(msgspec.Struct, frozen=True):
    content: dict[str, MediaType] = {}


class Operation(msgspec.Struct, frozen=True, rename="camel"):
    request_body: RequestBody = RequestBody()


class Components(msgspec.Struct, frozen=True):
    schemas: dict[str, Schema] = {}


class OpenApi(msgspec.Struct, frozen=True):
    """The part of `/openapi.json` about routes, by path and method, and about the bodies of requests."""

    paths: dict[str, dict[str, Operation]]
    components: Components = Components()

    def lacking(self, needed: BodyFields) -> list[str]:
        """Return the needed paths that no route has, and the needed fields that a route's body lacks. A body
        without a schema may have any field."""
        lacking: list[str] = []
        for path, fields in needed.items():
            operations = self.paths.get(path)
            if operations is None:
                lacking.append(path)
                continue

            properties: set[str] = set()
            for operation in operations.values():
                for media_type in operation.request_body.content.values():
                    schema = media_type.schema
                    schema = self.components.schemas.get(schema.ref.rpartition("/")[2], schema)
                    properties.update(schema.properties)
            if properties:
                lacking += [f"{field} in {path}" for field in fields if field not in properties]

        return lacking


def needed_routes(config: RunConfig, scorer: str) -> BodyFields:
    """Return the routes that this run uses, with the fields of their requests. `scorer`: the server's scorer;
    "" for a server of the policy."""
    if scorer == "reward":  # a reward model, which classifies and does not sample
        return CLASSIFY_ROUTES
    if scorer:
        return SCORE_ROUTES

    routes = SCORE_ROUTES | SAMPLE_ROUTES
    if config.adapters_apart:
        routes |= ADAPTER_ROUTES | DISK_UPDATE_ROUTES
    elif config.weights.transport == "disk":
        routes |= DISK_UPDATE_ROUTES
    else:
        routes |= GROUP_UPDATE_ROUTES
    if config.shifts:
        routes |= SLEEP_ROUTES
    if config.trainer.router_replay:
        generate_fields = (*routes["/generate"], "return_routed_experts", "routed_experts_start_len")
        routes |= {"/generate": generate_fields}

    return routes


def needed_answers(config: RunConfig, scorer: str) -> BodyFields:
    """Return the fields that this run reads in answers to questions, by path."""
    server_fields = ["version", "model_path", "tp_size", "dp_size", "max_req_input_len"]
    if not scorer and config.shifts:
        server_fields += ["enable_memory_saver", "max_total_num_tokens"]
    if not scorer and config.trainer.router_replay:
        server_fields += ["enable_return_routed_experts"]
    if not scorer and config.adapters_apart:
        server_fields += ["enable_lora", "max_lora_rank", "lora_target_modules"]
        server_fields += ["max_loras_per_batch", "max_loaded_loras"]

    return {
        "/server_info": tuple(server_fields),
        "/model_info": ("model_path", "weight_version", "architectures"),
    }


async def check_routes(config: RunConfig, server: ServerApi, version: str, scorer: str) -> None:
    """Check that a server of another version than the tested one has the routes and fields that this run
    uses. Changes nothing. Raises ConfigError with what is lacking."""
    if version == TESTED_VERSION:
        return

    try:
        # The server makes the document when it is first asked, which takes seconds, more on a busy machine.
        api = await server.get_struct("/openapi.json", OpenApi, ADMIN_SECONDS)
    except PASSING_ERRORS:
        raise
    except EngineError as error:
        raise _unfit(server, version, f"cannot read its routes ({one_line(error)})") from error

    lacking = api.lacking(needed_routes(config, scorer))
    for path, fields in needed_answers(config, scorer).items():
        answer = await server.get_struct(path, dict[str, msgspec.Raw])
        lacking += [f"{field} in the response from {path}" for field in fields if field not in answer]

    if lacking:
        raise _unfit(server, version, f"it lacks {', '.join(lacking)}")


async def check_behaviour(config: RunConfig, server: ServerApi, version: str, scorer: str) -> None:
    """Check that a server of another version than the tested one does what the run will have it do, and log
    one line if it does. The server is ready, and its supervisor's alone, while workers may sample there.
    Raises ConfigError with the step that fails."""
    if version == TESTED_VERSION or scorer == "reward":
        return

    check = BehaviourCheck(config, server)
    steps: dict[str, Callable[[], Awaitable[None]]] = {"scoring a text": check.score}
    if not scorer and config.adapters_apart:
        steps["sampling a request"] = check.sample
    elif not scorer:
        steps[f"sampling a request across a pause ({check.mode})"] = check.sample
    if not scorer:
        steps["relabeling the weights"] = check.relabel
    if not scorer and config.weights.transport != "disk" and not config.adapters_apart:
        steps["opening an update session"] = check.open_session
    if not scorer and config.adapters_apart:
        steps["listing the adapters"] = check.list_adapters

    for step, run_step in steps.items():
        try:
            async with asyncio.timeout(STEP_SECONDS):
                await run_step()
        except PASSING_ERRORS:
            raise
        except TimeoutError:
            raise _unfit(server, version, f"{step} took longer than {STEP_SECONDS:g} s") from None
        except AsyncrlError as error:
            raise _unfit(server, version, f"{step} failed: {one_line(error)}") from error

    log.warning(
        "server %s runs SGLang %s (the tested version is %s) and passed these checks: %s",
        server.url,
        version,
        TESTED_VERSION,
        "routes and fields, " + ", ".join(steps),
    )


class BehaviourCheck:
    """The steps of `check_behaviour`. Each raises an AsyncrlError if the server does something else."""

    def __init__(self, config: RunConfig, server: ServerApi) -> None:
        self._config = config
        self._server = server
        self.mode = config.update_mode

    async def score(self) -> None:
        scored_logprobs = await self._server.score(PROMPT_IDS, STEP_SECONDS)
        _check_logprobs(scored_logprobs)

    async def sample(self) -> None:
        """Sample a request that a pause interrupts, as an update does, and compare its log-probs with scores
        of the same tokens. Adapters need no pause."""
        started = asyncio.Event()
        sampling = asyncio.create_task(self._sample(started))
        try:
            await started.wait()
            if not self._config.adapters_apart:
                try:
                    await self._server.pause(self.mode)
                    is_ready = await self._server.ready()
                    if self.mode != "in_place":
                        await self._server.flush_cache(wait=FLUSH_SECONDS if self.mode == "abort" else 0.0)
                finally:
                    await self._server.resume()
                if is_ready or not await self._server.ready():
                    raise EngineError("/ready returned 200 during a pause, or 503 after the pause")
            meta_info = await sampling
        finally:
            sampling.cancel()
            # Unlike `await sampling` this tells a cancellation of the caller from that of the request.
            await asyncio.gather(sampling, return_exceptions=True)

        self._check_sampled(meta_info)
        sampled_ids = tuple(token.id for token in meta_info.output_token_logprobs)
        scored_logprobs = await self._server.score((*PROMPT_IDS, *sampled_ids), STEP_SECONDS)
        gaps = [
            abs(token.logprob - scored_logprob)
            for token, scored_logprob in zip(
                meta_info.output_token_logprobs, scored_logprobs[len(PROMPT_IDS) - 1 :], strict=True
            )
        ]
        if gaps and not max(gaps) < MAX_LOGPROB_GAP:
            raise EngineError(f"sampled and scored log-probs differ by {max(gaps):.2g} nats")

    async def relabel(self) -> None:
        """Give the weights the label that they have. With another label, workers would discard what they
        sample meanwhile; whether the server takes a new label, each load shows."""
        label = await self._server.weight_label()
        await self._server.relabel(label)
        new_label = await self._server.weight_label()
        if new_label != label:
            raise EngineError(f"the label {label!r} was read back as {new_label!r}")

    async def open_session(self) -> None:
        """Open and close a session of updates, within a pause as an update does: else requests hold it up."""
        try:
            await self._server.pause(self.mode)
            async with update_session(self._server):
                pass
        finally:
            await self._server.resume()

    async def list_adapters(self) -> None:
        await self._server.adapters()

    async def _sample(self, started: asyncio.Event) -> MetaInfo:
        """Return the fields of the last event of a stream, with the log-probs of all events. Sets `started`
        with the first event, or when none comes."""
        body: dict[str, Any] = {
            "input_ids": PROMPT_IDS,
            "sampling_params": {"max_new_tokens": SAMPLED_TOKENS, "temperature": 1.0, "ignore_eos": True},
            "return_logprob": True,
            "cache_salt": "asyncrl-check",
        }
        meta_info = MetaInfo()
        stream = StreamedTurn(Request("check", PROMPT_IDS, Sampling(SAMPLED_TOKENS, ())), NO_VERSION, True)
        try:
            async with self._server.generate(body, STEP_SECONDS) as events:
                async for payload in events:
                    event = decode_event(payload)
                    stream.add_event(event)
                    meta_info = event.meta_info
                    started.set()
        finally:
            started.set()

        return msgspec.structs.replace(meta_info, output_token_logprobs=tuple(stream.tokens))

    def _check_sampled(self, meta_info: MetaInfo) -> None:
        finish = meta_info.finish_reason
        if finish is None or (finish.type == "abort" and self.mode != "abort"):
            raise EngineError(f"the request finished with reason {finish.type if finish else None!r}")

        count = len(meta_info.output_token_logprobs)
        if finish.type != "abort" and count != SAMPLED_TOKENS:
            raise EngineError(f"the server sampled {count} of {SAMPLED_TOKENS} tokens")
        if not meta_info.weight_version or (finish.type != "abort" and not meta_info.weight_versions):
            raise EngineError("the response lacks weight_version or weight_versions")
        _check_logprobs(tuple(token.logprob for token in meta_info.output_token_logprobs))


def _check_logprobs(logprobs: tuple[float, ...]) -> None:
    for logprob in logprobs:
        if not (math.isfinite(logprob) and logprob <= 0):
            raise EngineError(f"{logprob} is not a valid log-prob")


def _unfit(server: ServerApi, version: str, reason: str) -> ConfigError:
    return ConfigError(
        f"server {server.url} runs SGLang {version}, which cannot serve this run: {reason}; "
        f"the tested version is {TESTED_VERSION}"
    )
