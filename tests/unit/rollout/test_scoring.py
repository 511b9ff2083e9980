"""The reward of one episode: parts at once, their deadlines, and whose fault a failure is."""

from __future__ import annotations

import asyncio
import math
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from asyncrl.episodes.reward import EpisodeReward
from asyncrl.rewards import Reward, RewardError, RewardInput, in_loop, load_rewards
from asyncrl.types import EpisodeEnd, FailReason, RewardResult
from tests.fakes.chat import sample
from tests.fakes.raised import BASE_EXCEPTIONS

GIVEN = RewardInput(sample(), "42", turns=2, end=EpisodeEnd.ANSWERED)


def verdict(rewards: list[Reward], timeout: float = 60.0) -> RewardResult:
    async def main() -> RewardResult:
        episode_reward = EpisodeReward(rewards, timeout)
        try:
            return await episode_reward.score_episode(GIVEN)
        finally:
            await episode_reward.close()

    return asyncio.run(main())


def test_async_rewards_run_in_the_loop() -> None:
    async def reward(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
        assert threading.current_thread() is threading.main_thread()
        return float(solution_str) + extra_info["num_turns"] + (ground_truth == 42)

    assert verdict([in_loop(reward)]) == RewardResult(45.0)


@pytest.mark.parametrize("result", [float("nan"), "text", None, {}])
def test_no_number_is_a_reward_error(result: Any) -> None:
    with pytest.raises(RewardError, match="reward is"):
        verdict([in_loop(lambda **_: result)])


@pytest.mark.parametrize("kind", [KeyError, TimeoutError, *BASE_EXCEPTIONS])
@pytest.mark.parametrize("sync", [True, False])
def test_an_error_is_a_reward_error(kind: type[BaseException], sync: bool) -> None:
    def quick(reward_input: RewardInput) -> float:
        raise kind("its text")

    async def waiting(reward_input: RewardInput) -> float:
        await asyncio.sleep(0)
        raise kind("its text")

    reward = quick if sync else waiting

    with pytest.raises(RewardError, match=rf"^{kind.__name__}: .* \(test_scoring.py:\d+\)$"):
        verdict([in_loop(reward)])


def test_a_reward_that_never_returns_costs_its_deadline() -> None:
    async def never(reward_input: RewardInput) -> float:
        await asyncio.Event().wait()
        return 1.0

    with pytest.raises(RewardError, match=r"^no reward within 0.05 s$"):
        verdict([in_loop(never)], timeout=0.05)


def test_a_reward_that_ignores_its_deadline_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.isolation.calls.GRACE_SECONDS", 0.0)
    endings: list[bool] = []

    async def stubborn(reward_input: RewardInput) -> float:
        for _ in range(2):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                endings.append(False)
        endings.append(True)
        return 1.0

    with pytest.raises(RewardError, match=r"^no reward within 0.02 s$"):
        verdict([in_loop(stubborn)], timeout=0.02)
    assert True not in endings


def test_a_reward_that_cancels_itself_fails() -> None:
    async def gone(reward_input: RewardInput) -> float:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.Event().wait()
        return 1.0

    with pytest.raises(RewardError, match="the call was cancelled"):
        verdict([in_loop(gone)])


PATIENT = """
import asyncio
class Patient:
    own_deadline = True
    async def __call__(self, {arguments}):
        await asyncio.sleep(0.05)
        raise {error}
"""


@pytest.mark.parametrize(
    "arguments", ["given", "data_source, solution_str, ground_truth, extra_info=None"], ids=["typed", "verl"]
)
@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("TimeoutError('of the room')", r"^TimeoutError: of the room \(mine.py"),
        ("SystemExit(3)", "^SystemExit: 3"),
    ],
)
def test_a_reward_may_bound_its_own_waits(tmp_path: Path, arguments: str, error: str, message: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(PATIENT.format(arguments=arguments, error=error))
    with pytest.raises(RewardError, match=message):
        verdict(load_rewards(f"{file}:Patient"), timeout=0.02)


def test_no_reward_waits_for_ever(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(PATIENT.format(arguments="given", error="ValueError").replace("0.05", "1000"))
    with pytest.raises(RewardError, match=r"^no reward within 0.011 s$"):
        verdict(load_rewards(f"{file}:Patient"), timeout=0.001)


def test_a_reward_whose_steps_all_have_limits_has_no_other_one(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import math\n" + PATIENT.format(arguments="given", error="ValueError('late')"))
    file.write_text(file.read_text().replace("True", "math.inf"))
    rewards = load_rewards(f"{file}:Patient")
    assert EpisodeReward(rewards, 60.0).deadline == math.inf
    with pytest.raises(RewardError, match=r"^ValueError: late"):
        verdict(rewards, timeout=0.001)


def test_parts_run_side_by_side_and_add_up() -> None:
    meeting = asyncio.Barrier(2)

    async def one(reward_input: RewardInput) -> float:
        await meeting.wait()
        return 1.0

    async def other(reward_input: RewardInput) -> float:
        await meeting.wait()
        return 0.5

    parts = [
        Reward("one", one, "loop", in_loop(one).source),
        Reward("other", other, "loop", in_loop(other).source, weight=-2.0),
    ]
    assert verdict(parts) == RewardResult(0.0, (), {"one": 1.0, "other": 0.5})


def test_a_part_that_fails_is_named_and_the_others_are_waited_for() -> None:
    def broken(reward_input: RewardInput) -> float:
        raise ValueError("why")

    parts = [in_loop(lambda given: 1.0, "fine"), in_loop(broken, "broken"), in_loop(lambda **_: "x", "text")]
    with pytest.raises(RewardError) as caught:
        verdict(parts)
    assert str(caught.value).startswith("broken: ValueError: why (test_scoring.py:")
    assert "; text: TypeError: the reward is 'x'" in str(caught.value)


def test_a_failure_keeps_its_reason_beside_rewards_that_do_not_fail() -> None:
    async def no_sandbox(reward_input: RewardInput) -> float:
        raise RewardError("no room", FailReason.SETUP_FAILED)

    parts = [in_loop(lambda given: 1.0, "fine"), in_loop(no_sandbox, "tests")]
    with pytest.raises(RewardError, match=r"^tests: no room$") as caught:
        verdict(parts)
    assert caught.value.reason is FailReason.SETUP_FAILED


def test_sums_that_make_no_sense_are_a_reward_error() -> None:
    result = {"score": 0, "turns": [0.0]}
    two = {"score": 0, "turns": [0.0, 0.0]}
    parts = [in_loop(lambda **_: result, "one"), in_loop(lambda **_: two, "two")]
    with pytest.raises(RewardError, match="different lengths"):
        verdict(parts)


@pytest.mark.slow
def test_sync_functions_run_in_a_process_which_the_deadline_kills(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import os, time\n"
        "def pid(given): return os.getpid()\n"
        "def hang(given): time.sleep(1000)\n"
        "def die(given): os._exit(7)\n"
    )
    assert verdict(load_rewards(f"{file}:pid")).score != os.getpid()
    with pytest.raises(RewardError, match=r"^no reward within 0.5 s$"):
        verdict(load_rewards(f"{file}:hang"), timeout=0.5)
    with pytest.raises(RewardError, match=r"^die: the reward process exited with code 7$"):
        verdict(load_rewards({f"{file}:die": {}, f"{file}:pid": {}}))
