"""Episodes with classes of tools: three written as TRL's `environment_factory` takes them, and a crash."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from asyncrl.rewards import RewardInput, load_rewards
from asyncrl.tools import load_tools, snapshots
from asyncrl.tools.snapshots import Snapshots
from asyncrl.types import FailReason, Message, Sample
from tests.fakes.chat import call
from tests.fakes.episodes import TurnBench

GAME = '''
class GuessEnv:
    def __init__(self):
        self.reward = 0.0
        self.done = False

    def reset(self, **kwargs) -> str:
        self.word = kwargs["word"]
        self.reward = 0.0
        self.done = False
        return f" It has {len(self.word)} letters."

    def guess(self, word: str) -> str:
        """
        Guess the secret word.

        Args:
            word: The guessed word.

        Returns:
            Feedback to the guess.
        """
        if self.done:
            raise ValueError("Game over.")
        if word == self.word:
            self.done = True
            self.reward = 1.0
            return "Correct!"
        return "Wrong, guess again."


def reward_func(completions, environments, **kwargs) -> list[float]:
    return [environment.reward for environment in environments]
'''

COUNTER = '''
class CounterEnv:
    def reset(self, **kwargs) -> None:
        self.counter = 0

    def increment(self, step: int) -> int:
        """
        Increment the counter.

        Args:
            step: Amount to add.

        Returns:
            The new value.
        """
        self.counter += step
        return self.counter


def ends_with(prompts, completions, target, **kwargs):
    return [float(c[-1]["content"] == str(t)) for c, t in zip(completions, target)]
'''

GETTER = '''
class GetterEnv:
    def reset(self, goal, **kwargs) -> None:
        self.goal = goal
        self.counter = 0

    def add(self, step: int) -> int:
        """Add to the counter."""
        self.counter += step
        return self.counter

    async def get_reward(self) -> float:
        return float(self.counter == self.goal)
'''

CLIENT = '''
import json
import os
import urllib.request


class Client:
    def __init__(self, url):
        self.url = url

    def send(self, **message):
        body = json.dumps(message).encode()
        with urllib.request.urlopen(urllib.request.Request(self.url, body), timeout=30) as response:
            return json.load(response)


class EchoEnv:
    def __init__(self):
        self.client = Client(os.environ["ECHO_URL"])

    def reset(self, **kwargs) -> None | str:
        self.reward = 0.0
        return self.client.send(action="reset", seed=kwargs["seed"])["observation"]

    def echo(self, message: str) -> str:
        """
        Echo the message back.

        Args:
            message: The message to echo.

        Returns:
            The echoed message.
        """
        answer = self.client.send(action="echo", message=message)
        self.reward += answer["reward"]
        return answer["observation"]

    def shout(self, message: str) -> str:
        """Echo the message in capitals."""
        return self.echo(message.upper())


async def reward_func(environments, **kwargs):
    return [None if environment.reward == 0 else environment.reward for environment in environments]
'''


def bench(
    tmp_path: Path, code: str, class_name: str, reward_name: str, *turns: str, **columns: Any
) -> TurnBench:
    """Return an episode with the class and the reward of a user's file. `columns`: of `extra_info`."""
    (file := tmp_path / "mine.py").write_text(code)
    (reward,) = load_rewards(f"{file}:{reward_name}")

    def score(reward_input: RewardInput) -> Any:
        return reward.function(reward_input)

    episode = TurnBench([*turns], score, history="append")
    episode.tools = load_tools([f"{file}:{class_name}"])
    episode.sample = Sample(
        0, "game", (Message("user", "Play."),), "null", extra_info_json=json.dumps(columns)
    )
    return episode


def guess(word: str) -> str:
    return call("guess", f'{{"word": "{word}"}}')


GUESSES = (guess("pear"), guess("apple"), guess("apple"), "Done.")


def test_a_game_with_an_opening_text(tmp_path: Path) -> None:
    episode = bench(tmp_path, GAME, "GuessEnv", "reward_func", *GUESSES, word="apple")
    end = episode.finished()
    assert (end.result.reward, end.stats.tool_calls, end.stats.failed) == (1.0, 3, 1)
    (row,) = episode.rows
    _, prompt, conversation = row.partition("Play. It has 5 letters.")
    texts = ("[Wrong, guess again.]", "[Correct!]", "[error: ValueError: Game over.]", "")
    assert prompt and conversation == "".join(turn + text for turn, text in zip(GUESSES, texts, strict=True))


def test_the_reward_function_sees_the_prompt_that_the_model_got(tmp_path: Path) -> None:
    episode = bench(tmp_path, GAME, "GuessEnv", "reward_func", *GUESSES, word="apple")
    scored: list[RewardInput] = []

    def score(reward_input: RewardInput) -> float:
        scored.append(reward_input)
        return 0.5

    rewarded = TurnBench([*GUESSES], score)
    rewarded.tools = episode.tools
    rewarded.sample = episode.sample
    rewarded.finished()
    (reward_input,) = scored
    assert (
        reward_input.sample.prompt
        == reward_input.messages[:1]
        == (Message("user", "Play. It has 5 letters."),)
    )
    assert reward_input.result == {"reward": 1.0}


def test_a_prompt_without_a_message_of_the_user_gets_one(tmp_path: Path) -> None:
    episode = bench(tmp_path, GAME, "GuessEnv", "reward_func", "Done.", word="apple")
    episode.sample = Sample(
        0, "game", (Message("system", "Play."),), "null", extra_info_json='{"word": "apple"}'
    )
    episode.finished()
    assert episode.rows[0].endswith("Play. It has 5 letters.Done.")


def test_a_counter_without_a_text(tmp_path: Path) -> None:
    turns = [call("increment", '{"step": 2}'), call("increment", '{"step": 3}'), "5"]
    episode = bench(tmp_path, COUNTER, "CounterEnv", "ends_with", *turns, target=5)
    assert episode.finished().result.reward == 1.0
    assert episode.rows[0].endswith(f"Play.{turns[0]}[2]{turns[1]}[5]5")


@pytest.mark.parametrize("reward_name", ["agent", "score"])
def test_the_reward_of_get_reward(tmp_path: Path, reward_name: str) -> None:
    """TRL calls it by itself: the built-in reward `agent` does so here, and reward functions read it."""
    score = "def score(environments, **kwargs): return [each.reward for each in environments]"
    turns = [call("add", '{"step": 2}'), call("add", '{"step": 3}'), "5"]
    episode = bench(tmp_path, f"{GETTER}\n{score}", "GetterEnv", "score", *turns, goal=5)
    assert list(episode.tools) == ["add"], "the model cannot call it"

    (file := tmp_path / "mine.py").write_text(f"{GETTER}\n{score}")
    (reward,) = load_rewards("agent" if reward_name == "agent" else f"{file}:score")
    rewarded = TurnBench([*turns], lambda given: reward.function(given), history="append")
    rewarded.tools, rewarded.sample = episode.tools, episode.sample
    assert rewarded.finished().result.reward == 1.0


class EchoService(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        observation = message.get("message", f" Seed {message.get('seed')}.")
        answer = json.dumps({"observation": observation, "reward": len(observation) / 10}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with ThreadingHTTPServer(("127.0.0.1", 0), EchoService) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setenv("ECHO_URL", f"http://127.0.0.1:{server.server_port}")
        yield
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("turns", "reward"), [([call("shout", '{"message": "ab"}')], 0.2), ([], 0.0)])
def test_a_class_that_talks_to_a_service(
    tmp_path: Path, service: None, turns: list[str], reward: float
) -> None:
    episode = bench(tmp_path, CLIENT, "EchoEnv", "reward_func", *turns, "Bye.", seed=7)
    assert episode.finished().result.reward == reward
    assert episode.rows[0].endswith(f"Play. Seed 7.{turns[0]}[AB]Bye." if turns else "Play. Seed 7.Bye.")


# -- crashes ------------------------------------------------------------------------------------------------


def test_an_episode_goes_on_after_reset_and_the_recorded_calls(tmp_path: Path) -> None:
    uninterrupted = bench(tmp_path, GAME, "GuessEnv", "reward_func", *GUESSES, word="apple")
    uninterrupted.play()
    resumed = bench(tmp_path, GAME, "GuessEnv", "reward_func", *GUESSES[2:], word="apple")
    end = resumed.finished(uninterrupted.record[:4])
    assert (end.result.reward, end.stats.turns) == (1.0, 4)
    assert resumed.frames[0] == uninterrupted.frames[4]  # also the error of a game that was over


def test_another_text_of_reset_makes_the_episode_start_again(tmp_path: Path) -> None:
    uninterrupted = bench(tmp_path, GAME, "GuessEnv", "reward_func", *GUESSES, word="apple")
    uninterrupted.play()
    resumed = bench(tmp_path, GAME, "GuessEnv", "reward_func", *GUESSES[2:], word="banana")
    assert resumed.failed(uninterrupted.record[:4]).reason is FailReason.NOT_REPEATED


UNSTABLE = """
from asyncrl.isolation.sandbox.changes import END, Entry
from asyncrl.rewards import RewardError
from asyncrl.tools import ToolError
from asyncrl.types import FailReason

class Unstable:
    snapshots = 1
    openings = 0

    def reset(self):
        Unstable.openings += 1
        return f" Opening {max(Unstable.openings, 2)}."

    def look(self) -> str:
        return "seen"

    async def snapshot(self):
        return Entry(END, "").frame()

    async def restore(self, archive):
        raise ToolError("the snapshot is damaged")

def reward_func(completions, **kwargs):
    raise RewardError("the snapshot stays", FailReason.TESTS_FAILED_TO_RUN)
"""


def test_reset_after_a_bad_snapshot_must_give_the_same_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "PARENT", tmp_path / "asyncrl")

    def unstable(*turns: str) -> TurnBench:
        episode = bench(tmp_path, UNSTABLE, "Unstable", "reward_func", *turns)
        episode.context.snapshots = Snapshots("run", 1 << 30)
        return episode

    uninterrupted = unstable(call("look"), "Done.")
    uninterrupted.play()
    end = unstable("Done.").failed(uninterrupted.record[:2])
    assert (
        end.reason is FailReason.NOT_REPEATED
        and "the reset of a tool's object returned different text" in end.detail
    )


def test_a_column_that_the_sample_lacks_fails_the_episode(tmp_path: Path) -> None:
    episode = bench(tmp_path, GAME, "GuessEnv", "reward_func", *GUESSES)
    end = episode.failed()
    assert end.reason is FailReason.TOOL_ERROR and "KeyError: 'word' (mine.py:8)" in end.detail
