"""Plays an episode that an agent program leads: each request of the agent becomes a turn.

    agent --request--> Gateway --AgentRequest--> AgentHost: place, sample, post, wait until durable --> agent
    the agent ends --> reward

A turn is durable before the agent receives the reply, because the agent may then cause side effects. A turn
whose client has left (a timeout) is kept for a repetition of the same request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from msgspec.structs import replace

from asyncrl.conversation.branches import Branches
from asyncrl.conversation.commands import Fail
from asyncrl.conversation.requests import AgentRequest, IsUntrained, Placement, Refusal
from asyncrl.conversation.turns import generation_problem, prompt_ending, score_turns, without_untrained
from asyncrl.conversation.watch import OnText, TurnStopCheck
from asyncrl.data.tasks import task_of
from asyncrl.errors import ConfigError, EngineError, ProtocolError, SetupError, describe, users_code
from asyncrl.gateway import Agent, AgentError, CommandError, Gateway, TimeUp
from asyncrl.gateway.exchange import AgentReply, Listener
from asyncrl.gateway.images import RequestImages
from asyncrl.isolation.calls import LoopThread, to_its_end
from asyncrl.rollout.episode_run import EpisodeRun, Outcome
from asyncrl.runtime.activity import Notifier, Waits
from asyncrl.types import EpisodeEnd, EpisodeStats, FailReason, Turn
from asyncrl.values import checked_result


class IdleTimer:
    """Adds up the seconds in which an agent has no open request; they count as a named wait."""

    def __init__(self, waits: Waits, episode_timeout: float) -> None:
        self.idle_seconds = 0.0
        self._episode_timeout = episode_timeout  # seconds; an agent has no separate deadline
        self._waits = waits
        self._open_requests = 0
        self._idle_since = 0.0
        self._named_wait = ExitStack()

    def start_idle(self) -> None:
        self._idle_since = asyncio.get_running_loop().time()
        self._named_wait.enter_context(self._waits.wait_named("the agent program", self._episode_timeout))

    def stop_idle(self) -> None:
        self.idle_seconds += asyncio.get_running_loop().time() - self._idle_since
        self._named_wait.close()

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Answers a request in the body; several bodies may overlap."""
        if not self._open_requests:
            self.stop_idle()
        self._open_requests += 1
        try:
            yield
        finally:
            self._open_requests -= 1
            if not self._open_requests:
                self.start_idle()


class AgentHost:
    """Answers the requests of an agent. `fatal_error` is done, with the error, when the episode cannot go
    on."""

    def __init__(self, episode_run: EpisodeRun, branches: Branches, idle_timer: IdleTimer) -> None:
        self.fatal_error: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self._episode_run = episode_run
        self._branches = branches
        self._idle_timer = idle_timer
        self._render_lock = asyncio.Lock()
        self._post_lock = asyncio.Lock()  # turns are posted in the order of turn numbers
        self._turn_added = Notifier()

    @cached_property
    def images(self) -> RequestImages:
        layout = self._episode_run.context.rules.chat.image_layout
        return RequestImages(layout, self._episode_run.images.add)

    async def answer(
        self, request: AgentRequest, count: int, listener: Listener | None, attempt: int = 0
    ) -> Sequence[AgentReply] | Refusal:
        """Return all answers to a request, once they are durable; see `Host`. When an answer fails, or the
        client leaves, no answer counts as delivered: turns that were posted answer the same request when the
        request comes again."""
        branches = self._branches
        with self._end_episode_on_error(ConfigError):
            await self._render(request)
            sources = branches.find_answers(request, count, attempt)
        if isinstance(sources, Refusal):
            return sources

        async def reply_from(index: int, source: Turn | Placement) -> AgentReply:
            if isinstance(source, Turn):  # posted before, and not delivered
                turn = source
            else:
                on_text = None if listener is None else partial(listener.delta, index)
                turn = await self._obtain_turn(source, on_text)
            return AgentReply(
                branches.model_message(turn),
                turn,
                branches.prompt_tokens(turn),
                self._episode_run.context.rules.chat.decode,
                branches.stopped_at(turn),
            )

        with self._end_episode_on_error(), self._idle_timer.answering():
            if listener is not None:
                listener.start(branches.prompt_tokens(sources[0]))

            reply_tasks = [
                asyncio.ensure_future(reply_from(index, source)) for index, source in enumerate(sources)
            ]
            try:
                replies = await asyncio.gather(*reply_tasks)
                await self._episode_run.records.until_durable()
            except BaseException:
                for reply_task in reply_tasks:
                    reply_task.cancel()
                task_results = await asyncio.gather(*reply_tasks, return_exceptions=True)
                new_turns = [reply.turn for reply in task_results if isinstance(reply, AgentReply)]
                branches.give_back_answers([*sources, *new_turns])
                raise

            return replies

    async def _obtain_turn(self, placement: Placement, on_text: OnText | None) -> Turn:
        """Return the turn that answered this request in an earlier attempt, or sample and post a turn. The
        placement is cancelled unless a turn was added."""
        branches = self._branches
        rules = self._episode_run.context.rules
        request = placement.request
        try:
            # A recorded turn is added once all turns before have been added.
            while (turn := branches.recorded_turn(placement)) is not None:
                if turn.index == len(branches.turns):
                    branches.add_turn(placement, turn)
                    self._turn_added.notify()
                    if not branches.replaying:
                        self._episode_run.clock.restart()
                    return turn
                await self._turn_added.wait()

            stop_check = None
            if request.prompt is not None:
                on_text = None  # thoughts and calls of a plain completion are not told apart
            if request.stops or on_text:
                prompt_end = prompt_ending(rules, placement.context)
                stop_check = TurnStopCheck(rules, request.tools, request.stops, prompt_end, on_text)

            generation = await self._episode_run.sampling.generate(
                placement.ids,
                placement.max_new_tokens,
                row=placement.session,
                stop_check=stop_check,
                is_trained=not placement.untrained,
                agent=request.agent,
            )
            if problem := generation_problem(rules.chat.stop_ids, placement.max_new_tokens, generation):
                raise EngineError(problem)

            async with self._post_lock:
                turn = branches.next_turn(placement, generation)
                await self._episode_run.post_turn(turn, placement.session)
                # A posted turn counts at once, even if the client has left.
                branches.add_turn(placement, turn)
                self._turn_added.notify()
                return turn
        finally:
            branches.cancel_placement(placement)

    async def count(self, request: AgentRequest) -> int:
        with self._end_episode_on_error(ConfigError):
            await self._render(request)
            return self._branches.count_prompt_tokens(request)

    @contextmanager
    def _end_episode_on_error(self, *reported_errors: type[Exception]) -> Iterator[None]:
        """End the episode if the body raises an error, except for `reported_errors`: see `Host`."""
        try:
            with users_code():
                yield
        except reported_errors:
            raise
        except Exception as error:
            if not self.fatal_error.done():
                self.fatal_error.set_result(error)
            raise

    async def _render(self, request: AgentRequest) -> None:
        """Render a request in a thread while the event loop serves further episodes. An episode uses a single
        thread at a time, and keeps that thread busy to the end even if the client leaves."""
        async with self._render_lock:
            if (render_call := self._branches.pending_rendering(request)) is not None:
                await to_its_end(render_call)

    def lose(self, reply: AgentReply) -> None:
        self._branches.mark_undelivered(reply.turn)


@dataclass
class AgentPlayer:
    """See `Player`."""

    run: EpisodeRun
    agents: Agents
    _branches: Branches = field(init=False)
    _idle_timer: IdleTimer = field(init=False)
    _agent_outcome: tuple[EpisodeEnd, Any] | None = None  # end and result, once the agent has ended

    def __post_init__(self) -> None:
        self._branches = Branches(self.run.context.rules, (), self.agents.untrained)
        self._idle_timer = IdleTimer(self.run.context.waits, self.run.context.rules.config.episode_timeout)

    async def play(self, recorded: Sequence[Turn]) -> Outcome:
        self._branches = Branches(self.run.context.rules, recorded, self.agents.untrained)
        timed_out, result = await self._serve_agent()
        self._check_replayed()
        if without_untrained(self._branches.turns):
            self._agent_outcome = EpisodeEnd.TIMEOUT if timed_out else self._branches.end, result
            return await self._score_turns(*self._agent_outcome)
        if self._branches.last_refusal is not None:
            return Outcome(Fail(FailReason.PROMPT_TOO_LONG, self._branches.last_refusal.detail), ())

        side_requests = ""
        if self._branches.turns:
            side_requests = (
                ", except in side requests (from agents in rollout.untrained_agents, or not in `agents`)"
            )
        raise AgentError(f"the agent exited without calling the model{side_requests}")

    async def expire(self) -> Outcome:
        self._check_replayed()
        if not without_untrained(self._branches.turns):
            detail = "rollout.episode_timeout expired before the first turn was finished"
            return Outcome(Fail(FailReason.DEADLINE, detail), ())

        if self._agent_outcome is not None:
            end, result = self._agent_outcome
            return await self._score_turns(end, result)

        unknown_result = {"failed": "the time limit expired before the changes were collected"}
        result = unknown_result if task_of(self.run.assignment.sample) else None
        return await self._score_turns(EpisodeEnd.TIMEOUT, result)

    async def close(self) -> None:
        """Do nothing: the agent has ended with `play`."""

    async def _serve_agent(self) -> tuple[bool, Any]:
        """Run the agent; return whether the time was up, and the agent's result. The result is None if the
        agent gave up after a limit had refused a request or cut the last turn."""
        branches = self._branches
        sample = self.run.assignment.sample
        max_tokens = self.run.context.rules.config.max_tokens
        host = AgentHost(self.run, branches, self._idle_timer)
        self._idle_timer.start_idle()
        try:
            async with self.agents.gateway.admit_episode(host, lambda: self.run.clock.seconds) as endpoint:
                endpoint = replace(endpoint, max_tokens=max_tokens, seconds=self.run.clock.seconds_left)
                agent_call = self.agents.threads.call(partial(self.agents.agent, sample, endpoint))
                agent_task = asyncio.ensure_future(agent_call)
                try:
                    await asyncio.wait([agent_task, host.fatal_error], return_when=asyncio.FIRST_COMPLETED)
                finally:  # end the agent also if the episode cannot go on
                    agent_task.cancel()
                    await asyncio.gather(agent_task, return_exceptions=True)
        finally:
            self._idle_timer.stop_idle()

        if host.fatal_error.done():
            raise host.fatal_error.result()

        try:
            return False, checked_result(agent_task.result())
        except TimeUp as error:
            return True, checked_result(error.result)
        except SetupError:
            raise
        except Exception as error:
            # In a task the model can end the agent's program.
            model_failed_program = isinstance(error, CommandError) and task_of(sample)
            model_is_cause = bool(without_untrained(branches.turns)) and (
                model_failed_program or branches.end is EpisodeEnd.LENGTH
            )
            if branches.last_refusal is None and not model_is_cause:
                raise AgentError(describe(error)) from error
            return False, checked_result(error.result) if isinstance(error, CommandError) else None

    async def _score_turns(self, end: EpisodeEnd, result: Any) -> Outcome:
        """Score the turns, limited by `rollout.reward_timeout`, not by the remaining time of the episode."""
        branches = self._branches
        trained_turns = without_untrained(branches.turns)
        call_count = branches.calls
        reward_result = await self.run.compute_reward(
            self.run.assignment.sample,
            trained_turns,
            branches.answer,
            end,
            messages=branches.messages,
            tool_calls=call_count,
            result=result,
            main_conversation=branches.task_messages,
        )
        stats = EpisodeStats(
            turns=len(trained_turns),
            tool_calls=call_count,
            tool_s=self._idle_timer.idle_seconds,
            system_folded=branches.folded,
            untrained_turns=len(branches.turns) - len(trained_turns),
        )

        return Outcome(score_turns(trained_turns, end, reward_result), trained_turns, stats)

    def _check_replayed(self) -> None:
        if self._branches.replaying:
            raise ProtocolError("the agent did not repeat its recorded turns, so the episode starts again")


class Agents:
    """Holds the agent, gateway and threads that all episodes of a worker share. Start the gateway first."""

    def __init__(
        self, agent: Agent, gateway: Gateway, untrained: IsUntrained = lambda request: False
    ) -> None:
        self.agent = agent
        self.gateway = gateway
        self.threads = LoopThread("agents")
        self.untrained = untrained

    async def close(self) -> None:
        self.threads.close()
        await self.gateway.close()
