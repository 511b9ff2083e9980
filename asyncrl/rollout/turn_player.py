"""Plays an episode turn by turn: carries out the commands of the episode machine, and gives it the answers.

    resume -> [command -> engine, tools, environment or reward -> event -> advance -> post turn or reply]

until the episode is over. A turn is durable before a tool or an environment gets it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from asyncrl.conversation import commands
from asyncrl.conversation import episode as machine
from asyncrl.conversation.commands import Rules
from asyncrl.conversation.episode import Episode
from asyncrl.conversation.turns import turn_message
from asyncrl.environments import Environment
from asyncrl.errors import AsyncrlError, ProtocolError
from asyncrl.rollout.context import EpisodeRun, Outcome
from asyncrl.rollout.environment import EpisodeEnvironment
from asyncrl.rollout.episode_runner import EnvironmentFailed
from asyncrl.tools import Toolbox, ToolSession
from asyncrl.tools.snapshots import history
from asyncrl.types import EpisodeStats, Message, Observation, Turn

log = logging.getLogger("asyncrl.worker")


@dataclass
class TurnPlayer:
    """See `Player`. `episode` is the newest state of which everything was posted."""

    run: EpisodeRun
    toolbox: Toolbox
    make_environment: Callable[[], Environment] | None = None
    episode: Episode | None = None
    _tools: ToolSession = field(init=False)
    _environment: EpisodeEnvironment | None = None
    _stepped: int = 0  # turns up to the newest that the environment got
    _histories: list[str] = field(default_factory=list)  # names of turns with all before, for snapshots

    def __post_init__(self) -> None:
        episode = self.run.attempt.uid
        snapshots = self.run.context.snapshots
        self._tools = self.toolbox.session(self.run.assign.sample, episode, snapshots)

    @property
    def _rules(self) -> Rules:
        return self.run.context.rules

    async def play(self, recorded: Sequence[Turn]) -> Outcome:
        opened = await self._open()
        episode = machine.resume(self._rules, self.run.assign.sample, opened, recorded)
        await self._rebuild(episode, recorded)
        self.episode = episode
        if recorded:
            self.run.caught_up()
        while not episode.over:
            event = await self._answer(episode)
            before = episode
            episode = machine.advance(self._rules, episode, event)
            await self._post(before, episode)
            self.episode = episode
        return _outcome(episode)

    async def expire(self) -> Outcome:
        episode = self.episode or machine.begin(self.run.assign.sample)
        if not episode.over and not isinstance(episode.command, commands.Score):  # else its end is known
            episode = machine.expire(episode)
        if not episode.over:
            episode = machine.advance(self._rules, episode, await self._answer(episode))
        return _outcome(episode)

    async def close(self) -> None:
        await self._tools.close()
        if self._environment is not None and (trouble := await self._environment.close()):
            log.warning("the environment of episode %s did not close: %s", self.run.name, trouble)

    # -- commands ------------------------------------------------------------------------------------

    async def _answer(self, episode: Episode) -> commands.Event:
        """Carry out the command the episode waits for."""
        match episode.command:
            case commands.Generate(ids=ids, max_new_tokens=limit, row=row) as asked:
                taught = machine.taught(self._rules, episode, asked) if self.run.reader else ()
                return commands.TurnGenerated(await self.run.generate(ids, limit, row, taught=taught))
            case commands.CallTools(calls=calls):
                await self.run.until_durable()
                names = ", ".join(sorted({call.name for call in calls}))
                with self.run.context.waits.named(f"tool {names}", self._tools.limit(calls)):
                    replies = await asyncio.gather(*map(self._tools.call, calls))
                return commands.ToolsReplied(tuple(replies))
            case commands.Step(message=message):
                await self.run.until_durable()
                return commands.Observed(await self._step(len(episode.turns), message))
            case commands.Score(answer=answer, end=end):
                messages = machine.conversation(self._rules, replace(episode, folded=0))
                with self.run.context.waits.named("the results of the tools"):
                    result = await self._tools.result()
                given = answer, end, messages, episode.tool_calls, result
                earned = await self.run.reward(episode.turns, *given)
                score = earned.score + await self._cut_short(episode)
                return commands.EpisodeScored(replace(earned, score=score))
            case command:
                raise ProtocolError(f"nothing answers {type(command).__name__}")

    async def _open(self) -> commands.Opened:
        """Open the tools, then let the environment begin."""
        await self._tools.open()
        if self.make_environment is None:
            return commands.Opened(self._tools.schemas)
        limit = self._rules.config.tool_timeout
        self._environment = EpisodeEnvironment(self.make_environment, limit, self.run.context.waits)
        first = await self._environment.reset(self.run.assign.sample)
        if first.done:
            raise EnvironmentFailed("the environment was over before the first turn")
        own = self._environment.inner.tools
        schemas = (*self._tools.schemas, *(msgspec.json.encode(schema).decode() for schema in own))
        return commands.Opened(schemas, frozenset(tool["function"]["name"] for tool in own), first.messages)

    async def _step(self, count: int, message: Message) -> Observation:
        """Give the environment the message of turn number `count`, from 1."""
        assert self._environment is not None
        self._stepped = count
        return await self._environment.step(message)

    async def _cut_short(self, episode: Episode) -> float:
        """The environment's reward for an episode that it did not end itself."""
        last = episode.turns[-1]
        if self._environment is None or (last.observation is not None and last.observation.done):
            return 0.0
        got_last = self._stepped == len(episode.turns)  # even if the time was up during that step
        return await self._environment.cut_short(None if got_last else self._message(episode, last))

    def _message(self, episode: Episode, turn: Turn) -> Message:
        return turn_message(self._rules, turn, episode.read[turn.index])

    async def _rebuild(self, episode: Episode, recorded: Sequence[Turn]) -> None:
        """Bring back on this worker what the recorded turns did to tools and environment: take snapshots, and
        repeat the rest. If that fails, repeat all. Then post the replies to malformed calls of the last
        turn, if they were not recorded."""
        self._note(episode.turns)
        try:
            await self._tools.restore(self._histories)
            await self._repeat(episode)
        except AsyncrlError:
            if not self._tools.restored or self._environment is not None:
                raise
            await self._tools.close()
            await self._tools.open()
            await self._repeat(episode)
        self._tools.caught_up()
        if recorded and episode.turns[-1].replies != recorded[-1].replies:
            await self.run.post_reply(episode.turns[-1])

    async def _repeat(self, episode: Episode) -> None:
        for turn in episode.turns:
            await self._tools.redo(turn.replies, self._rules.shorten, turn.index)
            if turn.observation is not None:
                await self._step_again(episode, turn, turn.observation)

    def _note(self, turns: Sequence[Turn]) -> None:
        """Name new turns, and the last one again: it may have got more replies."""
        del self._histories[len(turns) - 1 :]
        for turn in turns[len(self._histories) :]:
            self._histories.append(history(self._histories[-1] if self._histories else "", turn))

    async def _step_again(self, episode: Episode, turn: Turn, recorded: Observation) -> None:
        assert self._environment is not None
        if self._environment.inner.replay == "no":
            raise ProtocolError("the environment cannot be repeated, so the episode starts again")
        again = await self._step(turn.index + 1, self._message(episode, turn))
        if machine.shorten_observation(self._rules, again).messages != recorded.messages:
            raise ProtocolError("the environment answered differently when repeated")

    # -- records -------------------------------------------------------------------------------------

    async def _post(self, before: Episode, now: Episode) -> None:
        """Post what an event added: a turn, its reply, or both (malformed calls are answered at once)."""
        if len(now.turns) > len(before.turns):
            await self.run.post_turn(now.turns[-1])
            self.episode = now  # from here on a timeout counts the turn
        if not now.turns:
            return
        last = now.turns[-1]
        known = before.turns[-1] if len(before.turns) == len(now.turns) else None
        if (last.replies, last.observation) != ((known.replies, known.observation) if known else ((), None)):
            self._note(now.turns)
            await self._tools.save(last.index, self._histories[-1])  # first: see tools/snapshots.py
            await self.run.post_reply(last)


def _outcome(episode: Episode) -> Outcome:
    assert isinstance(episode.command, commands.Done | commands.Fail)
    stats = EpisodeStats(len(episode.turns), episode.tool_calls, tool_s=episode.tool_seconds)
    return Outcome(episode.command, episode.turns, stats)
