"""Supervised episodes: conversations of the data take the path of sampled episodes, but nothing is sampled.

    Assign -> DemonstrationPlayer: the sample's messages as turns -> Finished (reward 0) | Failed

Held-out conversations are scored by the engine of validations, which also samples held-out prompts, as
always.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asyncrl.conversation.commands import Done, Fail
from asyncrl.conversation.demonstration import demonstration_turns, length_failure
from asyncrl.conversation.turns import rows_of
from asyncrl.engines.base import Request, Sampling
from asyncrl.errors import EngineError, ProtocolError
from asyncrl.rollout.episode_run import EpisodeRun, Outcome
from asyncrl.tools import Toolbox
from asyncrl.types import EpisodeResult, EpisodeStats, Generation, TokenScores, Turn
from asyncrl.weights import disk
from asyncrl.weights.manifest import Manifest, WeightsRef


@dataclass
class DemonstrationPlayer:
    """See `Player`."""

    run: EpisodeRun
    toolbox: Toolbox

    async def play(self, recorded: Sequence[Turn]) -> Outcome:
        """Post the turns that are not recorded yet."""
        sample = self.run.assignment.sample
        version = max(0, self.run.sampling.sampler.version)
        rules = self.run.context.rules
        turns = demonstration_turns(rules, sample, self.toolbox.schemas(sample), version)
        if isinstance(turns, Fail):
            return Outcome(turns, ())
        if (failure := length_failure(rules.config, turns)) is not None:
            return Outcome(failure, ())

        recorded_tokens = [(turn.context, turn.generation.ids) for turn in recorded]
        if recorded_tokens != [(turn.context, turn.generation.ids) for turn in turns[: len(recorded)]]:
            raise ProtocolError("the recorded turns no longer match the data")

        for turn in turns[len(recorded) :]:
            await self.run.post_turn(turn)

        is_validation = self.run.assignment.lane == "eval"
        components = {"nll": await self._mean_nll(turns)} if is_validation else {}
        model_tokens = sum(len(turn.generation.ids) for turn in turns)
        episode_result = EpisodeResult(0.0, model_tokens, components=components)
        call_count = sum(len(message.tool_calls) for message in sample.prompt)

        return Outcome(Done(episode_result), turns, EpisodeStats(len(turns), call_count))

    async def _mean_nll(self, turns: Sequence[Turn]) -> float:
        """Return the mean -log pi of the assistant's tokens."""
        row_logprobs = []
        for ids in rows_of(turns):
            image_files = await self.run.images.files_of(ids)
            request = Request(self.run.name, ids, Sampling(0, ()), images=image_files)
            row_logprobs.append(await self.run.sampling.sampler.score(request))
        token_logprobs = assistant_logprobs(turns, row_logprobs)
        if not math.isfinite(logprob_sum := math.fsum(token_logprobs)):
            raise EngineError("the model's log-probs for the conversation are not finite numbers")
        return -logprob_sum / len(token_logprobs)

    async def expire(self) -> Outcome:
        raise ProtocolError("a conversation from the data was not posted within rollout.episode_timeout")

    async def close(self) -> None:
        """Do nothing: nothing was opened."""


def assistant_logprobs(turns: Sequence[Turn], row_logprobs: Sequence[Sequence[float]]) -> list[float]:
    """Pick the log-probs of the turns' ids out of the log-probs of each row; the first token of a row has
    none."""
    row_ends = [-1] * len(row_logprobs)
    token_logprobs = list[float]()
    for turn in turns:
        row_ends[turn.row] += len(turn.context) + len(turn.generation.ids)
        token_logprobs += row_logprobs[turn.row][
            row_ends[turn.row] - len(turn.generation.ids) : row_ends[turn.row]
        ]
    return token_logprobs


class NoEngine:
    """Replaces an engine where nothing is sampled: confirms versions, and reads none."""

    def __init__(self) -> None:
        self.version = 0
        self.tokens = 0
        self.asleep = False

    async def generate(self, request: Request) -> Generation:
        raise EngineError("a supervised run samples only during validation")

    def release(self, session: str) -> None:
        """Do nothing: sessions hold nothing."""

    async def load(self, ref: WeightsRef) -> Manifest:
        manifest = await asyncio.to_thread(disk.read_manifest, ref)
        self.version = ref.version.step
        self.asleep = False
        return manifest

    async def sleep(self) -> None:
        self.asleep = True

    async def score(self, ids: tuple[int, ...], images: Mapping[str, bytes] = {}) -> tuple[float, ...]:
        return ()  # nothing is computed, so nothing can differ from the trainer

    async def read(
        self, ids: tuple[int, ...], count: int, top: int, images: Mapping[str, bytes] = {}
    ) -> TokenScores:
        raise EngineError("a supervised run has no scorers")

    async def close(self) -> None:
        """Do nothing: nothing was opened."""
