"""Real templates of vision-language models: the ids of images stand where the template writes them, and rows
that are appended to equal the whole conversation."""

from __future__ import annotations

import datetime
import functools
import json
from random import Random

import pytest
from msgspec.structs import replace

from asyncrl.config import RolloutConfig
from asyncrl.conversation.branches import Branches
from asyncrl.conversation.chat import Chat
from asyncrl.conversation.commands import (
    Done,
    EpisodeScored,
    Generate,
    Observed,
    Opened,
    Rules,
    Score,
    TurnGenerated,
)
from asyncrl.conversation.episode import Episode, advance_episode, begin_episode, conversation, resume_episode
from asyncrl.conversation.parsers import load_parser
from asyncrl.conversation.requests import AgentRequest, Placement
from asyncrl.episodes.reward import transcript
from asyncrl.types import (
    IMAGE_MARK,
    EpisodeEnd,
    EpisodeResult,
    Generation,
    ImageRef,
    Message,
    Observation,
    RewardResult,
    Sample,
    StopReason,
    ToolCall,
    VersionSpan,
)
from asyncrl.vision.image_ids import DIGEST_BITS, DIGEST_DIGITS, find_runs
from tests.fakes.layouts import qwen_layout
from tests.fakes.shipped import shipped_tokenizer

QWEN_TEMPLATES = (
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
# Templates of models whose images asyncrl does not read; their content is a list, also without images.
CONTENT_LIST_TEMPLATES = ("trl/idefics3", "trl/llava_next", "trl/smolvlm")
PLACEHOLDERS = dict.fromkeys(QWEN_TEMPLATES, "<|image_pad|>") | dict.fromkeys(
    CONTENT_LIST_TEMPLATES, "<image>"
)
# All tokens that the templates write for an image, by placeholder.
IMAGE_TOKENS = {"<|image_pad|>": "<|vision_start|><|image_pad|><|vision_end|>", "<image>": "<image>"}
SIDES = (56, 84, 112)  # pixels
SEEDS = 20

every_template = pytest.mark.parametrize("name", PLACEHOLDERS)


@functools.cache
def chat_of(name: str) -> Chat:
    tokenizer = shipped_tokenizer(name)
    placeholder = tokenizer.convert_tokens_to_ids(PLACEHOLDERS[name])
    layout = replace(
        qwen_layout(placeholder, patch_size=14, min_side=56, max_side=112),
        video_placeholder=tokenizer.get_vocab().get("<|video_pad|>"),
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


@every_template
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


@every_template
def test_images_of_tools_are_written(name: str) -> None:
    chat = chat_of(name)
    image = ImageRef("1" * DIGEST_DIGITS, 56, 56)
    call = ToolCall("look", "{}", "call_0")
    reply = Message("tool", f"here {IMAGE_MARK}", tool_call_id="call_0", name="look", images=(image,))
    messages = (Message("user", "What is there?"), Message("assistant", "", (call,)), reply)
    assert runs_in(chat.prompt_ids(messages)) == [(image.digest, 4)]


@every_template
def test_a_sampled_placeholder_of_an_image_or_a_video_ends_the_turn(name: str) -> None:
    chat = chat_of(name)
    assert chat.image_layout is not None
    placeholders = chat.image_layout.placeholders
    assert len(placeholders) == (2 if name in QWEN_TEMPLATES else 1)
    for placeholder in placeholders:
        assert placeholder in chat.stop_ids and chat.is_placeholder(placeholder)


@pytest.mark.parametrize("medium", ["image", "video"])
@pytest.mark.parametrize("begin", ["", "It is ", '<tool_call>{"name": "look", "arguments": {}}</tool_call>'])
def test_a_sampled_placeholder_ends_the_episode(begin: str, medium: str) -> None:
    """After a turn and an answer with an image. The row keeps the sampled token, which stands for no image,
    and a call before the token is not run."""
    chat = chat_of("trl/qwen2_5_vl")
    assert chat.image_layout is not None
    placeholder = dict(zip(("image", "video"), chat.image_layout.placeholders, strict=True))[medium]
    rules = Rules(chat, load_parser("hermes"), RolloutConfig(max_turns=8, environment="fake"))
    image = ImageRef("1" * DIGEST_DIGITS, 56, 56)
    question = Message("user", f"What is {IMAGE_MARK}?", images=(image,))
    other_image = ImageRef("2" * DIGEST_DIGITS, 84, 56)
    hint = Message("user", f"like {IMAGE_MARK}", images=(other_image,))
    sample = Sample(0, "test", (question,), "a cat")
    schema = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}

    def advance(episode: Episode, text: str, stop_id: int) -> Episode:
        ids = (*chat.text_ids(text, beginning=False), stop_id)
        generation = Generation(ids, (-0.5,) * len(ids), (VersionSpan(0, len(ids), 1, 1),), StopReason.STOP)
        return advance_episode(rules, episode, TurnGenerated(generation))

    opened = Opened((json.dumps(schema),))
    episode = advance_episode(rules, begin_episode(sample), opened)
    episode = advance(episode, "I see.", chat.stop_ids[0])
    episode = advance_episode(rules, episode, Observed(Observation((hint,))))
    generate = episode.command
    assert isinstance(generate, Generate)
    episode = advance(episode, begin, placeholder)

    answer = begin.strip() if "<" not in begin else ""
    assert episode.command == Score(answer, EpisodeEnd.IMAGE_TOKEN)
    assert not EpisodeEnd.IMAGE_TOKEN.truncated, "the policy is rewarded for it"
    (row,) = episode.rows
    assert row == (*generate.ids, *chat.text_ids(begin, beginning=False), placeholder)
    assert row == tuple(token for turn in episode.turns for token in (*turn.context, *turn.generation.ids))
    assert runs_in(row) == expected_runs(chat, (question, hint)), "the sampled token is no image"
    assert conversation(rules, episode)[-1].content == answer
    assert resume_episode(rules, sample, opened, episode.turns) == episode

    # A reward reads a token for each image, not the sampled one.
    text = transcript(rules, episode.turns)
    assert (text.count(chat.image_token), text.count("video_pad")) == (2, 0)
    assert chat.image_token == PLACEHOLDERS["trl/qwen2_5_vl"]

    tokens = sum(len(turn.generation.ids) for turn in episode.turns)
    done = advance_episode(rules, episode, EpisodeScored(RewardResult(1.0))).command
    assert done == Done(EpisodeResult(1.0, tokens, (0.0, 1.0), end=EpisodeEnd.IMAGE_TOKEN))


@pytest.mark.parametrize("medium", ["", "image", "video"])
def test_an_agent_goes_on_in_a_new_row_after_a_sampled_placeholder(medium: str) -> None:
    """So that no prompt has a token that stands for no image."""
    chat = chat_of("trl/qwen2_5_vl")
    assert chat.image_layout is not None
    placeholders = dict(zip(("image", "video"), chat.image_layout.placeholders, strict=True))
    branches = Branches(Rules(chat, load_parser("hermes"), RolloutConfig(max_turns=8)))
    images = tuple(ImageRef(digit * DIGEST_DIGITS, 56, 56) for digit in "12")
    question, hint = (Message("user", f"see {IMAGE_MARK}", images=(image,)) for image in images)

    placement = branches.place_request(AgentRequest((question,), ()))
    assert isinstance(placement, Placement)
    ids = (*chat.text_ids("It is", beginning=False), placeholders.get(medium, chat.stop_ids[0]))
    generation = Generation(ids, (-0.5,) * len(ids), (VersionSpan(0, len(ids), 1, 1),), StopReason.STOP)
    message = branches.add_turn(placement, branches.next_turn(placement, generation))
    assert message.content == "It is"

    placement = branches.place_request(AgentRequest((question, message, hint), ()))
    assert isinstance(placement, Placement)
    assert placement.row == (None if medium else 0)
    assert placement.ids == chat.prompt_ids((question, message, hint))
    assert not {*placement.ids} & {*placeholders.values()}


@every_template
def test_tokens_of_images_in_texts_are_text(name: str) -> None:
    """In texts of all roles, in arguments, also where JSON escapes them, and in schemas of tools."""
    chat = chat_of(name)
    literal = IMAGE_TOKENS[PLACEHOLDERS[name]]
    escaped = literal.replace("<", "\\u003c")

    def conversation(text: str, escaped_text: str) -> tuple[tuple[Message, ...], tuple[str, ...]]:
        calls = (
            ToolCall("look", f'{{"{text}": ["{text}"]}}', "call_0"),
            ToolCall("look", f'{{"at": "{escaped_text}"}}', "call_1"),
        )
        image = ImageRef("1" * DIGEST_DIGITS, 56, 56)
        messages = (
            Message("system", text),
            Message("user", f"{text}{IMAGE_MARK}{text}", images=(image,)),
            Message("assistant", text, calls),
            Message("tool", text, tool_call_id="call_0", name="look"),
            Message("tool", text, tool_call_id="call_1", name="look"),
        )
        schema = {"name": "look", "description": text, "parameters": {"type": "object"}}
        return messages, (json.dumps({"type": "function", "function": schema}),)

    row = chat.prompt_ids(*conversation(literal, escaped))
    assert runs_in(row) == [("1" * DIGEST_DIGITS, 4)]
    broken = literal.replace("<", "< ")
    assert row == chat.prompt_ids(*conversation(broken, broken))

    reply = Message("user", literal)
    assert chat.delta_ids((reply,), chat.stop_ids[0], ()) == chat.delta_ids(
        (Message("user", broken),), chat.stop_ids[0], ()
    )
    question = (Message("user", "q"),)
    turn = chat.turn_ids(question, Message("assistant", literal))
    assert turn == chat.turn_ids(question, Message("assistant", broken))
    prompt = chat.prompt_ids((*question, Message("assistant", literal)))
    assert prompt == chat.prompt_ids((*question, Message("assistant", broken)))
