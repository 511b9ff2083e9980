"""The reward of one episode: all its parts at once, each with a deadline, and its shaping.

    RewardInput ──┬─► in the loop (async, or quick) ─────┐
                  └─► RewardPool: child processes (sync) ┴──► combine ──► RewardResult

Every call of a reward function ends with a RewardResult, or with a RewardError of one line.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import msgspec

from asyncrl.conversation.commands import Rules
from asyncrl.conversation.turns import rows_of
from asyncrl.errors import describe, one_line, users_code
from asyncrl.isolation.calls import CallTimeout, call_user
from asyncrl.remote import close_sessions
from asyncrl.rewards import Reward, RewardError, RewardInput, ShapingInput, combine, evaluate, shape
from asyncrl.rewards.process import PATIENCE, SIZE, RewardPool
from asyncrl.rewards.shaping import Shaping
from asyncrl.types import EpisodeEnd, RewardResult, Turn


class EpisodeReward:
    """Calls rewards, each within `timeout` s; `shapings` are for episodes that train. For one event loop."""

    def __init__(self, rewards: Sequence[Reward], timeout: float, shapings: Sequence[Shaping] = ()) -> None:
        self.rewards = list(rewards)
        self._timeout = timeout
        self._shapings = shapings
        self._pools = [_pool(reward) for reward in rewards]

    async def score(self, given: RewardInput) -> RewardResult:
        """The weighted sum of all rewards of one episode. RewardError if one fails, with its name where there
        are several; of the first of them it has the reason."""
        pairs = zip(self.rewards, self._pools, strict=True)
        parts = await asyncio.gather(*(self._part(reward, pool, given) for reward, pool in pairs))
        named = list(zip(self.rewards, parts, strict=True))
        if failed := [(reward.name, part) for reward, part in named if isinstance(part, RewardError)]:
            told = "; ".join(f"{name}: {error}" if len(parts) > 1 else str(error) for name, error in failed)
            raise RewardError(told, failed[0][1].reason)
        results = [
            (reward.name, reward.weight, part) for reward, part in named if isinstance(part, RewardResult)
        ]
        try:
            return combine(results)
        except ValueError as error:
            raise RewardError(one_line(error)) from error

    @property
    def deadline(self) -> float:
        """Seconds after which `score` has returned or raised."""
        return self._timeout * (1 + PATIENCE * max(1.0, *(reward.own_deadline for reward in self.rewards)))

    def shape(self, given: ShapingInput) -> float:
        """Return what is added to the reward of an episode. Raises RewardError."""
        try:
            with users_code():
                return shape(self._shapings, given)
        except Exception as error:
            raise RewardError(f"algorithm.shaping: {describe(error)}") from error

    async def close(self) -> None:
        """Kill the reward processes and close connections to remote models."""
        await asyncio.gather(*(pool.close() for pool in self._pools if pool is not None))
        await close_sessions()

    async def _part(
        self, reward: Reward, pool: RewardPool | None, given: RewardInput
    ) -> RewardResult | RewardError:
        """The result of one reward, or why there is none."""
        seconds = self._timeout * (1 + PATIENCE * reward.own_deadline)
        try:
            if pool is not None:
                return await pool.call(given, seconds)
            return await call_user(partial(_in_loop, reward, given), seconds)
        except RewardError as error:
            return error
        except CallTimeout as late:
            return RewardError(f"no reward within {seconds:g} s{late.last_wait}")
        except Exception as error:
            return RewardError(describe(error))


async def _in_loop(reward: Reward, given: RewardInput) -> RewardResult | RewardError:
    """The reward's errors are described here, so that they differ from those of `call_user`."""
    try:
        with users_code():
            return await evaluate(reward.function, given)
    except RewardError as error:
        return error
    except Exception as error:
        return RewardError(describe(error))


def _pool(reward: Reward) -> RewardPool | None:
    if reward.place == "loop":
        return None
    return RewardPool(reward.source, 1 if reward.place == "one_process" else SIZE)


def transcript(rules: Rules, turns: Sequence[Turn]) -> str:
    """The rows as the model read and wrote them."""
    texts = [rules.chat.decode(ids) for ids in rows_of(turns)]
    if len(texts) < 2:
        return "".join(texts)
    return "\n".join(f"=== row {number} ===\n{text}" for number, text in enumerate(texts))


def shaped(
    rules: Rules, reward: EpisodeReward, earned: RewardResult, turns: Sequence[Turn], end: EpisodeEnd
) -> RewardResult:
    """The reward of an episode that trains. Raises RewardError."""
    limits = rules.config
    given = ShapingInput(
        score=earned.score,
        tokens=sum(len(turn.ids) for turn in turns),
        turns=len(turns),
        end=end,
        limit=min(limits.rows * limits.max_tokens, limits.max_turns * limits.max_new_tokens),
    )
    return msgspec.structs.replace(earned, shaping=reward.shape(given))
