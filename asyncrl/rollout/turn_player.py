"""Plays an episode turn by turn: carries out the commands of the episode machine, and feeds the answers back.

    resume -> [command -> engine, tools, environment or reward -> event -> advance -> post turn or reply]

until the episode is over. A turn is durable before a tool or an environment receives it.
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
from asyncrl.rollout.environment import EpisodeEnvironment
from asyncrl.rollout.episode_run import EpisodeRun, Outcome
from asyncrl.rollout.episode_runner import EnvironmentFailed
from asyncrl.tools import Toolbox, ToolSession
from asyncrl.tools.snapshots import hash_history
from asyncrl.types import EpisodeStats, Message, Observation, ToolReply, Turn

log = logging.getLogger("asyncrl.worker")


@dataclass
class TurnPlayer:
    """See `Player`. `episode` is the newest state that has been posted completely."""

    run: EpisodeRun
    toolbox: Toolbox
    make_environment: Callable[[], Environment] | None = None
    episode: Episode | None = None
    _tools: ToolSession = field(init=False)
    _environment: EpisodeEnvironment | None = None
    _stepped_turns: int = 0  # number of turns that the environment has received
    _turn_histories: list[str] = field(default_factory=list)  # names of snapshots, one for each turn

    def __post_init__(self) -> None:
        assignment = self.run.assignment
        self._tools = self.toolbox.session(
            assignment.sample,
            assignment.attempt.uid,
            self.run.context.snapshots,
            add_image=self.run.images.add,
        )

    @property
    def _rules(self) -> Rules:
        return self.run.context.rules

    async def play(self, recorded: Sequence[Turn]) -> Outcome:
        opened_tools = await self._open_tools()
        episode = machine.resume_episode(self._rules, self.run.assignment.sample, opened_tools, recorded)
        await self._rebuild_state(episode, recorded)
        self.episode = episode
        if recorded:
            self.run.clock.restart()
        while not episode.over:
            event = await self._carry_out(episode)
            next_episode = machine.advance_episode(self._rules, episode, event)
            await self._post_changes(episode, next_episode)
            episode = next_episode
            self.episode = episode

        return _outcome(episode)

    async def expire(self) -> Outcome:
        episode = self.episode or machine.begin_episode(self.run.assignment.sample)
        if not episode.over and not isinstance(episode.command, commands.Score):  # Score: the end is known
            episode = machine.expire_episode(episode)
        if not episode.over:
            episode = machine.advance_episode(self._rules, episode, await self._carry_out(episode))
        return _outcome(episode)

    async def close(self) -> None:
        await self._tools.close()
        if self._environment is not None and (close_problem := await self._environment.close()):
            log.warning("the environment of episode %s could not be closed: %s", self.run.name, close_problem)

    # -- commands ------------------------------------------------------------------------------------

    async def _carry_out(self, episode: Episode) -> commands.Event:
        """Carry out the command for which the episode waits."""
        match episode.command:
            case commands.Generate(ids=ids, max_new_tokens=max_new_tokens, row=row) as generate_command:
                teacher_prefix: tuple[int, ...] = ()
                if self.run.sampling.scorer:
                    teacher_prefix = machine.teacher_prompt(self._rules, episode, generate_command)
                generation = await self.run.sampling.generate(
                    ids, max_new_tokens, row, teacher_prefix=teacher_prefix
                )
                return commands.TurnGenerated(generation)

            case commands.CallTools(calls=calls):
                await self.run.records.until_durable()
                names = ", ".join(sorted({call.name for call in calls}))
                with self.run.context.waits.wait_named(f"tool {names}", self._tools.max_call_seconds(calls)):
                    replies = await asyncio.gather(*map(self._tools.call, calls))
                return commands.ToolsReplied(tuple(replies))

            case commands.Step(message=message):
                await self.run.records.until_durable()
                return commands.Observed(await self._step_environment(len(episode.turns), message))

            case commands.Score(answer=answer, end=end):
                messages = machine.conversation(self._rules, replace(episode, folded=0))
                with self.run.context.waits.wait_named("the results of the tools"):
                    result = await self._tools.result()
                reward_result = await self.run.compute_reward(
                    episode.sample,
                    episode.turns,
                    answer,
                    end,
                    messages=messages,
                    tool_calls=episode.tool_calls,
                    result=result,
                )
                score = reward_result.score + await self._cut_short_reward(episode)
                return commands.EpisodeScored(replace(reward_result, score=score))

            case command:
                raise ProtocolError(f"no handler for the command {type(command).__name__}")

    async def _open_tools(self) -> commands.Opened:
        """Open the tools, then reset the environment."""
        await self._tools.open()
        if self.make_environment is None:
            return commands.Opened(
                self._tools.schemas,
                opening_text=self._tools.opening_text,
                opening_images=self._tools.opening_images,
            )

        tool_timeout = self._rules.config.tool_timeout
        self._environment = EpisodeEnvironment(
            self.make_environment,
            tool_timeout,
            self.run.context.waits,
            self._rules.chat.image_layout,
            self.run.images.add,
        )
        first_observation = await self._environment.reset(self.run.assignment.sample)
        if first_observation.done:
            raise EnvironmentFailed("the environment ended the episode before the first turn")

        environment_tools = self._environment.environment.tools
        schemas = (
            *self._tools.schemas,
            *(msgspec.json.encode(schema).decode() for schema in environment_tools),
        )

        return commands.Opened(
            schemas,
            frozenset(tool["function"]["name"] for tool in environment_tools),
            first_observation.messages,
            self._tools.opening_text,
            self._tools.opening_images,
        )

    async def _step_environment(self, turn_number: int, message: Message) -> Observation:
        """Give the environment the message of the turn `turn_number`, counted from 1."""
        assert self._environment is not None
        self._stepped_turns = turn_number
        return await self._environment.step(message)

    async def _cut_short_reward(self, episode: Episode) -> float:
        """Return the environment's reward for an episode that did not end in the environment."""
        last_turn = episode.turns[-1]
        if self._environment is None or (last_turn.observation is not None and last_turn.observation.done):
            return 0.0

        # The environment has the last turn even if the time was up during that step.
        environment_got_last = self._stepped_turns == len(episode.turns)
        unanswered = None if environment_got_last else turn_message(self._rules, last_turn, episode.read[-1])
        return await self._environment.cut_short(unanswered)

    async def _rebuild_state(self, episode: Episode, recorded: Sequence[Turn]) -> None:
        """Rebuild on this worker the state of tools and environment after the recorded turns.

        Snapshots are restored first, and the turns after the snapshot are repeated. If that fails, all turns
        are repeated. Finally, the replies to malformed calls of the last turn are posted, if they were not
        recorded.
        """
        self._name_turns(episode.turns)
        try:
            await self._tools.restore(self._turn_histories)
            await self._repeat_turns(episode)
        except AsyncrlError:
            if not self._tools.restored_objects or self._environment is not None:
                raise
            await self._tools.close()
            await self._tools.open()
            opening = (self._tools.opening_text, self._tools.opening_images)
            if opening != (episode.opened.opening_text, episode.opened.opening_images):
                raise ProtocolError(
                    "the reset of a tool's object returned different text or images when replayed"
                ) from None
            await self._repeat_turns(episode)

        self._tools.caught_up()
        if recorded and episode.turns[-1].replies != recorded[-1].replies:
            await self.run.records.post_reply(episode.turns[-1])

    async def _repeat_turns(self, episode: Episode) -> None:
        for turn, parsed in zip(episode.turns, episode.read, strict=True):
            await self._tools.redo(turn.replies, self._rules.shorten_content, turn.index)
            if turn.observation is None:
                continue

            assert self._environment is not None
            if self._environment.environment.replay == "no":
                raise ProtocolError("the environment cannot be replayed, so the episode starts again")
            message = turn_message(self._rules, turn, parsed)
            repeated = await self._step_environment(turn.index + 1, message)
            if machine.shorten_observation(self._rules, repeated).messages != turn.observation.messages:
                raise ProtocolError("the environment answered differently when replayed")

    def _name_turns(self, turns: Sequence[Turn]) -> None:
        """Name new turns, and the last turn again: more replies may have arrived."""
        del self._turn_histories[len(turns) - 1 :]
        for turn in turns[len(self._turn_histories) :]:
            earlier_history = self._turn_histories[-1] if self._turn_histories else ""
            self._turn_histories.append(hash_history(earlier_history, turn))

    # -- records -------------------------------------------------------------------------------------

    async def _post_changes(self, previous_episode: Episode, episode: Episode) -> None:
        """Post everything that an event added: a turn, the reply, or both (malformed calls are answered at
        once)."""
        if len(episode.turns) > len(previous_episode.turns):
            await self.run.post_turn(episode.turns[-1])
            self.episode = episode  # a later timeout counts the turn
        if not episode.turns:
            return

        last_turn = episode.turns[-1]
        posted_reply: tuple[tuple[ToolReply, ...], Observation | None] = ((), None)
        if len(previous_episode.turns) == len(episode.turns):
            previous_turn = previous_episode.turns[-1]
            posted_reply = (previous_turn.replies, previous_turn.observation)

        if (last_turn.replies, last_turn.observation) != posted_reply:
            self._name_turns(episode.turns)
            await self._tools.save(last_turn.index, self._turn_histories[-1])  # first: see tools/snapshots.py
            await self.run.records.post_reply(last_turn)


def _outcome(episode: Episode) -> Outcome:
    assert isinstance(episode.command, commands.Done | commands.Fail)
    stats = EpisodeStats(len(episode.turns), episode.tool_calls, tool_s=episode.tool_seconds)
    return Outcome(episode.command, episode.turns, stats)
