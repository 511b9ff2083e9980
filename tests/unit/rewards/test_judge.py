"""A judge behind a real local server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from asyncrl.episodes.reward import EpisodeReward
from asyncrl.errors import ConfigError
from asyncrl.rewards import RewardError, RewardInput, load_rewards
from asyncrl.types import IMAGE_MARK, ImageRef, Message, Sample
from tests.fakes.sglang import Script, scripted

PATH = "/v1/chat/completions"
SAMPLE = Sample(
    0,
    "trivia",
    (Message("system", "Be brief."), Message("user", "Capital of {France}?")),
    '"Paris"',
    extra_info_json='{"hint": "Seine"}',
)
GIVEN = RewardInput(SAMPLE, "It is Paris.", transcript="<user>…")


def judged(
    judge_text: str, status: int = 200, episode: RewardInput = GIVEN, **options: Any
) -> tuple[float | str, list[Any]]:
    """The score, or the text of the error, and the prompts that the judge was sent."""

    async def main() -> tuple[float | str, list[Any]]:
        async with scripted() as script:
            answer(script, judge_text, status)
            plugin = {"llm_judge": {"url": f"{script.url}/v1", "model": "judge", "retries": 0, **options}}
            episode_reward = EpisodeReward(load_rewards(plugin), 30.0)
            try:
                score: float | str = (await episode_reward.score_episode(episode)).score
            except RewardError as error:
                score = str(error)
            finally:
                await episode_reward.close()
            return score, [body["messages"] for _, body, _ in script.requests]

    return asyncio.run(main())


def answer(script: Script, judgement: str, status: int) -> None:
    body = {"choices": [{"message": {"role": "assistant", "content": judgement}}]}
    script.says(PATH, status, json.dumps(body).encode())


@pytest.mark.parametrize(
    ("judge_text", "options", "score"),
    [
        ("It agrees.\nScore: 10", {}, 1.0),
        ("Score: 3 at first. **Score:** 7.5/10", {}, 0.75),
        ("Score: 12", {}, 1.0),
        ("Score: -2", {}, 0.0),
        ("Score: 4", {"scale": 5}, 0.8),
        ("[[2]] or [[1]]", {"score": r"\[\[(\d)\]\]", "scale": 2}, 0.5),
        ("grade A: 1", {"score": r"grade (A|B): (\d)"}, "ValueError: could not convert"),
        ("I will not say.", {}, "ValueError: the judge's answer contains no score: 'I will not say.'"),
    ],
)
def test_the_number_that_the_judge_writes(
    judge_text: str, options: dict[str, Any], score: float | str
) -> None:
    result, _ = judged(judge_text, **options)
    assert result == score or (isinstance(score, str) and str(result).startswith(score))


def test_a_judge_that_fails_is_a_reward_error() -> None:
    result, requests = judged("", status=500)
    assert str(result).startswith("http://127.0.0.1") and "status 500" in str(result)
    assert len(requests) == 1


def test_the_prompt(tmp_path: Path) -> None:
    _, ((message,),) = judged("Score: 1")
    assert message["role"] == "user"
    for part in ("Question:\nCapital of {France}?", "Reference:\nParis", "Answer:\nIt is Paris.", "to 10 "):
        assert part in message["content"]
    file = tmp_path / "prompt.txt"
    file.write_text("{{ extra_info.hint }}|{{ data_source }}|{{ transcript }}|{{ scale }}\n")
    _, ((message,),) = judged("Score: 1", prompt=str(file), scale=5)
    assert message["content"] == "Seine|trivia|<user>…|5\n"


def test_the_prompt_has_notes_in_place_of_images() -> None:
    """A token of images would fail the request to a server that reads images."""
    image = ImageRef("0" * 29, 32, 32)
    question = Message("user", f"{IMAGE_MARK} and {IMAGE_MARK}?", images=(image, image))
    episode = RewardInput(
        replace(SAMPLE, prompt=(question,), extra_info_json='{"steps": ["see |image|"]}'),
        "a |image|",
        (question, Message("assistant", "a |image|")),
        transcript="<user>|image| and |image|?<end>a |image|",
        image_token="|image|",
    )
    template = "{{ question }} / {{ transcript }} / {{ answer }} / {{ extra_info.steps[0] }}"
    _, ((message,),) = judged("Score: 1", episode=episode, prompt=template)
    assert message["content"] == (
        "[image] and [image]? / <user>[image] and [image]?<end>a [image] / a [image] / see [image]"
    )


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"prompt": "{{ answr }}"}, "unknown variable 'answr' in the prompt; available: answer, "),
        ({"prompt": "{{ answer"}, "not a valid Jinja template"),
        ({"prompt": "missing.txt"}, "'missing.txt' cannot be read"),
        ({"score": "("}, "is not a valid regular expression"),
        ({"score": "Score"}, "has no group"),
        ({"scale": 0}, "scale"),
        ({"url": "localhost"}, "must begin with http"),
        ({"api_key_env": "NO_SUCH_KEY"}, "NO_SUCH_KEY is unset or empty"),
        ({"modle": "x"}, "unknown option 'modle'"),
    ],
)
def test_bad_options_are_reported_before_anything_runs(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        load_rewards({"llm_judge": {"url": "http://x", "model": "m", **options}})
    assert "rollout.reward.llm_judge" in str(caught.value)
