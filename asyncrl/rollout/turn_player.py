"""Leads an episode turn by turn: carries out the commands of the pure machine over tools and an environment.

command of the machine ──► engine / tools / environment / reward ──► event ──► machine
                                  │
                                  └► records: a turn is durable before anybody acts on it
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from asyncrl.conversation import commands
from asyncrl.conversation import episode as machine
from asyncrl.conversation.commands import Rules
from asyncrl.conversation.episode import Episode
from asyncrl.environments import Environment
from asyncrl.errors import ProtocolError
from asyncrl.rollout.context import Ended, EpisodeRun
from asyncrl.rollout.episode_runner import WorldError
from asyncrl.rollout.guarded import Guarded, guarded
from asyncrl.tools import Toolbox, ToolSession
from asyncrl.types import Message, Observation, ToolCall, ToolReply, Turn

log = logging.getLogger("asyncrl.worker")


@dataclass(frozen=True)
class World:
    """What the model meets: tools, and perhaps an environment, made anew for each episode."""

    toolbox: Toolbox
    environment: Callable[[], Environment] | None = None


@dataclass
class TurnPlayer:
    """See `Player`. `episode` is its state as far as it was posted."""

    job: EpisodeRun
    world: World
    episode: Episode | None = None
    _tools: ToolSession = field(init=False)
    _environment: Guarded | None = None
    _told: int = 0  # turns until the newest that the environment was told

    def __post_init__(self) -> None:
        self._tools = self.world.toolbox.session(self.job.assign.sample)

    @property
    def _rules(self) -> Rules:
        return self.job.desk.rules

    async def play(self, recorded: Sequence[Turn]) -> Ended:
        opened = await self._open()
        episode = machine.resume(self._rules, self.job.assign.sample, opened, recorded)
        await self._rebuild(episode, recorded)
        self.episode = episode
        while not episode.over:
            event = await self._answer(episode)
            before, episode = episode, machine.advance(self._rules, episode, event)
            await self._post_news(before, episode)
            self.episode = episode
        return _ended(episode)

    async def expire(self) -> Ended:
        episode = self.episode or machine.begin(self.job.assign.sample)
        if not episode.over and not isinstance(episode.command, commands.Score):  # else its end is known
            episode = machine.expire(self._rules, episode)
        if not episode.over:
            episode = machine.advance(self._rules, episode, await self._answer(episode))
        return _ended(episode)

    async def close(self) -> None:
        await self._tools.close()
        if self._environment is not None and (trouble := await self._environment.close()):
            log.warning("the environment of episode %s did not close: %s", self.job.name, trouble)

    # -- commands ------------------------------------------------------------------------------------

    async def _answer(self, episode: Episode) -> commands.Event:
        """Carry out the command the episode waits for."""
        match episode.command:
            case commands.Generate(ids=ids, max_new_tokens=limit, row=row):
                return commands.TurnGenerated(await self.job.generate(ids, limit, row))
            case commands.CallTools(calls=calls):
                await self.job.until_durable()
                return commands.ToolsReplied(await self._call(calls))
            case commands.Step(message=message):
                await self.job.until_durable()
                return commands.Observed(await self._step(len(episode.turns), message))
            case commands.Score(answer=answer, end=end):
                said = machine.conversation(self._rules, msgspec.structs.replace(episode, folded=0))
                verdict = await self.job.verdict(episode.turns, answer, end, said, episode.tool_calls)
                earned = verdict.score + await self._cut_short(episode)
                return commands.EpisodeScored(msgspec.structs.replace(verdict, score=earned))
            case command:
                raise ProtocolError(f"nothing answers {type(command).__name__}")

    async def _open(self) -> commands.Opened:
        """Open the tools, then let the environment begin."""
        await self._tools.open()
        if self.world.environment is None:
            return commands.Opened(self._tools.schemas)
        desk = self.job.desk
        self._environment = guarded(self.world.environment, desk.config.tool_timeout, desk.waits)
        first = await self._environment.reset(self.job.assign.sample)
        if first.done:
            raise WorldError("the environment was over before the first turn")
        own = self._environment.inner.tools
        schemas = (*self._tools.schemas, *(msgspec.json.encode(schema).decode() for schema in own))
        return commands.Opened(schemas, frozenset(tool["function"]["name"] for tool in own), first.messages)

    async def _call(self, calls: tuple[ToolCall, ...]) -> tuple[ToolReply, ...]:
        """All calls of a turn, side by side; each has its own deadline and none raises."""
        with self.job.desk.waits.named(f"tool {', '.join(sorted({call.name for call in calls}))}"):
            return tuple(await asyncio.gather(*(self._tools.call(call) for call in calls)))

    async def _step(self, count: int, message: Message) -> Observation:
        """Tell the environment the turn after which there are `count`."""
        assert self._environment is not None
        self._told = count
        return await self._environment.step(message)

    async def _cut_short(self, episode: Episode) -> float:
        """What the environment gives for an episode that it did not end itself."""
        last = episode.turns[-1].observation
        if self._environment is None or (last is not None and last.done):
            return 0.0
        heard = self._told == len(episode.turns)  # if only in part: a step may have been cut, too
        return await self._environment.cut_short(None if heard else self._said(episode, episode.turns[-1]))

    def _said(self, episode: Episode, turn: Turn) -> Message:
        return machine.spoken(self._rules, turn, tools=bool(episode.opened.tools))

    async def _rebuild(self, episode: Episode, recorded: Sequence[Turn]) -> None:
        """Redo what recorded turns did to tools and the environment on the worker that made them, and post
        replies that were not recorded yet: those of malformed calls, which need no tool."""
        limits = self._rules.limits
        for turn in episode.turns:
            await self._tools.redo(
                turn.replies,
                lambda text: self._rules.chat.shorten(text, limits.max_reply_tokens, limits.cut_replies),
            )
            if turn.observation is not None:
                await self._step_again(episode, turn)
        if recorded and episode.turns[-1].replies != recorded[-1].replies:
            await self.job.heard(episode.turns[-1])

    async def _step_again(self, episode: Episode, turn: Turn) -> None:
        assert self._environment is not None
        if self._environment.inner.replay == "no":
            raise ProtocolError("the environment cannot be repeated, so the episode starts again")
        again = await self._step(turn.index + 1, self._said(episode, turn))
        if (
            turn.observation is None
            or machine.as_read(self._rules, again).messages != turn.observation.messages
        ):
            raise ProtocolError("the environment said something else when repeated")

    # -- records -------------------------------------------------------------------------------------

    async def _post_news(self, before: Episode, now: Episode) -> None:
        """Post what an event added: a turn, what it was answered with, or both (malformed calls are answered
        at once)."""
        if len(now.turns) > len(before.turns):
            await self.job.keep(now.turns[-1])
            self.episode = now  # from here on a timeout counts the turn
        if not now.turns:
            return
        last, known = now.turns[-1], before.turns[-1] if len(before.turns) == len(now.turns) else None
        if (last.replies, last.observation) != ((known.replies, known.observation) if known else ((), None)):
            await self.job.heard(last)


def _ended(episode: Episode) -> Ended:
    assert isinstance(episode.command, commands.Done | commands.Fail)
    return Ended(episode.command, episode.turns, episode.tool_calls, episode.tool_seconds)
