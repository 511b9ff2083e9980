"""Plays an episode that an agent program leads: each of its requests becomes a turn.

    agent --request--> Gateway --AgentRequest--> AgentHost: place, sample, post, wait until durable --> agent
    the agent ends --> reward

A turn is durable before the agent gets it, which may then have side effects. A turn whose client had left
(a timeout) is kept for the same request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from msgspec.structs import replace

from asyncrl.conversation.branches import Branches
from asyncrl.conversation.commands import Fail
from asyncrl.conversation.requests import AgentRequest, Placement, Refusal, Untrained
from asyncrl.conversation.turns import opening, problem, scored, trained
from asyncrl.conversation.watch import OnText, TurnWatch
from asyncrl.data.tasks import task_of
from asyncrl.errors import ConfigError, EngineError, ProtocolError, SetupError, describe, users_code
from asyncrl.gateway import Agent, AgentError, CommandError, Endpoint, Gateway, TimeUp
from asyncrl.gateway.exchange import AgentReply, Listener
from asyncrl.isolation.calls import LoopThread, to_its_end
from asyncrl.rollout.context import EpisodeRun, Outcome
from asyncrl.runtime.activity import Notifier, Waits
from asyncrl.types import EpisodeEnd, EpisodeStats, FailReason, Turn
from asyncrl.values import result_of


class IdleTimer:
    """Adds up the seconds in which an agent has no request under way; they count as one named wait."""

    def __init__(self, waits: Waits, limit: float) -> None:
        self.seconds = 0.0
        self._limit = limit  # of the episode, in seconds: an agent has no deadline of its own
        self._waits = waits
        self._requests = 0
        self._since = 0.0
        self._wait = ExitStack()

    def start(self) -> None:
        self._since = asyncio.get_running_loop().time()
        self._wait.enter_context(self._waits.named("the agent program", self._limit))

    def stop(self) -> None:
        self.seconds += asyncio.get_running_loop().time() - self._since
        self._wait.close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The body answers a request; several may overlap."""
        if not self._requests:
            self.stop()
        self._requests += 1
        try:
            yield
        finally:
            self._requests -= 1
            if not self._requests:
                self.start()


class AgentHost:
    """Answers the requests of one agent. `failed` is done, with the error, when the episode cannot go on."""

    def __init__(self, run: EpisodeRun, branches: Branches, idle: IdleTimer) -> None:
        self.failed: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self._run = run
        self._branches = branches
        self._idle = idle
        self._rendering = asyncio.Lock()
        self._posting = asyncio.Lock()  # turns are posted in the order of their numbers
        self._changed = Notifier()  # there is one more turn

    async def answer(
        self, request: AgentRequest, count: int, listener: Listener | None, attempt: int = 0
    ) -> Sequence[AgentReply] | Refusal:
        with self._ending(ConfigError):
            await self._render(request)
            found = self._branches.find(request, count, attempt)
        if isinstance(found, Refusal):
            return found
        with self._ending(), self._idle.paused():
            return await self._together(found, listener)

    async def count(self, request: AgentRequest) -> int:
        with self._ending(ConfigError):
            await self._render(request)
            return self._branches.count(request)

    @contextmanager
    def _ending(self, *others: type[Exception]) -> Iterator[None]:
        """End the episode if the body raises an error, unless it is one of these: see `Host`."""
        try:
            with users_code():
                yield
        except others:
            raise
        except Exception as error:
            if not self.failed.done():
                self.failed.set_result(error)
            raise

    async def _render(self, request: AgentRequest) -> None:
        """Other episodes go on meanwhile, and share the threads: each has one of them, which is busy to the
        end even if the client leaves."""
        async with self._rendering:
            if (rendering := self._branches.rendering(request)) is not None:
                await to_its_end(rendering)

    def lose(self, reply: AgentReply) -> None:
        self._branches.mark_undelivered(reply.turn)

    async def _together(self, found: list[Turn | Placement], listener: Listener | None) -> list[AgentReply]:
        """All answers to a request, once they are durable. When one fails, or the client leaves, none is left
        under way, and none counts as delivered."""
        if listener is not None:
            listener.begun(self._branches.prompt_tokens(found[0]))
        answers = [
            self._one(one, None if listener is None else partial(listener.delta, index))
            for index, one in enumerate(found)
        ]
        tasks = list(map(asyncio.ensure_future, answers))
        try:
            replies = await asyncio.gather(*tasks)
            await self._run.until_durable()
        except BaseException:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            self._branches.give_back([*found, *(one.turn for one in ended if isinstance(one, AgentReply))])
            raise
        return replies

    async def _one(self, found: Turn | Placement, on_text: OnText | None) -> AgentReply:
        """Reply with a turn that was not delivered, a recorded one, or one that is sampled and posted."""
        turn = found if isinstance(found, Turn) else await self._turn(found, on_text)
        branches = self._branches
        decode = self._run.context.rules.chat.decode
        stopped = branches.stopped_at(turn)
        return AgentReply(branches.said(turn), turn, branches.prompt_tokens(turn), decode, stopped)

    async def _turn(self, place: Placement, on_text: OnText | None) -> Turn:
        try:
            return await self._recorded(place) or await self._sample(place, on_text)
        finally:
            self._branches.cancel(place)

    async def _recorded(self, place: Placement) -> Turn | None:
        """The turn that answered this request in an earlier attempt, once all turns before it were added."""
        while (turn := self._branches.recorded_turn(place)) is not None:
            if turn.index == len(self._branches.turns):
                added = self._add(place, turn)
                if not self._branches.replaying:
                    self._run.caught_up()
                return added
            await self._changed.wait()
        return None

    async def _sample(self, place: Placement, on_text: OnText | None) -> Turn:
        rules = self._run.context.rules
        asked = place.request
        watch = None
        on_text = None if asked.prompt is not None else on_text  # its thoughts and calls are not told apart
        if asked.stops or on_text:
            watch = TurnWatch(rules, asked.tools, asked.stops, opening(rules, place.context), on_text)
        asked_for = place.ids, place.max_new_tokens, place.session, watch, not place.untrained, asked.agent
        generation = await self._run.generate(*asked_for)
        if trouble := problem(rules.chat.stop_ids, place.max_new_tokens, generation):
            raise EngineError(trouble)
        async with self._posting:
            turn = self._branches.turn(place, generation)
            await self._run.post_turn(turn, place.session)
            return self._add(place, turn)  # at once: what is posted is a turn, even if the client has left

    def _add(self, place: Placement, turn: Turn) -> Turn:
        self._branches.add(place, turn)
        self._changed.notify()
        return turn


@dataclass
class AgentPlayer:
    """See `Player`."""

    run: EpisodeRun
    shared: Agents
    _branches: Branches = field(init=False)
    _idle: IdleTimer = field(init=False)
    _ended: tuple[EpisodeEnd, Any] | None = None  # how, and with what result, once the agent has

    def __post_init__(self) -> None:
        self._branches = Branches(self.run.context.rules, (), self.shared.untrained)
        self._idle = IdleTimer(self.run.context.waits, self.run.context.rules.config.episode_timeout)

    async def play(self, recorded: Sequence[Turn]) -> Outcome:
        self._branches = Branches(self.run.context.rules, recorded, self.shared.untrained)
        late, result = await self._serve_agent()
        self._check_replayed()
        if trained(self._branches.turns):
            self._ended = EpisodeEnd.TIMEOUT if late else self._branches.end, result
            return await self._scored(*self._ended)
        if self._branches.refused is not None:
            return Outcome(Fail(FailReason.PROMPT_TOO_LONG, self._branches.refused.detail), ())
        side = ", but for side requests (rollout.untrained_agents, or not of `agents`)"
        side = side if self._branches.turns else ""
        raise AgentError(f"the agent ended without asking the model{side}")

    async def expire(self) -> Outcome:
        self._check_replayed()
        if not trained(self._branches.turns):
            detail = "not one turn was done within rollout.episode_timeout"
            return Outcome(Fail(FailReason.DEADLINE, detail), ())
        lost = {"failed": "the time was up before what changed was collected"}
        nothing = lost if task_of(self.run.assign.sample) else None
        return await self._scored(*(self._ended or (EpisodeEnd.TIMEOUT, nothing)))

    async def close(self) -> None:
        """Do nothing: the agent has ended with `play`."""

    async def _serve_agent(self) -> tuple[bool, Any]:
        """Run the agent, and return whether its time was up, and its result; None if it gave up after a limit
        had refused its request or cut its last turn."""
        host = AgentHost(self.run, self._branches, self._idle)
        self._idle.start()
        try:
            async with self.shared.gateway.admit(host, lambda: self.run.seconds) as endpoint:
                agent = await self._run_agent(endpoint, host.failed)
        finally:
            self._idle.stop()
        if host.failed.done():
            raise host.failed.result()
        try:
            return False, result_of(agent.result())
        except TimeUp as error:
            return True, result_of(error.result)
        except SetupError:
            raise
        except Exception as error:
            branches = self._branches
            ran = isinstance(error, CommandError)
            judged = ran and task_of(self.run.assign.sample)  # the model can end its program
            own = bool(trained(branches.turns)) and (judged or branches.end is EpisodeEnd.LENGTH)
            if branches.refused is None and not own:
                raise AgentError(describe(error)) from error
            return False, result_of(error.result) if isinstance(error, CommandError) else None

    async def _run_agent(self, endpoint: Endpoint, failed: asyncio.Future[Exception]) -> asyncio.Future[Any]:
        """Run the agent until it ends, or `failed` is done; it is done in both cases."""
        tokens = self.run.context.rules.config.max_tokens
        endpoint = replace(endpoint, max_tokens=tokens, seconds=self.run.seconds_left)
        call = self.shared.threads.call(partial(self.shared.agent, self.run.assign.sample, endpoint))
        agent = asyncio.ensure_future(call)
        try:
            await asyncio.wait([agent, failed], return_when=asyncio.FIRST_COMPLETED)
        finally:
            agent.cancel()
            await asyncio.gather(agent, return_exceptions=True)
        return agent

    async def _scored(self, end: EpisodeEnd, result: Any) -> Outcome:
        """Score the turns, limited by `rollout.reward_timeout`, not by what is left of the episode's time."""
        turns = trained(self._branches.turns)
        branches = self._branches
        calls = branches.calls
        shown = branches.messages, calls, result, branches.main
        earned = await self.run.reward(turns, branches.answer, end, *shown)
        stats = EpisodeStats(
            len(turns),
            calls,
            tool_s=self._idle.seconds,
            system_folded=branches.folded,
            untrained_turns=len(branches.turns) - len(turns),
        )
        return Outcome(scored(turns, end, earned), turns, stats)

    def _check_replayed(self) -> None:
        if self._branches.replaying:
            raise ProtocolError("the agent did not repeat its recorded turns, so the episode starts again")


class Agents:
    """The agent, gateway and threads that all episodes of a worker share. Start the gateway first."""

    def __init__(self, agent: Agent, gateway: Gateway, untrained: Untrained = lambda request: False) -> None:
        self.agent = agent
        self.gateway = gateway
        self.threads = LoopThread("agents")
        self.untrained = untrained

    async def close(self) -> None:
        self.threads.close()
        await self.gateway.close()
