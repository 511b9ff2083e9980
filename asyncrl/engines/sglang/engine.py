"""A client of one SGLang server: an `Engine` whose model runs elsewhere. Ids in, ids out, never text.

    request ──► room ──► stream ──► events put together ──► over? ──► Generation
                           │                                  └► ended where this turn does not: go on there
                           └► cut, silent or taken back ──► EngineLost, with what there is

Workers and the server's keeper each have their own. Only the keeper loads weights and pauses; workers are
told by `mark` which version is in. Servers forget prefixes by themselves, so `release` has little to do.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from asyncrl.engines.base import EngineBusy, EngineLost, Request
from asyncrl.engines.continuation import NOTHING, extended, rest
from asyncrl.engines.sglang.http import PauseMode, ServerApi, ServerGone
from asyncrl.engines.sglang.loader import Loader
from asyncrl.engines.sglang.stream import Answer, Finish, ForeignWeights, Order, decode
from asyncrl.errors import EngineError
from asyncrl.types import Generation, StopReason
from asyncrl.weights.manifest import Manifest, WeightsRef

SEED_MASK = (1 << 31) - 1
ABORT_SECONDS = 2.0  # from asking for the end of a request to cutting its connection


@dataclass(frozen=True)
class Terms:
    """What a client and its server agree on. `max_len`: ids of a whole episode, `silence`: seconds without an
    event after which a request is lost, `deadline`: seconds of a load, `mode`: how weights are updated."""

    vocabulary: int
    max_len: int
    max_requests: int = 256
    silence: float = 300.0
    deadline: float = 60.0
    mode: PauseMode = "in_place"


@dataclass
class Counters:
    """Running totals of one client. Cached tokens are those of prompts that the server did not compute."""

    requests: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    aborted: int = 0
    lost: int = 0
    busy: int = 0


@dataclass
class Turn:
    """One call of `generate`. It may take several requests: the server ends them at ids of its own as well.
    `sampled` is of those that are over, `answer` of the one that is not."""

    request: Request
    limit: asyncio.Timeout
    aborted: bool = False
    rid: str = ""
    sampled: Generation = NOTHING
    answer: Answer | None = None

    def take(self) -> Generation:
        """Everything sampled, now that the answer is over. Raises ForeignWeights, without the answer."""
        answer, self.answer = self.answer, None
        if answer is not None:
            self.sampled = extended(self.request, self.sampled, answer.generation())
        return self.sampled

    def cut(self) -> Generation:
        """Everything sampled, with an answer that did not get to its end."""
        with suppress(ForeignWeights):
            return self.take()
        return self.sampled


class SGLangEngine:
    """The server at `server.url`, as seen by one process. Used within one event loop.

    `salt`: of the run's attachment to the server. Other runs give the same labels to other weights, and the
    server's cache outlives them.
    """

    def __init__(
        self,
        server: ServerApi,
        terms: Terms,
        description: str = "SGLang",
        loader: Loader | None = None,
        salt: str = "",
    ) -> None:
        self.server, self.description, self.counters = server, description, Counters()
        self._terms, self._salt = terms, salt
        self._loader = loader or Loader(server, terms.mode, terms.deadline)
        self._acked: Order = (0, 0)
        self._room = asyncio.Semaphore(terms.max_requests)
        self._turns: dict[str, Turn] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def version(self) -> int:
        return self._acked[1]

    @property
    def running(self) -> int:
        """Requests not yet answered, those waiting for room included."""
        return len(self._turns)

    @property
    def generated_tokens(self) -> int:
        return self.counters.generated_tokens

    @property
    def broken(self) -> str:
        """Why nothing may be sampled until a version has been loaded; empty: all is well."""
        return self._loader.broken

    @property
    def loaded_label(self) -> str:
        """The version that this client loaded last, by its label."""
        return self._loader.label

    async def label(self) -> str:
        """The version that the server says it holds, by its label."""
        return await self.server.weight_label()

    def mark(self, order: Order) -> None:
        """The server has confirmed this (trainer_epoch, version): requests from now on see nothing older."""
        self._acked = order

    async def generate(self, request: Request) -> Generation:
        self._check(request)
        if self.broken:
            lost = EngineLost(f"server {self.url}: {self.broken}", NOTHING)
            await asyncio.sleep(0)  # who asks again at once must not keep the load from going on
            raise lost
        turn = self._turns[request.session] = Turn(self._clipped(request), asyncio.timeout(None))
        try:
            async with turn.limit, self._room:
                return await self._play(turn)
        except TimeoutError:  # only `abort` sets a limit
            return turn.cut()
        except EngineLost as lost:
            if turn.aborted:
                return lost.partial
            self.counters.lost += 1
            raise
        finally:
            self.counters.aborted += turn.aborted
            del self._turns[request.session]

    def abort(self, session: str) -> None:
        turn = self._turns.get(session)
        if turn is None or turn.aborted:
            return
        turn.aborted = True
        now = asyncio.get_running_loop().time()
        if turn.answer is None:
            turn.limit.reschedule(now)
        else:
            # A server that is paused, or has not begun with the request, loses the word: cutting the
            # connection ends the request all the same.
            turn.limit.reschedule(now + ABORT_SECONDS)
            self._spawn(self._end(turn.rid))

    def release(self, session: str) -> None:
        self.abort(session)

    async def load(self, ref: WeightsRef) -> Manifest:
        manifest = await self._loader.load(ref)
        self.mark(ref.order)
        return manifest

    async def score(self, ids: tuple[int, ...]) -> tuple[float, ...]:
        body = {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "cache_salt": uuid.uuid4().hex,  # computed anew, not read from what other weights left
        }
        entries = decode(await self.server.generate_whole(body, self._terms.deadline)).meta_info
        scored = entries.input_token_logprobs[1:]
        if tuple(entry.id for entry in scored) != ids[1:]:
            raise EngineError(f"server {self.url} scored other ids than it was given")
        return tuple(math.nan if entry.logprob is None else entry.logprob for entry in scored)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._loader.close()
        await self.server.close()

    # -- one turn -------------------------------------------------------------------------------------

    def _check(self, request: Request) -> None:
        """EngineError on a request that cannot be served, or would take the server down: it dies of an id
        outside its vocabulary."""
        size, sampling, vocabulary = len(request.ids), request.sampling, self._terms.vocabulary
        problem = None
        if size == 0:
            problem = "no ids"
        elif min(request.ids) < 0 or max(request.ids) >= vocabulary:
            problem = f"ids outside the vocabulary of {vocabulary}"
        elif size + 1 > self._terms.max_len:
            problem = f"{size} ids leave no room for a token within max_len {self._terms.max_len}"
        elif sampling.max_new_tokens < 1 or sampling.temperature < 0 or not 0 < sampling.top_p <= 1:
            problem = f"sampling parameters out of range: {sampling}"
        elif sampling.top_k == 1 and sampling.temperature not in (0.0, 1.0):
            # Greedy to the server, whose log-probs then depend on what else is in the batch.
            problem = "top_k 1 is greedy; set temperature 0"
        elif request.session in self._turns:
            problem = "its previous turn is still running"
        if problem:
            raise EngineError(f"session {request.session!r}: {problem}")

    def _clipped(self, request: Request) -> Request:
        """It asks for no more than fits within `max_len`."""
        room = self._terms.max_len - len(request.ids)
        knobs = msgspec.structs.replace(
            request.sampling, max_new_tokens=min(room, request.sampling.max_new_tokens)
        )
        return msgspec.structs.replace(request, sampling=knobs)

    async def _play(self, turn: Turn) -> Generation:
        """Ask until the turn is over."""
        while True:
            finish = await self._ask(turn)
            try:
                sampled = turn.take()
            except ForeignWeights as error:
                raise self._lost(turn, error) from error
            if sampled.stop is not StopReason.ABORT or turn.aborted:
                return sampled
            if finish.type == "abort":
                raise self._lost(turn, f"the server took the request back ({finish.message})")
            if finish.type == "length":
                short = f"{len(sampled.ids)} of {turn.request.sampling.max_new_tokens} tokens"
                raise EngineError(f"server {self.url} cut a turn to {short}: raise its --context-length")
            if isinstance(finish.matched, str):  # its way to say "NaN happened"
                raise EngineError(f"server {self.url} ended a turn: {finish.matched}")
            # An end-of-sequence id of the server's own, at which this turn does not stop: go on.

    async def _ask(self, turn: Turn) -> Finish:
        """One request, to its end. Raises EngineBusy if the turn has nothing sampled yet, else EngineLost."""
        turn.rid = uuid.uuid4().hex  # of one length: the server aborts by prefix
        turn.answer = answer = Answer(self._acked, self._terms.mode == "in_place")
        try:
            async with self.server.generate(self._body(turn), self._terms.silence) as events:
                async for payload in events:
                    answer.add(decode(payload))
        except EngineBusy as error:
            self.counters.busy += 1
            if turn.sampled.ids:
                raise self._lost(turn, error) from error
            raise
        except ServerGone as error:
            raise self._lost(turn, error) from error
        finally:
            self._count(answer)
        if answer.finish is None:
            raise self._lost(turn, "the stream ended, but not the request")
        return answer.finish

    def _body(self, turn: Turn) -> dict[str, Any]:
        request = rest(turn.request, turn.sampled)
        sampling = request.sampling
        knobs: dict[str, Any] = {
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            # The server stops at end-of-sequence ids of its own as well, or, told not to, at no id at all.
            "stop_token_ids": sampling.stop_ids,
            "ignore_eos": not sampling.stop_ids,
            "sampling_seed": request.key & SEED_MASK,  # heeded by deterministic servers only
        }
        if sampling.top_k > 0:
            knobs["top_k"] = sampling.top_k
        body = {
            "rid": turn.rid,
            "input_ids": request.ids,
            "sampling_params": knobs,
            "return_logprob": True,
        }
        if self._terms.mode == "in_place":
            # The cache outlives updates. What a request finds under its salt is no older than the salt says.
            body["cache_salt"] = f"{self._salt}/{WeightsRef(*self._acked, path='').label}"
        return body

    def _lost(self, turn: Turn, why: object) -> EngineLost:
        return EngineLost(f"server {self.url}: {why}", turn.cut())

    def _count(self, answer: Answer) -> None:
        counters = self.counters
        counters.requests += 1
        counters.generated_tokens += len(answer.tokens)
        counters.prompt_tokens += answer.prompt_tokens
        counters.cached_tokens += answer.cached_tokens

    async def _end(self, rid: str) -> None:
        with suppress(EngineError):  # then the connection is cut
            await self.server.abort(rid)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
