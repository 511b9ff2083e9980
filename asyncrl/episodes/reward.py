"""Computes the reward of an episode: all parts at once, each with a deadline, and the shaping.

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
from asyncrl.rewards import Reward, RewardError, RewardInput, ShapingInput, combine, evaluate, sum_of_shapings
from asyncrl.rewards.process import MAX_PROCESSES, MAX_WAIT_DEADLINES, RewardPool
from asyncrl.rewards.shaping import Shaping
from asyncrl.types import EpisodeEnd, RewardResult, Turn


class EpisodeReward:
    """Calls rewards, each within `timeout` s; `shapings` are for episodes that train. For one event loop."""

    def __init__(self, rewards: Sequence[Reward], timeout: float, shapings: Sequence[Shaping] = ()) -> None:
        self.rewards = list(rewards)
        self._timeout = timeout
        self._shapings = shapings
        self._pools = [_pool(reward) for reward in rewards]

    async def score_episode(self, reward_input: RewardInput) -> RewardResult:
        """Return the weighted sum of all rewards of an episode. RewardError if rewards fail, with the reason
        of the first failure, and with the names of the failed rewards if there are several rewards."""
        reward_pools = zip(self.rewards, self._pools, strict=True)
        outcomes = await asyncio.gather(
            *(self._reward_outcome(reward, pool, reward_input) for reward, pool in reward_pools)
        )
        failures: list[tuple[str, RewardError]] = []
        weighted_results: list[tuple[str, float, RewardResult]] = []
        for reward, outcome in zip(self.rewards, outcomes, strict=True):
            if isinstance(outcome, RewardError):
                failures.append((reward.name, outcome))
            else:
                weighted_results.append((reward.name, reward.weight, outcome))

        if failures:
            named_errors = [
                f"{name}: {error}" if len(outcomes) > 1 else str(error) for name, error in failures
            ]
            raise RewardError("; ".join(named_errors), failures[0][1].reason)

        try:
            return combine(weighted_results)
        except ValueError as error:
            raise RewardError(one_line(error)) from error

    @property
    def deadline(self) -> float:
        """Return the seconds after which `score_episode` has returned or raised."""
        return self._timeout * (
            1 + MAX_WAIT_DEADLINES * max(1.0, *(reward.own_deadline for reward in self.rewards))
        )

    def add_shaping(
        self, rules: Rules, reward_result: RewardResult, turns: Sequence[Turn], end: EpisodeEnd
    ) -> RewardResult:
        """Return the reward of an episode that trains, with the shaping. Raises RewardError."""
        limits = rules.config
        shaping_input = ShapingInput(
            score=reward_result.score,
            tokens=sum(len(turn.generation.ids) for turn in turns),
            turns=len(turns),
            end=end,
            limit=min(limits.rows * limits.max_tokens, limits.max_turns * limits.max_new_tokens),
        )
        try:
            with users_code():
                shaping = sum_of_shapings(self._shapings, shaping_input)
        except Exception as error:
            raise RewardError(f"algorithm.shaping: {describe(error)}") from error

        return msgspec.structs.replace(reward_result, shaping=shaping)

    async def close(self) -> None:
        """Kill the reward processes and close connections to remote models."""
        await asyncio.gather(*(pool.close() for pool in self._pools if pool is not None))
        await close_sessions()

    async def _reward_outcome(
        self, reward: Reward, pool: RewardPool | None, reward_input: RewardInput
    ) -> RewardResult | RewardError:
        """Return the result of one reward, or the error."""
        time_limit = self._timeout * (1 + MAX_WAIT_DEADLINES * reward.own_deadline)
        try:
            if pool is not None:
                return await pool.call(reward_input, time_limit)
            return await call_user(partial(_evaluate_in_loop, reward, reward_input), time_limit)
        except RewardError as error:
            return error
        except CallTimeout as timeout:
            return RewardError(f"no reward within {time_limit:g} s{timeout.last_wait}")
        except Exception as error:
            return RewardError(describe(error))


async def _evaluate_in_loop(reward: Reward, reward_input: RewardInput) -> RewardResult | RewardError:
    """Evaluate a reward, and describe its errors here: errors of `call_user` are described otherwise."""
    try:
        with users_code():
            return await evaluate(reward.function, reward_input)
    except RewardError as error:
        return error
    except Exception as error:
        return RewardError(describe(error))


def _pool(reward: Reward) -> RewardPool | None:
    if reward.location == "loop":
        return None
    return RewardPool(reward.source, 1 if reward.location == "one_process" else MAX_PROCESSES)


def transcript(rules: Rules, turns: Sequence[Turn]) -> str:
    """Return the text of the rows, with all tokens that the model read and wrote."""
    row_texts = [rules.chat.decode(ids) for ids in rows_of(turns)]
    if len(row_texts) < 2:
        return "".join(row_texts)
    return "\n".join(f"=== row {row_number} ===\n{text}" for row_number, text in enumerate(row_texts))
