"""Simulated users: scripted ones, and a model behind a real HTTP server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from asyncrl.environments import Environment, load_environment
from asyncrl.errors import ConfigError
from asyncrl.remote import RemoteError, close_sessions
from asyncrl.types import Message, Observation, Sample
from tests.fakes.sglang import Script, scripted

PATH = "/v1/chat/completions"
ASKED = (Message("system", "You sell tickets."), Message("user", "A ticket, please."))


def sample(user: Any, *prompt: Message) -> Sample:
    return Sample(7, "talk", prompt, "null", extra_info_json=json.dumps({"user": user}))


async def talk(world: Environment, sample: Sample, turns: Sequence[str]) -> list[tuple[str, bool]]:
    """What the user says at first and to each turn, and whether it is done."""
    heard = [await world.reset(sample)]
    heard += [await world.step(Message("assistant", turn)) for turn in turns]
    return [(" / ".join(message.content for message in said.messages), said.done) for said in heard]


@pytest.mark.parametrize(
    ("replies", "stop", "turns", "expected"),
    [
        (["a", "b"], "", ["1", "2", "3"], [("", False), ("a", False), ("b", False), ("", True)]),
        ([], "", ["1"], [("", False), ("", True)]),
        (["a", "b"], "bye", ["1", "good bye"], [("", False), ("a", False), ("", True)]),
    ],
)
def test_a_scripted_user_says_its_lines_and_leaves(
    replies: list[str], stop: str, turns: list[str], expected: list[tuple[str, bool]]
) -> None:
    make = load_environment({"scripted_user": {"stop": stop}})
    assert asyncio.run(talk(make(), sample(replies), turns)) == expected
    assert asyncio.run(talk(make(), sample(replies), turns)) == expected  # as after a crash


@pytest.mark.parametrize("user", [None, "a", [1], ["a", ""]])
def test_a_script_is_a_list_of_texts(user: Any) -> None:
    with pytest.raises(ValueError, match=r"row 7: extra_info\.user must be a list of non-empty strings"):
        asyncio.run(load_environment("scripted_user")().reset(sample(user)))


def simulate(
    sample: Sample, turns: Sequence[str], replies: Sequence[str], **options: Any
) -> tuple[list[tuple[str, bool]], Script]:
    """A conversation with a model that answers `replies`, one after the other."""

    async def run() -> tuple[list[tuple[str, bool]], Script]:
        try:
            async with scripted() as script:
                left = iter(replies)

                async def answer(request: Any) -> Any:
                    script.says(PATH, 200, completion(next(left)))
                    script.answers[PATH], said = answer, script.answers[PATH]
                    return await said(request)

                script.answers[PATH] = answer
                plugin = {"simulated_user": {"url": f"{script.url}/v1", "model": "someone", **options}}
                return await talk(load_environment(plugin)(), sample, turns), script
        finally:
            await close_sessions()

    return asyncio.run(run())


def completion(text: str) -> bytes:
    return json.dumps({"choices": [{"message": {"content": text}}]}).encode()


def test_a_simulated_user_lives_its_side_of_the_conversation() -> None:
    said, script = simulate(
        sample("Anna, wants {two} tickets", *ASKED),
        ["How many?", "Done."],
        [" two ", "Thanks. [END]"],
        stop="[END]",
        temperature=0.5,
        max_tokens=9,
    )
    assert said == [("", False), ("two", False), ("Thanks. [END]", True)]
    first, second = [body for _, body, _ in script.requests]
    assert (second["temperature"], second["max_tokens"]) == (0.5, 9)
    play, *lived = second["messages"]
    assert play["role"] == "system"
    assert "Anna, wants {two} tickets" in play["content"] and "[END]" in play["content"]
    assert [(message["role"], message["content"]) for message in lived] == [
        ("assistant", "A ticket, please."),
        ("user", "How many?"),
        ("assistant", "two"),
        ("user", "Done."),
    ]
    assert first["messages"] == second["messages"][:3]


def test_without_a_question_in_the_prompt_the_user_speaks_first() -> None:
    said, script = simulate(sample("Anna", ASKED[0]), ["How many?"], ["A ticket!", "x" * 50], max_chars=5)
    assert said == [("A tic", False), ("xxxxx", False)]
    assert [message["role"] for message in script.requests[0][1]["messages"]] == ["system", "user"]


def test_a_user_who_says_nothing_fails_the_episode() -> None:
    with pytest.raises(ValueError, match="empty reply"):
        simulate(sample("Anna", *ASKED), ["How many?"], ["  "])


def test_a_broken_model_fails_the_episode() -> None:
    async def run() -> Observation:
        try:
            async with scripted() as script:
                script.says(PATH, 400, b"no such model")
                options = {"url": f"{script.url}/v1", "model": "someone"}
                world = load_environment({"simulated_user": options})()
                await world.reset(sample("Anna", *ASKED))
                return await world.step(Message("assistant", "How many?"))
        finally:
            await close_sessions()

    with pytest.raises(RemoteError, match="no such model"):
        asyncio.run(run())


@pytest.mark.parametrize("user", [None, "", ["a"]])
def test_a_scenario_is_a_text(user: Any) -> None:
    with pytest.raises(ValueError, match="must be text that describes the user"):
        simulate(sample(user), [], [])


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"url": "http://x/v1"}, "option 'model' is missing"),
        ({"url": "x", "model": "m"}, "simulated_user: .*x"),
        (
            {"url": "http://x/v1", "model": "m", "api_key_env": "NO_SUCH_KEY"},
            "NO_SUCH_KEY is unset or empty",
        ),
    ],
)
def test_options(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_environment({"simulated_user": options})


def test_what_a_model_said_cannot_be_repeated() -> None:
    assert load_environment({"simulated_user": {"url": "http://x/v1", "model": "m"}})().replay == "no"
