"""Bad images at every door: each is refused in one line that says what is wrong."""

from __future__ import annotations

import base64
import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import PIL.Image
import pytest

from asyncrl import ImageFile
from asyncrl.data.images import ImagePreparer
from asyncrl.environments import image_observation
from asyncrl.errors import ConfigError
from asyncrl.gateway import completions, messages, responses
from asyncrl.gateway.exchange import Exchange
from asyncrl.gateway.images import RequestImages
from asyncrl.tools.mcp import result_content
from asyncrl.types import Message, Observation, Sample
from asyncrl.vision.files import ImageError
from asyncrl.vision.layout import read_image_layout
from tests.fakes.chat import IMAGE_LAYOUT, FakeChat
from tests.fakes.episodes import TurnBench
from tests.fakes.image_data import animated_file, encode_image, image_file, noise
from tests.unit.gateway.test_request_images import chat_body, messages_body, responses_body
from tests.unit.rollout.test_turn_player import Game, nothing
from tests.unit.tools.test_tool_images import call, play, returning

PNG = image_file(64, 48)
NOISE = encode_image(PIL.Image.fromarray(noise(48, 64)))
BAD_FILES = {
    "truncated": (NOISE[: len(NOISE) // 2], "the image file is damaged"),
    "truncated early": (PNG[: len(PNG) // 2], "the image file is damaged"),
    "wide": (image_file(20_000, 1), "a side may have at most 16384"),
    "large": (image_file(8_000, 8_000, 0, mode="1"), "more than the allowed 32,000,000"),
    "animated GIF": (animated_file("GIF"), "only still images are allowed"),
    "animated PNG": (animated_file("PNG"), "only still images are allowed"),
    "no image": (b"%PDF-1.7 and so on", "not an image file of a supported format"),
    "empty": (b"", "not an image file of a supported format"),
}


def data_error(file: bytes) -> str:
    """The error before the start of a run whose data have the file."""
    with (
        tempfile.TemporaryFile() as stored_file,
        ImagePreparer(stored_file, lambda: IMAGE_LAYOUT) as preparer,
    ):
        image = preparer.submit("train.parquet, sample 0", file)
        samples = preparer.with_final_images([Sample(0, "", (Message("user", "?", images=(image,)),), "")])
        with pytest.raises(ConfigError) as raised:
            list(samples)
    return str(raised.value)


def tool_error(file: bytes) -> str:
    """What the model reads of a tool that returns the file."""
    (reply,), episode_images = play([returning(ImageFile(file))], call("show"))
    assert reply.failed and not episode_images
    return reply.content


def mcp_error(file: bytes) -> str:
    """What the model reads of an MCP server that returns the file."""
    from mcp.types import CallToolResult

    block = {"type": "image", "data": base64.b64encode(file).decode(), "mimeType": "image/png"}
    result = CallToolResult.model_validate({"content": [block]})
    (reply,), episode_images = play([returning(result_content(result))], call("show"))
    assert reply.failed and not episode_images
    return reply.content


def environment_error(file: bytes) -> str:
    """How the episode of an environment that shows the file fails."""

    class Broken(Game):
        async def step(self, message: Message) -> Observation:
            return image_observation(ImageFile(file))

    return TurnBench(["7"], nothing, Broken, chat=FakeChat(image_layout=IMAGE_LAYOUT)).failed().detail


def request_error(
    read: Callable[[bytes, RequestImages], Exchange], body: Callable[[str], dict[str, Any]], file: bytes
) -> str:
    """The error that an agent gets that sends the file."""
    request = json.dumps(body(base64.b64encode(file).decode())).encode()
    with pytest.raises(ImageError) as raised:
        read(request, RequestImages(IMAGE_LAYOUT))
    return str(raised.value)


DOORS: dict[str, Callable[[bytes], str]] = {
    "data": data_error,
    "tool": tool_error,
    "mcp": mcp_error,
    "environment": environment_error,
    "chat": partial(request_error, completions.read, chat_body),
    "responses": partial(request_error, responses.read, responses_body),
    "messages": partial(request_error, messages.read, messages_body),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_image_is_refused_in_one_line(name: str, door: str) -> None:
    file, complaint = BAD_FILES[name]
    text = DOORS[door](file)
    assert complaint in text and "\n" not in text


def test_a_missing_processor_is_named(tmp_path: Path) -> None:
    config = {"model_type": "qwen3_vl", "vision_config": {"patch_size": 16}, "image_token_id": 5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"image processor is missing; copy preprocessor_config\.json"):
        read_image_layout(str(tmp_path))
