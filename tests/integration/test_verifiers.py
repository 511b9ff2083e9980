"""Environments of the real package verifiers, whose agent is the trained model."""

from __future__ import annotations

import asyncio
import json
import runpy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from asyncrl.config import Options
from asyncrl.data.samples import load_samples
from asyncrl.environments import load_environment
from asyncrl.errors import ConfigError
from asyncrl.remote import close_sessions
from asyncrl.types import Message, Observation, Sample, ToolCall
from tests.fakes.environments import play, row, talk
from tests.fakes.loop import settle
from tests.fakes.sglang import scripted

ROOT = Path(__file__).resolve().parents[2]

SUMS_MODULE = '''
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

GUESSES_MODULE = """
import asyncio
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
        if task.data.secret == 51:
            raise SystemExit(3)
        assert agents.player.trainable and not agents.rival.trainable
        if task.data.secret == 99:
            await agents.rival.run(task.with_data(prompt="Hello."))
        while task.data.secret == 50:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                pass
        async with agents.player.interaction(task) as talk:
            said = await talk.turn("Guess.")
            while not said.terminated and said.last_reply != str(task.data.secret):
                said = await talk.turn([{"role": "user", "content": f"Not {said.last_reply}."}])
        talk.trace.record_reward("turns", -0.125 * talk.trace.num_turns)

    async def finalize(self, task, episode):
        for trace in episode.traces:
            trace.record_reward("won", 1.0)
            trace.record_reward("cut", -0.5 if trace.is_truncated else 0.0)

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
    (folder / "asyncrl_sums.py").write_text(SUMS_MODULE)
    (folder / "asyncrl_guesses.py").write_text(GUESSES_MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield


def task(data: Any, *prompt: Message) -> Sample:
    return row(0, *prompt, verifiers=json.dumps(data))


SUM = {"prompt": "1 + 2?", "system_prompt": "Add.", "answer": "3"}
ADD = (Message("system", "Add."), Message("user", "1 + 2?"))


def said(text: str, *calls: ToolCall) -> Message:
    return Message("assistant", text, calls)


SUMS: dict[str, Options] = {"verifiers": {"taskset": "asyncrl_sums"}}
GAME: dict[str, Options] = {"verifiers": {"taskset": "asyncrl_guesses", "role": "player"}}
CALL = ToolCall("calculator_add", '{"a": 1, "b": 2}', "c1")


def test_a_task_with_tools_and_a_rubric(tasksets: None) -> None:
    wrong = ToolCall("calculator_add", '{"a": "x"}', "c2")
    turns = [said("", CALL, wrong, ToolCall("sub", "{}", "c3")), said("3")]
    heard, tools = asyncio.run(talk(SUMS, task(SUM, *ADD), turns))
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
    heard = play(SUMS, task(SUM, *ADD), turns)
    assert heard[-1] == Observation(reward=reward, done=True)


def test_a_task_may_give_the_prompt_itself(tasksets: None) -> None:
    heard = play(SUMS, task(SUM), [])
    assert heard[0].messages == ADD
    heard = play(SUMS, task(SUM, ADD[0]), [])
    assert heard[0].messages == ADD[1:]


def test_an_environment_that_leads(tasksets: None) -> None:
    heard = play(GAME, task({"secret": 7}), [said("5"), said("7")])
    assert [observation.messages[0] for observation in heard[:2]] == [
        Message("user", "Guess."),
        Message("user", "Not 5."),
    ]
    assert heard[2] == Observation(reward=0.75, done=True)
    assert play(GAME, task({"secret": 7}), [said("5"), said("7")]) == heard  # as after a crash


@pytest.mark.parametrize(
    ("sample", "complaint"),
    [
        (task({"secret": 13}), "unlucky"),
        (task({"secret": 51}), "SystemExit: 3"),  # which would end the worker
        (task({"secret": 99}), r"'rival' has no model \(others_url and others_model are not set\)"),
        (task({"secret": 1, "image": "ubuntu"}), "runs in a container"),
        (task({"secret": 1}, ADD[0]), "row 0: the prompt does not match the task's opening messages"),
        (task({"secret": "x"}), "valid integer"),
        (Sample(4, "vf", (), "null"), r"row 4: extra_info\.verifiers is missing"),
    ],
)
def test_what_fails_an_episode(tasksets: None, sample: Sample, complaint: str) -> None:
    with pytest.raises(Exception, match=complaint):
        play(GAME, sample, [said("1")])


def test_a_toolset_with_the_state_of_its_task_is_refused() -> None:
    import verifiers.v1 as vf

    from asyncrl.environments.verifiers_proxy import TaskTools, Unsupported

    class Counted(vf.State):
        count: int = 0

    class Counter(vf.Toolset[vf.ToolsetConfig, Counted]):
        pass

    with pytest.raises(Unsupported, match="Counter shares state with its task; let verifiers run"):
        asyncio.run(TaskTools().add_toolset(Counter(vf.ToolsetConfig()), None))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("plugin", "sample", "turns", "unanswered", "reward"),
    [
        (GAME, task({"secret": 7}), [said("5")], None, 0.375),  # the environment is told, and ends
        (GAME, task({"secret": 7}), [said("5")], said("6"), 0.25),
        (GAME, task({"secret": 7}), [], None, 0.5),
        (SUMS, task(SUM, *ADD), [], said("3"), 2.5),
        (SUMS, task(SUM, *ADD), [], said("", CALL), 0.5),
        (SUMS, task(SUM, *ADD), [said("", CALL)], None, 0.5),
    ],
)
def test_an_episode_that_a_limit_ends_is_scored(
    tasksets: None,
    plugin: dict[str, Options],
    sample: Sample,
    turns: list[Message],
    unanswered: Message | None,
    reward: float,
) -> None:
    async def run() -> float:
        world = load_environment(plugin)()
        await world.reset(sample)
        for turn in turns:
            assert not (await world.step(turn)).done
        earned = await world.cut_short(unanswered)
        await world.close()
        return earned

    assert asyncio.run(run()) == reward


def test_a_step_that_is_cancelled_was_received(tasksets: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time is up while a tool of theirs runs: they score what there is, and are asked for no more."""
    from asyncrl.environments.verifiers_proxy import TaskTools

    async def run(late: bool) -> float:
        busy = asyncio.Event()
        go_on = asyncio.Event()
        call = TaskTools.call

        async def slow(tools: TaskTools, asked: Any) -> Any:
            busy.set()
            await go_on.wait()
            return await call(tools, asked)

        monkeypatch.setattr(TaskTools, "call", slow)
        world = load_environment(SUMS)()
        await world.reset(task(SUM, *ADD))
        step = asyncio.create_task(world.step(said("", CALL)))
        await busy.wait()
        step.cancel()
        await asyncio.wait([step])
        if late:
            go_on.set()
            await settle()  # they have asked for the next turn already
        scoring = asyncio.create_task(world.cut_short(None))
        go_on.set()
        reward = await scoring
        await world.close()
        monkeypatch.undo()
        return reward

    assert [asyncio.run(run(late)) for late in (False, True)] == [0.5, 0.5]


def test_a_limit_before_anybody_asked_costs_nothing(tasksets: None) -> None:
    async def run() -> float:
        world = load_environment(SUMS)()
        with pytest.raises(RuntimeError, match="did not request a turn"):
            await world.step(said("3"))
        return await world.cut_short(None)

    assert asyncio.run(run()) == 0.0


def test_one_that_does_not_end_is_left_behind(tasksets: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.isolation.calls.GRACE_SECONDS", 0.0)
    monkeypatch.setattr("asyncrl.environments.verifiers.GRACE_SECONDS", 0.01)

    async def run() -> None:
        world = load_environment(GAME)()
        reset = asyncio.create_task(world.reset(task({"secret": 50})))
        await settle()
        reset.cancel()
        await asyncio.wait([reset])
        await world.close()

    asyncio.run(run())


def test_tools_whose_replies_nobody_reads_are_not_run(
    tasksets: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from asyncrl.environments.verifiers_proxy import TaskTools

    run: list[ToolCall] = []
    call = TaskTools.call

    async def noted(tools: TaskTools, asked: Any) -> Any:
        run.append(asked)
        return await call(tools, asked)

    async def cut(unanswered: Message) -> None:
        world = load_environment(SUMS)()
        await world.reset(task(SUM, *ADD))
        await world.step(said("", CALL))
        await world.cut_short(unanswered)
        await world.close()

    monkeypatch.setattr(TaskTools, "call", noted)
    asyncio.run(cut(said("", CALL, CALL)))
    assert len(run) == 1


def test_the_environments_own_limit_of_turns(tasksets: None) -> None:
    game = {"verifiers": {**GAME["verifiers"], "config": '{"player": {"max_turns": 2}}'}}
    heard = play(game, task({"secret": 7}), [said("5"), said("6")])
    assert heard[-1] == Observation(reward=0.25, done=True)


def test_it_states_its_own_limit(tasksets: None) -> None:
    assert load_environment(SUMS)().timeout == 120.0
    assert load_environment({"verifiers": {**SUMS["verifiers"], "timeout": 9.0}})().timeout == 9.0


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"taskset": "asyncrl_guesses"}, r"set role to the agent to train \(player, rival\)"),
        (
            {"taskset": "asyncrl_guesses", "role": "judge"},
            "role: unknown agent 'judge'; available: player, rival",
        ),
        ({"taskset": "no_such_taskset"}, "cannot load the environment for taskset 'no_such_taskset'"),
        ({"taskset": "asyncrl_sums", "config": '{"taskset": {"hihg": 3}}'}, "hihg"),
        ({"taskset": "asyncrl_sums", "config": "3"}, "cannot load the environment"),
    ],
)
def test_verifiers_options(tasksets: None, options: Options, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_environment({"verifiers": options})


def with_others(
    options: Options, sample: Sample, turns: Sequence[Message], says: Sequence[str]
) -> tuple[list[Observation], list[Any]]:
    """As `play`, with another model that says these; and what it was sent."""

    async def run() -> tuple[list[Observation], list[Any]]:
        try:
            async with scripted() as script:
                left = iter(says)

                async def answer(request: web.Request) -> web.Response:
                    return web.json_response({"choices": [{"message": {"content": next(left)}}]})

                script.answers["/v1/chat/completions"] = answer
                others = {"others_url": f"{script.url}/v1", "others_model": "somebody"}
                world = load_environment({"verifiers": {**options, **others}})()
                assert world.replay == "no"
                heard = [await world.reset(sample)]
                for turn in turns:
                    heard.append(await world.step(turn))
                return heard, [body["messages"] for _, body, _ in script.requests]
        finally:
            await close_sessions()

    return asyncio.run(run())


def test_another_model_plays_the_user(tasksets: None) -> None:
    """verifiers' own user simulator; the trained model is the assistant."""
    given = {"prompt": "You want the sum of 1 and 2.", "system_prompt": "Add.", "answer": "3"}
    heard, asked = with_others(
        {"taskset": "asyncrl_sums", "env": "user-sim", "role": "assistant"},
        task(given, ADD[0]),
        [said("", CALL), said("Hm."), said("3")],
        ["What is 1 + 2?", "And now?", "###DONE###"],
    )
    assert [observation.messages[0].content for observation in heard[:3]] == [
        "What is 1 + 2?",
        "3",
        "And now?",
    ]
    assert heard[3] == Observation(reward=2.0, done=True)
    assert "You want the sum of 1 and 2." in asked[0][0]["content"]
    assert [message["content"] for message in asked[2][2:]] == ["What is 1 + 2?", "Hm.", "And now?", "3"]


def test_only_the_trained_agent_is_rewarded(tasksets: None) -> None:
    heard, asked = with_others(GAME["verifiers"], task({"secret": 99}), [said("99")], ["Hello, too."])
    assert asked == [[{"role": "user", "content": "Hello."}]]
    assert heard[-1] == Observation(reward=0.875, done=True)


def test_tasks_are_written_as_rows(tasksets: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--taskset", "asyncrl_sums", "--train", "9", "--test", "1", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["prepare", *options])
    runpy.run_path(str(ROOT / "tools" / "prepare_verifiers.py"), run_name="__main__")
    (sample,) = load_samples(tmp_path / "train.parquet")
    assert sample.prompt == (Message("system", "Add."), Message("user", "3 + 4?"))
    heard = play(SUMS, sample, [said("7")])
    assert heard == [Observation(), Observation(reward=2.5, done=True)]
    assert len(load_samples(tmp_path / "test.parquet")) == 1
