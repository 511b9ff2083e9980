"""Prompts with images, against a scripted server; against a real one: tests/sglang/test_images.py."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from asyncrl.engines.base import EngineRefused, Request
from asyncrl.engines.sglang.client import SGLangClient
from asyncrl.engines.sglang.http import ServerApi
from asyncrl.engines.sglang.images import TEXT_ONLY, PromptWriter
from asyncrl.vision.files import image_digest
from asyncrl.vision.image_ids import image_ids
from asyncrl.vision.layout import ImageLayout
from tests.fakes.sglang import DONE, Script, event, scripted, sglang_config

from .tiny import ask

PLACEHOLDER = 9
LAYOUT = ImageLayout(
    placeholder=PLACEHOLDER,
    scaling="qwen",
    patch_size=8,
    merge_size=2,
    temporal_patch_size=2,
    min_pixels=1024,
    max_pixels=65536,
)
FILES = {image_digest(file): file for file in (b"a PNG file", b"a JPEG file \xff")}
PNG_DIGEST, JPEG_DIGEST = FILES
PNG_IDS = image_ids(PNG_DIGEST, 6)
JPEG_IDS = image_ids(JPEG_DIGEST, 4)
LENGTH = {"type": "length", "length": 1}


@asynccontextmanager
async def connected(writer: PromptWriter) -> AsyncIterator[tuple[Script, SGLangClient]]:
    async with scripted() as script:
        client = SGLangClient(ServerApi(script.url), sglang_config(64), vocabulary=64, prompt_writer=writer)
        yield script, client
        await client.close()


def ask_with_images(ids: tuple[int, ...]) -> Request:
    return replace(ask(ids, 1), images=FILES)


async def test_a_server_gets_one_placeholder_and_one_file_for_each_image() -> None:
    ids = (5, *PNG_IDS, 6, *JPEG_IDS, 8, *PNG_IDS, 7)
    async with connected(PromptWriter(LAYOUT)) as (script, client):
        script.streams(event([3], 1, finish=LENGTH, prompt_tokens=len(ids)), DONE)
        generation = await client.generate(ask_with_images(ids))

    assert generation.ids == (3,)
    [(_, body, _)] = script.requests
    assert body["input_ids"] == [5, PLACEHOLDER, 6, PLACEHOLDER, 8, PLACEHOLDER, 7]
    sent_files = [base64.b64decode(text) for text in body["image_data"]]
    assert sent_files == [FILES[PNG_DIGEST], FILES[JPEG_DIGEST], FILES[PNG_DIGEST]]


async def test_a_server_that_scales_images_again_is_refused() -> None:
    ids = (5, *PNG_IDS, 6)
    async with connected(PromptWriter(LAYOUT)) as (script, client):
        script.streams(event([3], 1, finish=LENGTH, prompt_tokens=len(ids) + 2), DONE)
        with pytest.raises(EngineRefused, match="as 10 tokens instead of 8: its image processor scales"):
            await client.generate(ask_with_images(ids))


@pytest.mark.parametrize(
    ("writer", "ids", "reason"),
    [
        (PromptWriter(LAYOUT), (5, PLACEHOLDER, 6, *PNG_IDS), "the token 9, which stands for images"),
        (PromptWriter(LAYOUT), (5, *PNG_IDS[2:], 6), "must begin with the first 4 ids of an image"),
        (PromptWriter(LAYOUT), (5, *image_ids("0" * 29, 4)), f"the file of image {'0' * 29}"),
        (PromptWriter(LAYOUT), (*PNG_IDS, 6), "right at the beginning"),
        (PromptWriter(LAYOUT), (5, *PNG_IDS, *JPEG_IDS), "right after another image"),
        (TEXT_ONLY, (5, *PNG_IDS), "the prompt has images: the model reads text only"),
    ],
    ids=[
        "a placeholder",
        "a cut image",
        "a missing file",
        "an image first",
        "adjacent images",
        "a model of text",
    ],
)
async def test_a_prompt_that_no_server_can_read_is_not_sent(
    writer: PromptWriter, ids: tuple[int, ...], reason: str
) -> None:
    async with connected(writer) as (script, client):
        with pytest.raises(EngineRefused, match=reason):
            await client.generate(ask_with_images(ids))
        assert script.requests == []


async def test_a_scorer_reads_turns_behind_images() -> None:
    """A server names the ids of images 0."""
    ids = (5, *PNG_IDS, 6, 7)
    scored = [[None, 0], *([-9.0, 0] for _ in PNG_IDS[1:]), [-0.5, 6], [-0.25, 7]]
    async with connected(PromptWriter(LAYOUT)) as (script, client):
        meta_info = {"prompt_tokens": len(ids), "input_token_logprobs": scored[-3:]}
        script.says("/generate", 200, msgspec.json.encode({"meta_info": meta_info}))
        scores = await client.read(ids, 2, 0, FILES)
        assert np.frombuffer(scores.logprobs, "<f4").tolist() == [-0.5, -0.25]

        [(_, body, _)] = script.requests
        assert body["input_ids"] == [5, PLACEHOLDER, 6, 7]
        assert body["logprob_start_len"] == len(ids) - 3
