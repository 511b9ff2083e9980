"""Reward models: a tiny random classifier, and SGLang's route on a local server."""

from __future__ import annotations

import asyncio
import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from asyncrl.episodes.reward import EpisodeReward
from asyncrl.errors import ConfigError
from asyncrl.remote import scorer_url
from asyncrl.rewards import RewardError, RewardInput, load_rewards
from asyncrl.rewards.base import trl_arguments, verl_arguments
from asyncrl.rewards.models import _conversation, normalised_output
from asyncrl.types import IMAGE_MARK, FailReason, ImageRef, Message, Sample, ToolCall
from asyncrl.vision.content import IMAGE_NOTE
from tests.fakes.loop import settle
from tests.fakes.servers import Servers, entry
from tests.fakes.sglang import scripted

DEMO = Path(__file__).parents[3] / "examples/multiturn/calculator/model"
GIVEN = RewardInput(
    Sample(0, "s", (Message("user", "1 + 1?"),), '"2"'),
    "2",
    (Message("user", "1 + 1?"), Message("assistant", "let me see"), Message("assistant", "2")),
)
QUESTION = Message("user", f"see {IMAGE_MARK} + 1?", images=(ImageRef("0" * 29, 32, 32),))
LOOK = Message("tool", IMAGE_MARK, images=(ImageRef("1" * 29, 32, 32),))
GIVEN_IMAGES = RewardInput(
    Sample(0, "s", (QUESTION,), '"2"'),
    "2",
    (QUESTION, Message("assistant", "let me see"), LOOK, Message("assistant", "2")),
)
SPELLED_TOKEN = "<|image_pad|>"  # by the policy
GIVEN_SPELLED_TOKENS = replace(
    GIVEN_IMAGES,
    answer=SPELLED_TOKEN,
    messages=(
        QUESTION,
        Message(
            "assistant",
            SPELLED_TOKEN,
            (ToolCall(SPELLED_TOKEN, f'{{"at": "{SPELLED_TOKEN}"}}', SPELLED_TOKEN),),
            reasoning=SPELLED_TOKEN,
        ),
        Message("tool", SPELLED_TOKEN, tool_call_id=SPELLED_TOKEN, name=SPELLED_TOKEN),
    ),
    image_token=SPELLED_TOKEN,
)
NOTED = [
    {"role": "user", "content": f"see {IMAGE_NOTE} + 1?"},
    {"role": "assistant", "content": "let me see"},
    {"role": "tool", "content": IMAGE_NOTE},
    {"role": "assistant", "content": "2"},
]


@pytest.mark.parametrize(
    ("values", "label", "normalise", "expected"),
    [
        ([1.5], 0, "none", 1.5),
        ([0.0, 3.0], 1, "none", 3.0),
        ([0.0], 0, "sigmoid", 0.5),
        ([-2000.0], 0, "sigmoid", 0.0),
        ([math.log(3.0), 0.0], 0, "softmax", pytest.approx(0.75)),
        ([1000.0, 0.0], 1, "softmax", 0.0),
    ],
)
def test_picked(values: list[float], label: int, normalise: Any, expected: float) -> None:
    assert normalised_output(values, label, normalise) == expected


def test_a_label_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="label 2 is too high: the model's last label is 1"):
        normalised_output([0.0, 1.0], 2, "none")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(DEMO, local_files_only=True)


def save_classifier(path: Path, tokenizer: Any) -> Any:
    """Save a tiny random classifier with two labels, and return the model."""
    import torch
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, num_labels=2, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForSequenceClassification(config).eval()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return model


def test_a_local_classifier(tmp_path: Path, tokenizer: Any) -> None:
    import torch

    model = save_classifier(tmp_path, tokenizer)
    conversation = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    ids = torch.tensor([tokenizer.apply_chat_template(conversation, return_dict=False)])
    with torch.inference_mode():
        expected = model(input_ids=ids).logits[0].tolist()
    (reward,) = load_rewards({"classifier": {"path": str(tmp_path), "label": 1}})
    assert reward.location == "one_process"
    reward.load()
    assert reward.function(GIVEN) == pytest.approx(expected[1], abs=1e-6)
    cut = load_rewards({"classifier": {"path": str(tmp_path), "label": 1, "max_tokens": 3}})[0]
    cut.load()
    with torch.inference_mode():
        last = model(input_ids=ids[:, -3:]).logits[0].tolist()
    assert cut.function(GIVEN) == pytest.approx(last[1], abs=1e-6)


@pytest.mark.parametrize("of", ["answer", "messages"])
@pytest.mark.parametrize("has_template", [True, False])
def test_a_classifier_reads_notes_in_place_of_images(
    tmp_path: Path, tokenizer: Any, has_template: bool, of: str
) -> None:
    import torch

    noted = NOTED if of == "messages" else [NOTED[0], NOTED[-1]]
    if has_template:
        ids = tokenizer.apply_chat_template(noted, return_dict=False)
    else:
        tokenizer = copy.copy(tokenizer)
        tokenizer.chat_template = None
        ids = tokenizer("\n".join(message["content"] for message in noted[:-1]), "2").input_ids

    model = save_classifier(tmp_path, tokenizer)
    (reward,) = load_rewards({"classifier": {"path": str(tmp_path), "of": of}})
    reward.load()
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([ids])).logits[0, 0].item()
    assert reward.function(GIVEN_IMAGES) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("scored_text", ["answer", "messages"])
def test_a_token_of_images_that_the_policy_spells_becomes_a_note(scored_text: Any) -> None:
    """The server would look for an image at the token."""
    messages = json.dumps(_conversation(GIVEN_SPELLED_TOKENS, scored_text))
    assert SPELLED_TOKEN not in messages
    assert messages.count(IMAGE_NOTE) == (2 if scored_text == "answer" else 9)


async def test_a_served_reward_model_reads_notes_in_place_of_images(tokenizer: Any) -> None:
    async with scripted() as script:
        script.says("/classify", 200, json.dumps({"embedding": [0.25]}).encode())
        options = {"url": script.url, "tokenizer": str(DEMO), "of": "messages", "retries": 0}
        episode_reward = EpisodeReward(load_rewards({"reward_model": options}), 60.0)
        try:
            assert (await episode_reward.score_episode(GIVEN_IMAGES)).score == 0.25
        finally:
            await episode_reward.close()
    ids = tokenizer.apply_chat_template(NOTED, return_dict=False)
    assert script.requests == [("/classify", {"input_ids": ids}, "")]


def test_functions_get_the_images_of_messages() -> None:
    """By digest in OpenAI's shape, and as they are in a RewardInput."""
    parts = [
        {"type": "text", "text": "see "},
        {"type": "image", "image": "0" * 29},
        {"type": "text", "text": " + 1?"},
    ]
    image_messages = [
        {"role": "user", "content": parts},
        NOTED[1],
        {"role": "tool", "content": [{"type": "image", "image": "1" * 29}]},
        NOTED[3],
    ]
    episode = replace(GIVEN_IMAGES, transcript="see <|image_pad|>", image_token="<|image_pad|>")
    extra_info = verl_arguments(episode)["extra_info"]
    assert (extra_info["messages"], extra_info["transcript"]) == (image_messages, "see <|image_pad|>")
    trl = trl_arguments(episode)
    assert [trl["prompts"], trl["completions"]] == [[image_messages[:1]], [image_messages[1:]]]


async def test_sglangs_reward_model(tokenizer: Any) -> None:
    async with scripted() as script:
        script.says("/classify", 200, json.dumps({"embedding": [0.25], "meta_info": {}}).encode())
        options = {"url": script.url, "tokenizer": str(DEMO), "of": "messages", "retries": 0}
        episode_reward = EpisodeReward(load_rewards({"reward_model": options}), 60.0)
        try:
            results = await asyncio.gather(*(episode_reward.score_episode(GIVEN) for _ in range(3)))
            assert [result.score for result in results] == [0.25] * 3
            conversation = [{"role": message.role, "content": message.content} for message in GIVEN.messages]
            ids = tokenizer.apply_chat_template(conversation, return_dict=False)
            assert script.requests == [("/classify", {"input_ids": ids}, "")] * 3
            script.says("/classify", 200, b'{"embedding": "none"}')
            with pytest.raises(RewardError, match="the answer is not from a reward model"):
                await episode_reward.score_episode(GIVEN)
            script.says("/classify", 400, b'{"error": "no reward model"}')
            with pytest.raises(RewardError, match="status 400"):
                await episode_reward.score_episode(GIVEN)
        finally:
            await episode_reward.close()


async def test_a_scorer_of_the_run_scores_each_turn_and_may_be_lost(tmp_path: Path) -> None:
    """The class is the one in docs/guides/rewards.md."""
    example = (DEMO.parents[3] / "docs/guides/rewards.md").read_text().partition("class EachTurn")
    code = example[0].rpartition("```python\n")[2] + example[1] + example[2].partition("```")[0]
    (tmp_path / "process.py").write_text(code)
    named = {f"{tmp_path}/process.py:EachTurn": {"url": "scorer:reward", "tokenizer": str(DEMO)}}
    episode = replace(GIVEN, turns=2)
    reward = EpisodeReward(load_rewards(named), 60.0)
    async with scripted() as script:
        script.says("/classify", 200, json.dumps({"embedding": [0.25]}).encode())
        try:
            with pytest.raises(
                RewardError, match="only the workers of a run know the scorer's address"
            ) as caught:
                await reward.score_episode(episode)
            assert caught.value.reason is FailReason.REWARD_ERROR
            servers = Servers("an engine", lane="reward")
            scorer_url.set(lambda name: servers.pool.url())
            scoring = asyncio.create_task(reward.score_episode(episode))
            await settle()
            assert not script.requests
            servers.tell(entry("reward", url=script.url, lane="reward"))
            assert (await scoring).turns == (0.25, 0.25) and len(script.requests) == 2
            script.says("/classify", 503)
            lost = EpisodeReward(load_rewards({"reward_model": {**named.popitem()[1], "retries": 0}}), 60.0)
            with pytest.raises(RewardError, match="status 503") as caught:
                await lost.score_episode(episode)
            assert caught.value.reason is FailReason.ENGINE_LOST
        finally:
            await reward.close()


def test_directories_are_looked_for_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="classifier: path: no such directory"):
        load_rewards({"classifier": {"path": f"{tmp_path}/x"}})
    with pytest.raises(ConfigError, match="reward_model: tokenizer: no such directory"):
        load_rewards({"reward_model": {"url": "http://x", "tokenizer": f"{tmp_path}/x"}})
