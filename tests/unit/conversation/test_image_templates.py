"""Real templates of vision-language models: the ids of images stand where the template writes them, and rows
that are appended to equal the whole conversation."""

from __future__ import annotations

import datetime
import functools
from random import Random

import pytest

from asyncrl.conversation.chat import Chat
from asyncrl.errors import ConfigError
from asyncrl.types import IMAGE_MARK, ImageRef, Message, ToolCall
from asyncrl.vision.image_ids import DIGEST_BITS, DIGEST_DIGITS, find_runs
from asyncrl.vision.layout import ImageLayout
from tests.fakes.shipped import shipped_tokenizer

TEMPLATES = (
    "axolotl/qwen2_vl",
    "llama.cpp/Qwen3.5-4B",
    "trl/qwen2_5_vl",
    "trl/qwen2_5_vl_training",
    "trl/qwen3_5_nothink_training",
    "trl/qwen3_5_think_training",
    "trl/qwen3_6_training",
    "trl/qwen3_vl",
    "trl/qwen3_vl_training",
)
PLACEHOLDER = "<|image_pad|>"
SIDES = (56, 84, 112)  # pixels
SEEDS = 20


@functools.cache
def chat_of(name: str) -> Chat:
    tokenizer = shipped_tokenizer(name)
    layout = ImageLayout(
        placeholder=tokenizer.convert_tokens_to_ids(PLACEHOLDER),
        scaling="qwen",
        patch_size=14,
        merge_size=2,
        temporal_patch_size=2,
        min_pixels=56 * 56,
        max_pixels=112 * 112,
    )
    return Chat(tokenizer, datetime.date(2026, 1, 31), image_layout=layout)


def random_message(random: Random, role: str, **fields: str) -> Message:
    """A message of texts and up to two images."""
    images = tuple(
        ImageRef(f"{random.getrandbits(DIGEST_BITS):0{DIGEST_DIGITS}x}", *random.choices(SIDES, k=2))
        for _ in range(random.randint(0, 2))
    )
    parts = [random.choice(("see", "and this.", "42")) for _ in range(len(images) + 1)]
    return Message(role, IMAGE_MARK.join(parts), images=images, **fields)


def expected_runs(chat: Chat, messages: tuple[Message, ...]) -> list[tuple[str, int]]:
    assert chat.image_layout is not None
    return [
        (image.digest, chat.image_layout.run_length(image.height, image.width))
        for message in messages
        for image in message.images
    ]


def runs_in(ids: tuple[int, ...]) -> list[tuple[str, int]]:
    return [(run.digest, run.end - run.start) for run in find_runs(ids)]


@pytest.mark.parametrize("name", TEMPLATES)
def test_rows_have_the_images_of_the_conversation(name: str) -> None:
    chat = chat_of(name)
    appended_count = 0
    for seed in range(SEEDS):
        random = Random(seed)
        messages: tuple[Message, ...] = (Message("system", "Look."), random_message(random, "user"))
        row = chat.prompt_ids(messages)
        assert runs_in(row) == expected_runs(chat, messages)

        for _ in range(3):
            turn = Message("assistant", random.choice(("It is 42.", "No.")))
            reply = random_message(random, "user")
            history = (*messages, turn)
            delta = chat.delta_ids((reply,), chat.stop_ids[0], history)
            messages = (*history, reply)
            if delta is None:  # the template rewrites: a new row
                row = chat.prompt_ids(messages)
            else:
                row += chat.turn_ids(history[:-1], turn) + delta
                appended_count += 1
            assert runs_in(row) == expected_runs(chat, messages)
            if delta is not None:
                assert row == chat.prompt_ids(messages)
    assert appended_count or "think" in name or "Qwen3.5" in name or "3_6" in name


@pytest.mark.parametrize("name", TEMPLATES)
def test_images_of_tools_are_written(name: str) -> None:
    chat = chat_of(name)
    image = ImageRef("1" * DIGEST_DIGITS, 56, 56)
    call = ToolCall("look", "{}", "call_0")
    reply = Message("tool", f"here {IMAGE_MARK}", tool_call_id="call_0", name="look", images=(image,))
    messages = (Message("user", "What is there?"), Message("assistant", "", (call,)), reply)
    assert runs_in(chat.prompt_ids(messages)) == [(image.digest, 4)]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_placeholder_in_a_text_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="remove image tokens from the text"):
        chat_of(name).prompt_ids((Message("user", f"see {PLACEHOLDER}"),))
