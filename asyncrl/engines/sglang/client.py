"""A worker's client of one SGLang server: ids in; ids, log-probs and versions out. Never text.

    request ──► room ──► stream ──► events put together ──► Generation
                           └► cut off, silent or aborted ──► EngineLost, with the streamed tokens

One call is one HTTP request. The server may end the request before the turn is over, at an end-of-sequence id
of its own: the caller (rollout/server_pool.py) asks for the remaining tokens. The server forgets prefixes by
itself.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import numpy as np

from asyncrl.config import RunConfig
from asyncrl.engines.base import NOTHING, EngineLost, EngineRefused, Request, check_request
from asyncrl.engines.sglang.adapters import adapter_name, is_outdated
from asyncrl.engines.sglang.http import ServerApi, ServerGone
from asyncrl.engines.sglang.images import TEXT_ONLY, PromptWriter
from asyncrl.engines.sglang.stream import ForeignWeights, StreamedTurn, decode_event
from asyncrl.errors import EngineError
from asyncrl.types import NO_VERSION, Generation, PolicyVersion, StopReason, TokenScores
from asyncrl.vision.image_ids import largest_token_id
from asyncrl.wire.messages.worker import EngineUse

SEED_MASK = (1 << 31) - 1
ADAPTER_REFUSAL = "LoRA adapter"  # in the refusal of a request whose adapter the server does not have
MAX_REQUESTS = 256  # of one worker, open at one server at once; more wait in the worker


class SGLangClient:
    """Calls the server at `api.url`. Used within one event loop.

    `vocabulary`: the number of the model's ids. `use`: totals of the server's work. `salt`: names the run's
    attachment to the server; other runs give the same labels to different weights, and the server's cache
    outlives runs. `prompt_writer`: writes prompts with images for the server's model.
    """

    def __init__(
        self,
        api: ServerApi,
        config: RunConfig,
        vocabulary: int,
        use: EngineUse | None = None,
        salt: str = "",
        prompt_writer: PromptWriter = TEXT_ONLY,
    ) -> None:
        self.api = api
        self.use = use or EngineUse(api.url)
        self._config = config
        self._vocabulary = vocabulary
        self._salt = salt
        self._prompt_writer = prompt_writer
        self._uses_adapters = config.adapters_apart

        self._in_place = config.update_mode == "in_place" and not self._uses_adapters
        # Where updates retract requests, a retraction is no sign of too little memory.
        self._updates_retract = config.shifts or (config.update_mode == "retract" and not self._uses_adapters)
        self._acked_version = NO_VERSION
        self._free_requests = asyncio.Semaphore(MAX_REQUESTS)
        # Calls have no deadline until `close`, or until the version of their adapter is outdated.
        self._open_calls: dict[asyncio.Timeout, StreamedTurn | None] = {}  # None: waits for room
        self._is_closed = False

    def mark_version(self, version: PolicyVersion) -> None:
        """Note that the server has confirmed this version: later requests see nothing older. Requests whose
        adapter is outdated end with the tokens so far, but not before the first token: else a turn might
        never get a token."""
        self._acked_version = version
        if self._uses_adapters:
            started_calls = [
                (call, stream) for call, stream in self._open_calls.items() if stream and stream.tokens
            ]
            self._end_calls(
                call
                for call, stream in started_calls
                if is_outdated(stream.acked_version, version, self._config)
            )

    def set_asleep(self, asleep: bool) -> None:
        """Note whether the server sleeps: streams may be silent during a sleep."""
        self.api.set_asleep(asleep)

    async def generate(self, request: Request) -> Generation:
        """Sample a turn, or the beginning of a turn (stop: ABORT). Raises EngineBusy, EngineLost when another
        server can go on, and EngineError on a request that no server can serve."""
        check_request(request, self._vocabulary, self._config.rollout.max_tokens)
        remaining_room = self._config.rollout.max_tokens - len(request.ids)
        token_limit = min(remaining_room, request.sampling.max_new_tokens)
        sampling = msgspec.structs.replace(request.sampling, max_new_tokens=token_limit)
        request = msgspec.structs.replace(request, sampling=sampling)

        stream = None
        try:
            async with asyncio.timeout(None) as call:
                self._open_calls[call] = None
                async with self._free_requests:
                    stream = StreamedTurn(request, self._acked_version, self._in_place, self._uses_adapters)
                    self._open_calls[call] = stream
                    await self._read_stream(request, stream)
                sampled = stream.generation()
        except (ServerGone, ForeignWeights) as error:
            raise self._engine_lost(error, stream) from error
        except EngineRefused as error:
            if self._uses_adapters and ADAPTER_REFUSAL in str(error):
                raise self._engine_lost(error, stream) from error
            raise
        except TimeoutError as error:
            if self._is_closed or stream is None:
                raise self._engine_lost("the server is no longer used", stream) from error
            return _good_part(stream)
        finally:
            self._open_calls.pop(call, None)

        if sampled.stop is not StopReason.ABORT:
            return sampled

        # The server ended the request before the turn's end: at an end-of-sequence id of its own, or by a
        # fault.
        finish = stream.finish_reason
        if finish is None:
            raise self._engine_lost("the stream ended before the request was finished", stream)
        if finish.type == "abort":
            raise self._engine_lost(f"the server aborted the request ({finish.message})", stream)
        if finish.type == "length":
            sampled_part = f"{len(sampled.ids)} of {token_limit} tokens"
            raise EngineError(
                f"server {self.api.url} truncated a turn to {sampled_part}; raise its --context-length"
            )

        if isinstance(finish.matched, str):  # the server reports NaN in this way
            raise EngineError(f"server {self.api.url} ended a turn early: {finish.matched}")
        if not sampled.ids:  # a retry at once might repeat this for ever; losses are counted
            raise self._engine_lost("the server ended the request before its first token", stream)

        return sampled

    async def score(self, ids: tuple[int, ...], images: Mapping[str, bytes] = {}) -> tuple[float, ...]:
        """Return log-probs of ids[1:] as `Engine.score` does, with the first adapter, if there are adapters.
        Raises EngineBusy, and EngineLost when another server may have an answer."""
        adapter = self._adapter_name_of(next(iter(self._config.adapters), ""))
        prompt = self._prompt_writer.write_prompt(ids, files=images)
        async with self._request_slot():
            return await self.api.score(
                ids, seconds=self._config.engine.request_timeout, adapter=adapter, prompt=prompt
            )

    async def read(
        self, ids: tuple[int, ...], count: int, top: int, images: Mapping[str, bytes] = {}
    ) -> TokenScores:
        """Score the last `count` ids, at a server whose weights never change. `images`: see `Request`. Raises
        the errors of `score`, and EngineError for ids that the model does not have."""
        largest_id = largest_token_id(ids)
        if largest_id >= self._vocabulary:
            raise EngineError(
                f"token ID {largest_id} is outside the scorer's vocabulary (size {self._vocabulary})"
            )

        start = len(ids) - count - 1
        seconds = self._config.engine.request_timeout
        prompt = self._prompt_writer.write_prompt(ids, files=images)
        async with self._request_slot():
            meta_info = await self.api.read(
                ids, seconds=seconds, start=start, salt=self._salt, top=top, prompt=prompt
            )

        self.use.requests += 1
        self.use.prompt_tokens += meta_info.prompt_tokens
        self.use.cached_tokens += meta_info.cached_tokens
        top_entries = [candidates or () for candidates in meta_info.input_top_logprobs[1:]]

        return TokenScores(
            logprobs=np.array(
                [token.logprob for token in meta_info.input_token_logprobs[1:]], "<f4"
            ).tobytes(),
            ids=np.array([[token.id for token in candidates] for candidates in top_entries], "<i4").tobytes(),
            top=np.array(
                [[token.logprob for token in candidates] for candidates in top_entries], "<f4"
            ).tobytes(),
        )

    @asynccontextmanager
    async def _request_slot(self) -> AsyncIterator[None]:
        """Have room for a request during the body, which asks the server for an answer that is not
        streamed."""
        try:
            async with self._free_requests:
                yield
        except ServerGone as error:
            raise self._engine_lost(error, None) from error

    async def close(self) -> None:
        """End all requests, each with EngineLost and the streamed tokens."""
        self._is_closed = True
        self._end_calls(self._open_calls)
        await self.api.close()

    def _end_calls(self, calls: Iterable[asyncio.Timeout]) -> None:
        now = asyncio.get_running_loop().time()
        for call in calls:
            call.reschedule(now)

    def _adapter_name_of(self, agent: str) -> str:
        """Return the name of an agent's newest adapter; "" where versions are whole models, or the agent has
        no adapter."""
        own_agent = agent if agent in self._config.agents else ""
        has_adapter = self._uses_adapters and own_agent in self._config.adapters
        return adapter_name(self._acked_version, self._salt, own_agent) if has_adapter else ""

    async def _read_stream(self, request: Request, stream: StreamedTurn) -> None:
        """Send the request and add all events of the answer to `stream`."""
        sampling = request.sampling
        body: dict[str, Any] = {
            "rid": uuid.uuid4().hex,
            **self._prompt_writer.write_prompt(request.ids, files=request.images),
            "sampling_params": {
                "max_new_tokens": sampling.max_new_tokens,
                "temperature": sampling.temperature,
                # The server stops at end-of-sequence ids of its own, too, or, with `ignore_eos`, at no id.
                "stop_token_ids": sampling.stop_ids,
                "ignore_eos": not sampling.stop_ids,
                "sampling_seed": request.key & SEED_MASK,  # used by deterministic servers only
            },
            "return_logprob": True,
        }
        if self._config.trainer.router_replay and request.routes_from is not None:
            body |= {"return_routed_experts": True, "routed_experts_start_len": request.routes_from}

        if adapter := self._adapter_name_of(request.agent):
            body["lora_path"] = adapter  # part of the cache's key
        elif self._in_place:
            # The cache outlives updates: a request finds no KV older than the version in its salt.
            body["cache_salt"] = f"{self._salt}/{self._acked_version.label}"

        try:
            silence = self._config.engine.request_timeout
            clock = asyncio.get_running_loop().time
            next_part_at = clock() + request.part_seconds
            async with self.api.generate(body, silence) as events:
                async for payload in events:
                    tokens_before = len(stream.tokens)
                    retracted_before = stream.retractions
                    stream.add_event(decode_event(payload))
                    self.use.tokens += len(stream.tokens) - tokens_before  # at once: a sign of life
                    if not self._updates_retract:
                        self.use.retracted += stream.retractions - retracted_before
                    if stream.ends_by_check():
                        break  # leaving the context aborts the request

                    if clock() >= next_part_at:
                        await request.on_part(stream.generation())
                        next_part_at = clock() + request.part_seconds
        finally:
            self.use.requests += 1
            self.use.prompt_tokens += stream.prompt_tokens
            self.use.cached_tokens += stream.cached_tokens

    def _engine_lost(self, reason: object, stream: StreamedTurn | None) -> EngineLost:
        return EngineLost(
            f"server {self.api.url}: {reason}", NOTHING if stream is None else _good_part(stream)
        )


def _good_part(stream: StreamedTurn) -> Generation:
    """Return the tokens of a lost or ended request that are known to be good."""
    with suppress(ForeignWeights):
        return stream.generation()
    return NOTHING
