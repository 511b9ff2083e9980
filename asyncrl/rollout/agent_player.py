"""Leads an episode by an agent program: its requests become turns, token by token what the engine wrote.

    agent ──request──► Gateway ──Ask──► AgentHost: place ─► engine ─► turn, durable ─► Reply ──► agent
                                                                                  its end ──► reward

A turn is durable before the agent hears it: what it does next may change the world. A turn that nobody heard,
because the client timed out, is kept for the same request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from asyncrl.conversation.branches import Ask, Branches, Place, Refusal
from asyncrl.conversation.commands import Fail
from asyncrl.conversation.turns import problem, scored
from asyncrl.errors import EngineError, ProtocolError, one_line
from asyncrl.gateway import Agent, Endpoint, Gateway, result_of
from asyncrl.gateway.wire import Reply
from asyncrl.rollout.agent_threads import AgentThreads
from asyncrl.rollout.context import Ended, EpisodeRun
from asyncrl.rollout.episode_runner import AgentError
from asyncrl.runtime.waits import Changed, Waits
from asyncrl.types import EpisodeEnd, FailReason, Turn


class Absence:
    """The time in which an agent asks nothing: it has a name while it lasts, and adds up to `seconds`."""

    def __init__(self, waits: Waits) -> None:
        self.seconds = 0.0
        self._waits, self._requests, self._since = waits, 0, 0.0
        self._named = ExitStack()

    def begin(self) -> None:
        self._since = asyncio.get_running_loop().time()
        self._named.enter_context(self._waits.named("the agent program"))

    def end(self) -> None:
        self.seconds += asyncio.get_running_loop().time() - self._since
        self._named.close()

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """The body answers a request; several may overlap."""
        if not self._requests:
            self.end()
        self._requests += 1
        try:
            yield
        finally:
            self._requests -= 1
            if not self._requests:
                self.begin()


class AgentHost:
    """Answers the requests of one agent. `failed` is done, with the error, when the episode cannot go on."""

    def __init__(self, job: EpisodeRun, branches: Branches, absence: Absence) -> None:
        self.failed: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self._job, self._branches, self._absence = job, branches, absence
        self._keeping = asyncio.Lock()  # turns are posted in the order of their numbers
        self._changed = Changed()  # there is one more turn

    async def answer(self, ask: Ask) -> Reply | Refusal:
        found = self._branches.repeated(ask) or self._branches.place(ask)
        if isinstance(found, Refusal):
            return found
        try:
            with self._absence.interrupted():
                return await self._told(found if isinstance(found, Turn) else await self._turn(found))
        except Exception as error:
            if not self.failed.done():
                self.failed.set_result(error)
            raise

    def lose(self, reply: Reply) -> None:
        self._branches.lose(reply.turn)

    async def _turn(self, place: Place) -> Turn:
        """Recalled, or sampled and posted."""
        try:
            return await self._recall(place) or await self._sample(place)
        finally:
            self._branches.forget(place)

    async def _told(self, turn: Turn) -> Reply:
        """The answer, once the turn is durable."""
        row = self._branches.rows[turn.row]
        reply = Reply(row.said[-1], turn, len(row.ids) - len(turn.ids))
        try:
            await self._job.until_durable()
        except asyncio.CancelledError:  # the client has left
            self.lose(reply)
            raise
        return reply

    async def _recall(self, place: Place) -> Turn | None:
        """The turn that an earlier attempt got, in the order in which it got them."""
        while (turn := self._branches.recalled(place)) is not None:
            if turn.index == len(self._branches.turns):
                return self._add(place, turn)
            await self._changed.wait()
        return None

    async def _sample(self, place: Place) -> Turn:
        generation = await self._job.generate(place.ids, place.max_new_tokens, place.session)
        if trouble := problem(self._job.desk.rules.chat.stop_ids, place.max_new_tokens, generation):
            raise EngineError(trouble)
        async with self._keeping:
            turn = self._branches.turn(place, generation)
            await self._job.keep(turn)
            return self._add(place, turn)  # at once: what is posted is a turn, even if the client has left

    def _add(self, place: Place, turn: Turn) -> Turn:
        self._branches.add(place, turn)
        self._changed.fire()
        return turn


@dataclass
class AgentPlayer:
    """See `Player`."""

    job: EpisodeRun
    shared: Agents
    _branches: Branches = field(init=False)
    _absence: Absence = field(init=False)
    _known: tuple[EpisodeEnd, Any] | None = None  # how it ended, and the result, once the agent has

    def __post_init__(self) -> None:
        self._branches = Branches(self.job.desk.rules)
        self._absence = Absence(self.job.desk.waits)

    async def play(self, recorded: Sequence[Turn]) -> Ended:
        self._branches = Branches(self.job.desk.rules, recorded)
        result = await self._led()
        self._check_recalled()
        if self._branches.turns:
            self._known = self._branches.end, result
            return await self._scored(*self._known)
        if self._branches.refused is not None:
            return Ended(Fail(FailReason.PROMPT_TOO_LONG, self._branches.refused.detail), ())
        raise AgentError("the agent ended without asking the model")

    async def expire(self) -> Ended:
        self._check_recalled()
        if not self._branches.turns:
            detail = "not one turn was done within rollout.episode_timeout"
            return Ended(Fail(FailReason.DEADLINE, detail), ())
        return await self._scored(*(self._known or (EpisodeEnd.TIMEOUT, None)))

    async def close(self) -> None:
        """The agent has ended with `play`."""

    async def _led(self) -> Any:
        """What the agent returned; None from one that gave up because a limit refused its request."""
        host = AgentHost(self.job, self._branches, self._absence)
        self._absence.begin()
        try:
            async with self.shared.gateway.admit(host) as endpoint:
                agent = await self._run(endpoint, host.failed)
        finally:
            self._absence.end()
        if host.failed.done():
            raise host.failed.result()
        try:
            return result_of(agent.result())
        except Exception as error:
            if self._branches.refused is None:
                raise AgentError(one_line(error)) from error
            return None

    async def _run(self, endpoint: Endpoint, failed: asyncio.Future[Exception]) -> asyncio.Future[Any]:
        """The agent, when it has ended, or was ended because the episode cannot go on."""
        run = self.shared.threads.run(self.shared.agent, self.job.assign.sample, endpoint)
        agent = asyncio.ensure_future(run)
        try:
            await asyncio.wait([agent, failed], return_when=asyncio.FIRST_COMPLETED)
        finally:
            agent.cancel()
            await asyncio.gather(agent, return_exceptions=True)
        return agent

    async def _scored(self, end: EpisodeEnd, result: Any) -> Ended:
        """`rollout.reward_timeout` bounds it, whatever is left of the episode's time."""
        turns, branches = tuple(self._branches.turns), self._branches
        calls = branches.calls
        verdict = await self.job.verdict(turns, branches.answer, end, branches.shown, calls, result)
        return Ended(scored(turns, end, verdict), turns, calls, self._absence.seconds)

    def _check_recalled(self) -> None:
        if self._branches.recalling:
            raise ProtocolError("the agent did not repeat its recorded turns, so the episode starts again")


class Agents:
    """What the agents of all episodes of a worker share."""

    def __init__(self, agent: Agent, gateway: Gateway) -> None:
        self.agent, self.gateway, self.threads = agent, gateway, AgentThreads()

    def lead(self, job: EpisodeRun) -> AgentPlayer:
        """The player of an attempt."""
        return AgentPlayer(job, self)

    async def start(self) -> None:
        """To be awaited before the first episode."""
        await self.gateway.start()

    async def close(self) -> None:
        self.threads.close()
        await self.gateway.close()
