"""One training run at a forced lag: sampling and training take turns in one process.

    step V:  weights of version max(0, V - lag) ──play──► episodes ──accumulate, finish──► version V + 1

The episode machine, the tool, the reward, the embedded engine and the learner are the project's own; what is
missing is the coordinator, so nothing depends on time. A batch is sampled by one version as a whole and no
group is filtered: arms differ in nothing but what they make of the same prompts and random numbers.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from asyncrl.buffer.prompts import Prompts, shuffled
from asyncrl.config import RunConfig
from asyncrl.conversation import commands
from asyncrl.conversation import episode as machine
from asyncrl.conversation.episode import Episode
from asyncrl.coordinator.workers import sampling_key
from asyncrl.data import load_samples
from asyncrl.engines.base import Engine, Request, Sampling
from asyncrl.engines.torch.engine import PREFILL_TOKENS, TorchEngine, replace_weights
from asyncrl.episodes.parts import EpisodeParts
from asyncrl.rewards import RewardInput
from asyncrl.tools import ToolSession
from asyncrl.trainer.learner import Learner
from asyncrl.trainer.model import PublishedShards
from asyncrl.trainer.world import World, join_ranks
from asyncrl.types import EpisodeResult, Sample
from asyncrl.wire.messages.trainer import PlannedTrajectory

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Lagged:
    """A run of `steps` batches. `operations`: longest chain of the task that is trained and tested.
    `shuffled`: the rewards of a batch are dealt to its episodes at random. `tests`: held-out episodes."""

    config: RunConfig
    lag: int
    steps: int
    operations: int
    shuffled: bool = False
    tests: int = 512


@dataclass(frozen=True)
class Outcome:
    """`successes` of `tests` held-out episodes; `rewards`: mean of each batch; `metrics`: of the learner, the
    mean over the steps that report them; CPU seconds of the whole run, of playing and of training."""

    successes: int
    tests: int
    rewards: list[float]
    metrics: dict[str, float]
    seconds: float
    play_s: float
    train_s: float


@dataclass(frozen=True)
class Ask:
    """An episode to play."""

    uid: str
    sample: Sample
    key: int


class Player:
    """Plays whole batches of episodes at one version, all at once. A player serves many runs of one task."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.parts = EpisodeParts(config)
        self.model: Any = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
        self._initial: dict[tuple[Ask, ...], list[Episode]] = {}

    def play(self, weights: Weights, version: int, asks: Sequence[Ask]) -> list[Episode]:
        """The episodes, in the order asked for. Those of the initial weights are the same in all arms and are
        remembered."""
        if version:
            return self._play(weights, version, asks)
        if tuple(asks) not in self._initial:
            self._initial[tuple(asks)] = self._play(weights, version, asks)
        return self._initial[tuple(asks)]

    def _play(self, weights: Weights, version: int, asks: Sequence[Ask]) -> list[Episode]:
        """With a fresh engine: no key or value of other weights is left."""
        replace_weights(self.model, weights)
        rollout = self.config.rollout
        sizes = len(asks), rollout.max_tokens, PREFILL_TOKENS
        engine = TorchEngine(self.model, lambda: self.model, *sizes, version)
        return asyncio.run(self._all(engine, asks))

    async def _all(self, engine: Engine, asks: Sequence[Ask]) -> list[Episode]:
        try:
            return list(await asyncio.gather(*(self._episode(engine, ask) for ask in asks)))
        finally:
            await engine.close()

    async def _episode(self, engine: Engine, ask: Ask) -> Episode:
        rules = self.parts.rules
        tools = self.parts.toolbox.session(ask.sample)
        await tools.open()
        episode = machine.advance_episode(
            rules, machine.begin_episode(ask.sample), commands.Opened(tools.schemas)
        )
        while not episode.over:
            episode = machine.advance_episode(rules, episode, await self._answer(engine, ask, tools, episode))

        await tools.close()
        engine.release(ask.uid)
        if isinstance(episode.command, commands.Fail):
            raise RuntimeError(f"episode {ask.uid} failed: {episode.command.detail}")

        return episode

    async def _answer(self, engine: Engine, ask: Ask, tools: ToolSession, episode: Episode) -> commands.Event:
        match episode.command:
            case commands.Generate(ids=ids, max_new_tokens=limit):
                sampling = Sampling(limit, self.parts.rules.chat.stop_ids, self.config.rollout.temperature)
                return commands.TurnGenerated(await engine.generate(Request(ask.uid, ids, sampling, ask.key)))
            case commands.CallTools(calls=calls):
                return commands.ToolsReplied(tuple([await tools.call(call) for call in calls]))
            case commands.Score(answer=answer, end=end):
                return commands.EpisodeScored(
                    await self.parts.reward.score_episode(RewardInput(ask.sample, answer, end=end))
                )
            case command:
                raise AssertionError(f"nothing answers {type(command).__name__}")


def run(lagged: Lagged, player: Player) -> Outcome:
    """Train, then test."""
    began = time.process_time()
    config = lagged.config
    train, test = (samples(path, lagged.operations) for path in (config.data.train, config.data.test))
    prompts = Prompts(len(train), lambda epoch: shuffled(range(len(train)), f"{config.seed}/{epoch}"))

    torch.manual_seed(config.seed)
    learner = Learner(config, world())
    learner.max_staleness = lagged.lag
    ring = deque([snapshot(learner)], maxlen=lagged.lag + 1)
    rewards: list[float] = []

    history: list[dict[str, float]] = []
    play_s = 0.0
    for step in range(lagged.steps):
        started = time.process_time()
        asks = _batch(config, train, prompts, step)
        episodes = player.play(ring[0], max(0, step - lagged.lag), asks)
        play_s += time.process_time() - started
        earned = [episode.command.result.reward for episode in episodes]  # type: ignore[union-attr]
        rewards.append(sum(earned) / len(earned))

        if lagged.shuffled:
            random.Random(f"{config.seed}/{step}").shuffle(earned)
        history.append(_train(learner, asks, episodes, earned))
        ring.append(snapshot(learner))

    train_s = time.process_time() - began - play_s
    held_out = [
        Ask(f"t{i}", sample, sampling_key(0, f"t{i}", 0)) for i, sample in enumerate(test[: lagged.tests])
    ]
    final = player.play(ring[-1], lagged.steps, held_out)
    successes = sum(episode.command.result.reward == 1.0 for episode in final)  # type: ignore[union-attr]
    metrics = _mean(history)
    return Outcome(successes, len(final), rewards, metrics, time.process_time() - began, play_s, train_s)


def _batch(config: RunConfig, samples: Sequence[Sample], prompts: Prompts, step: int) -> list[Ask]:
    groups = config.buffer.groups_per_batch

    members = config.buffer.episodes_per_group
    asks = []
    for group in range(step * groups, (step + 1) * groups):
        sample = samples[prompts.draw_sample(group)]
        for member in range(members):
            uid = f"{group}/{member}"
            asks.append(Ask(uid, sample, sampling_key(config.seed, uid, 0)))

    return asks


def _train(
    learner: Learner, asks: Sequence[Ask], episodes: Sequence[Episode], rewards: Sequence[float]
) -> dict[str, float]:
    """Train the learner with one batch."""
    rows = _rows(asks, episodes, rewards, learner.config.rollout.temperature)
    learner.accumulate([(row, episode.turns) for row, episode in zip(rows, episodes, strict=True)])
    return learner.finish()


def _rows(
    asks: Sequence[Ask], episodes: Sequence[Episode], rewards: Sequence[float], temperature: float
) -> list[PlannedTrajectory]:
    groups: dict[str, list[EpisodeResult]] = {}
    for ask, episode, reward in zip(asks, episodes, rewards, strict=True):
        group = ask.uid.partition("/")[0]
        per_turn = (0.0,) * (len(episode.turns) - 1) + (reward,)
        tokens = sum(len(turn.generation.ids) for turn in episode.turns)
        groups.setdefault(group, []).append(EpisodeResult(reward, tokens, per_turn))

    return [
        PlannedTrajectory(
            uid=ask.uid,
            group=group,
            frames=len(episode.turns),
            own=groups[group][int(number)],
            siblings=tuple(groups[group]),
            place=int(number),
            issued=len(groups[group]),
            temperature=temperature,
        )
        for ask, episode in zip(asks, episodes, strict=True)
        for group, _, number in [ask.uid.partition("/")]
    ]


@cache
def samples(path: str, operations: int) -> tuple[Sample, ...]:
    loaded = load_samples(path)
    return tuple(s for s in loaded if s.extra_info["operations"] <= operations)


@cache
def world() -> World:
    return join_ranks(0, 1, device="cpu")


def snapshot(learner: Learner) -> Weights:
    dtype = learner.policy.export_dtype
    return {
        name: shard.detach().full_tensor().to(dtype).clone()  # type: ignore[attr-defined]
        for name, shard in PublishedShards(learner.policy).items()
    }


def _mean(history: Sequence[dict[str, float]]) -> dict[str, float]:
    names = sorted(set().union(*history))
    columns = {name: [row[name] for row in history if name in row] for name in names}
    return {name: sum(column) / len(column) for name, column in columns.items()}


def plain(outcome: Outcome) -> dict[str, Any]:
    """For JSON."""
    return dict(msgspec.to_builtins(outcome))
