"""Other packages' environments, played through the adapters: the real packages, no fakes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from asyncrl.config import Options
from asyncrl.environments import load_environment
from asyncrl.errors import ConfigError
from asyncrl.types import Message, Observation, Sample, ToolCall


def sample(row: int = 0, **extra: Any) -> Sample:
    return Sample(row, "game", (Message("system", "Play."),), "null", extra_info=json.dumps(extra))


def play(plugin: dict[str, Options], sample: Sample, turns: Sequence[str]) -> list[Observation]:
    """What the environment says at first and to each turn, until it is done."""

    async def run() -> list[Observation]:
        world = load_environment(plugin)()
        try:
            heard = [await world.reset(sample)]
            for turn in turns:
                heard.append(await world.step(Message("assistant", turn)))
                if heard[-1].done:
                    break
            return heard
        finally:
            await world.close()

    return asyncio.run(run())


def text(observation: Observation) -> str:
    (message,) = observation.messages
    assert message.role == "user"
    return message.content


# -- Gymnasium ---------------------------------------------------------------------------------------

FIRM = {"id": "FrozenLake-v1", "arguments": '{"is_slippery": false}'}


def test_the_frozen_lake_is_crossed_by_words() -> None:
    heard = play(
        {"gymnasium": FIRM},
        sample(),
        ["down", "I go DOWN.", "right", "Not left, but right", "action: 1", "<b>right</b>"],
    )
    assert text(heard[0]) == "[S]FFF\nFHFH\nFFFH\nHFFG"
    assert text(heard[1]).endswith("SFFF\n[F]HFH\nFFFH\nHFFG")
    assert [observation.reward for observation in heard[1:]] == [0, 0, 0, 0, 0, 1]
    assert [observation.done for observation in heard[1:]] == [False] * 5 + [True]


def test_an_unreadable_turn_is_told_so_and_does_not_move() -> None:
    heard = play({"gymnasium": FIRM | {"unreadable": -0.5}}, sample(), ["hm", "7", "1.5", "upright", "right"])
    complaint = "No action found. Answer with one of: left, down, right, up."
    assert [text(observation) for observation in heard[1:5]] == [complaint] * 4
    assert [observation.reward for observation in heard[1:]] == [-0.5] * 4 + [0.0]
    assert "S[F]FF" in text(heard[5])


@pytest.mark.parametrize(
    ("id", "turns"),
    [
        ("FrozenLake-v1", ["right", "down", "right", "down"] * 5),
        ("Taxi-v4", ["south", "north", "east", "pickup", "west", "dropoff"]),
        ("Blackjack-v1", ["hit", "hit", "stick"]),
        ("CliffWalking-v1", ["up", "right", "right", "down"]),
    ],
)
def test_the_same_row_gives_the_same_world(id: str, turns: list[str]) -> None:
    first = play({"gymnasium": {"id": id}}, sample(3), turns)
    assert play({"gymnasium": {"id": id}}, sample(3), turns) == first
    assert play({"gymnasium": {"id": id}}, sample(9, seed=3), turns) == first
    assert all(text(observation) for observation in first)


def test_rows_differ() -> None:
    worlds = {text(play({"gymnasium": {"id": "Taxi-v4"}}, sample(row), [])[0]) for row in range(5)}
    assert len(worlds) > 1


def test_toy_texts_are_described() -> None:
    (seen,) = play({"gymnasium": {"id": "Taxi-v4"}}, sample(3), [])
    assert text(seen).endswith(
        "The taxi is in row 0, column 2 (from 0). The passenger is at R and wants to go to Y."
    )
    (seen,) = play({"gymnasium": {"id": "Blackjack-v1"}}, sample(3), [])
    assert text(seen) == "Your hand: 7. The dealer shows 10."
    (seen,) = play({"gymnasium": {"id": "Blackjack-v1", "show": "observation"}}, sample(3), [])
    assert text(seen) == "(7, 10, 0)"


def test_rewards_fall_on_their_turns() -> None:
    cliff = play({"gymnasium": {"id": "CliffWalking-v1"}}, sample(), ["right", "up"])
    assert [observation.reward for observation in cliff] == [0, -100, -1]


def test_the_sample_adds_arguments() -> None:
    lake = {"desc": ["SG", "HF"], "is_slippery": False}
    heard = play({"gymnasium": {"id": "FrozenLake-v1"}}, sample(gymnasium=lake), ["right"])
    assert text(heard[0]) == "[S]G\nHF"
    assert (heard[1].reward, heard[1].done) == (1, True)


def test_other_words_for_an_observation_and_its_actions(tmp_path: Any) -> None:
    words = tmp_path / "words.py"
    words.write_text("def describe(seen, env):\n    return f'cell {seen} of {env.nrow * env.ncol}'\n")
    options = FIRM | {"describe": f"{words}:describe", "actions": "west, south, east, north"}
    heard = play({"gymnasium": options}, sample(), ["south", "south, then east"])
    assert [text(observation) for observation in heard] == ["cell 0 of 16", "cell 4 of 16", "cell 5 of 16"]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"id": "FrozenLake-v7"}, "no environment 'FrozenLake-v7'"),
        ({"id": "no_such_module:Game-v0"}, "no environment"),
        ({"id": "Blackjack-v1", "show": "text"}, "renders no text"),
        ({"id": "FrozenLake-v1", "arguments": "[1]"}, "no JSON object"),
        ({"id": "FrozenLake-v1", "arguments": "{"}, "no JSON"),
        ({"id": "FrozenLake-v1", "describe": "nothing:here"}, "cannot import"),
    ],
)
def test_gymnasium_options(options: Options, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as error:
        load_environment({"gymnasium": options})
    assert str(error.value).startswith("$.rollout.environment.gymnasium: ")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"id": "FrozenLake-v1", "actions": "a, b"}, "4 actions, and 2 names"),
        ({"id": "CartPole-v1", "arguments": '{"none": 1}'}, "none"),
        ({"id": "Pendulum-v1"}, "Box cannot be read from text"),
    ],
)
def test_what_only_the_made_world_tells_fails_its_episode(options: Options, complaint: str) -> None:
    with pytest.raises(Exception, match=complaint):
        play({"gymnasium": options}, sample(), [])


# -- verifiers ---------------------------------------------------------------------------------------

SUMS = '''
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str
    weight: int = 1

class Calculator(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

class Sum(vf.Task[Data]):
    async def setup(self, trace, runtime):
        trace.info["box"] = (await runtime.run(["true"], {})).exit_code

    @classmethod
    def toolsets(cls, config):
        return [Calculator(vf.ToolsetConfig())]

    @vf.reward(weight=2.0)
    async def right(self, task, trace) -> float:
        return float(trace.last_reply == task.answer) * task.weight

    @vf.reward(weight=0.5)
    async def brief(self, trace) -> float:
        return float(trace.num_turns <= 2 and trace.info["box"] == 0)

    @vf.stop
    async def gave_up(self, trace: vf.Trace) -> bool:
        return bool(trace.nodes) and (trace.last_reply == "pass")

class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self):
        for a, b in [(1, 2), (3, 4)]:
            data = Data(prompt=f"{a} + {b}?", system_prompt="Add.", answer=str(a + b))
            yield Sum(data, self.config.task)

__all__ = ["Sums"]
'''

GUESSES = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    secret: int
    image_too: bool = False

class Guess(vf.Task[Data]):
    pass

class Config(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()
    rival: vf.AgentConfig = vf.AgentConfig()

class Game(vf.Env[Config]):
    async def setup(self, agents):
        agents.rival.trainable = False

    async def run(self, task, agents):
        if task.data.secret == 13:
            raise ValueError("unlucky")
        if task.data.secret == 99:
            await agents.rival.run(task)
        async with agents.player.interaction(task) as talk:
            said = await talk.turn("Guess.")
            while not said.terminated and said.last_reply != str(task.data.secret):
                said = await talk.turn([{"role": "user", "content": f"Not {said.last_reply}."}])
        talk.trace.record_reward("turns", -0.1 * talk.trace.num_turns)

    async def finalize(self, task, episode):
        (trace,) = episode.traces
        trace.record_reward("won", 1.0)

class TasksetConfig(vf.TasksetConfig):
    high: int = 3

class Guesses(vf.Taskset[Guess, TasksetConfig]):
    def load(self):
        for secret in range(self.config.high):
            yield Guess(Data(secret=secret, image="ubuntu" if secret == 2 else None))

__all__ = ["Guesses", "Game"]
"""


@pytest.fixture(scope="module")
def tasksets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Installed modules, as verifiers looks for them."""
    folder = tmp_path_factory.mktemp("tasksets")
    (folder / "asyncrl_sums.py").write_text(SUMS)
    (folder / "asyncrl_guesses.py").write_text(GUESSES)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield


def exchange(
    plugin: dict[str, Options], sample: Sample, turns: Sequence[Message]
) -> tuple[list[Observation], list[dict[str, Any]]]:
    """As `play`, for turns with calls; and the environment's own tools."""

    async def run() -> tuple[list[Observation], list[dict[str, Any]]]:
        world = load_environment(plugin)()
        try:
            heard = [await world.reset(sample)]
            for turn in turns:
                heard.append(await world.step(turn))
            return heard, list(world.tools)
        finally:
            await world.close()

    return asyncio.run(run())


def row(data: Any, *prompt: Message) -> Sample:
    given = data if isinstance(data, str) else json.dumps(data)
    return Sample(0, "vf", prompt, "null", extra_info=json.dumps({"verifiers": given}))


SUM = {"prompt": "1 + 2?", "system_prompt": "Add.", "answer": "3"}
ADD = (Message("system", "Add."), Message("user", "1 + 2?"))


def said(text: str, *calls: ToolCall) -> Message:
    return Message("assistant", text, calls)


def test_a_task_with_tools_and_a_rubric(tasksets: None) -> None:
    call = ToolCall("calculator_add", '{"a": 1, "b": 2}', "c1")
    wrong = ToolCall("calculator_add", '{"a": "x"}', "c2")
    heard, tools = exchange(
        {"verifiers": {"taskset": "asyncrl_sums"}},
        row(SUM, *ADD),
        [said("", call, wrong, ToolCall("sub", "{}", "c3")), said("3")],
    )
    assert heard[0] == Observation()
    first, second, third = heard[1].messages
    assert first == Message("tool", "3", tool_call_id="c1", name="calculator_add")
    assert second.content.startswith("error: ToolError") and third.content.startswith("error: unknown tool")
    assert heard[2] == Observation(reward=2.5, done=True)
    (schema,) = tools
    assert schema["type"] == "function" and schema["function"]["name"] == "calculator_add"
    assert schema["function"]["description"] == "Add two numbers."
    assert set(schema["function"]["parameters"]["properties"]) == {"a", "b"}


@pytest.mark.parametrize(
    ("turns", "reward"),
    [([said("4")], 0.5), ([said("3")], 2.5), ([said("pass", ToolCall("x", "{}"))], 0.5)],
)
def test_rewards_and_stops_of_a_task(tasksets: None, turns: list[Message], reward: float) -> None:
    heard, _ = exchange({"verifiers": {"taskset": "asyncrl_sums"}}, row(SUM, *ADD), turns)
    assert heard[-1] == Observation(reward=reward, done=True)


def test_a_task_may_say_the_prompt_itself(tasksets: None) -> None:
    heard, _ = exchange({"verifiers": {"taskset": "asyncrl_sums"}}, row(SUM), [])
    assert heard[0].messages == ADD
    heard, _ = exchange({"verifiers": {"taskset": "asyncrl_sums"}}, row(SUM, ADD[0]), [])
    assert heard[0].messages == ADD[1:]


GAME: dict[str, Options] = {"verifiers": {"taskset": "asyncrl_guesses", "role": "player"}}


def test_an_environment_that_leads(tasksets: None) -> None:
    heard = play(GAME, row({"secret": 7}), ["5", "7"])
    assert [text(observation) for observation in heard[:2]] == ["Guess.", "Not 5."]
    assert heard[2] == Observation(reward=0.8, done=True)
    assert play(GAME, row({"secret": 7}), ["5", "7"]) == heard  # as after a crash


@pytest.mark.parametrize(
    ("sample", "complaint"),
    [
        (row({"secret": 13}), "unlucky"),
        (row({"secret": 99}), "'rival' needs a model of its own"),
        (row({"secret": 1, "image": "ubuntu"}), "runs in a container"),
        (row({"secret": 1}, ADD[0]), "the prompt of row 0 is not how its task begins"),
        (row({"secret": "x"}), "valid integer"),
        (Sample(4, "vf", (), "null"), r"extra_info\.verifiers of row 4 is missing"),
    ],
)
def test_what_fails_an_episode(tasksets: None, sample: Sample, complaint: str) -> None:
    with pytest.raises(Exception, match=complaint):
        play(GAME, sample, ["1"])


def test_an_episode_that_is_cut_ends_quietly(tasksets: None) -> None:
    assert not play(GAME, row({"secret": 7}), ["5"])[-1].done


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"taskset": "asyncrl_guesses"}, r"several agents \(player, rival\); name the trained one with role"),
        ({"taskset": "asyncrl_guesses", "role": "judge"}, "no agent 'judge'; there are: player, rival"),
        ({"taskset": "no_such_taskset"}, "no environment of taskset 'no_such_taskset'"),
        ({"taskset": "asyncrl_sums", "arguments": '{"hihg": 3}'}, "hihg"),
        ({"taskset": "asyncrl_sums", "arguments": "3"}, "no environment"),
    ],
)
def test_verifiers_options(tasksets: None, options: Options, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_environment({"verifiers": options})
