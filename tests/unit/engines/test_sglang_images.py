"""Prompts with images, against a scripted server; against a real one: tests/sglang/test_images.py."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from asyncrl.config import parse
from asyncrl.engines.base import EngineRefused, Request
from asyncrl.engines.sglang import transport
from asyncrl.engines.sglang.client import SGLangClient
from asyncrl.engines.sglang.http import ServerApi
from asyncrl.engines.sglang.images import TEXT_ONLY, PromptWriter
from asyncrl.episodes.image_checks import check_images
from asyncrl.errors import ConfigError
from asyncrl.vision.files import image_digest
from asyncrl.vision.image_ids import image_ids
from asyncrl.vision.layout import ImageLayout
from tests.fakes.image_data import write_image_processor
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


@pytest.mark.parametrize("file_step", [3, 6, 1 << 20])
async def test_the_files_of_a_request_are_encoded_in_steps(
    file_step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Encoding holds Python's lock, and so stops the event loop."""
    encoded_lengths: list[int] = []

    def encode(part: bytes) -> bytes:
        encoded_lengths.append(len(part))
        return base64.b64encode(part)

    monkeypatch.setattr(transport, "FILE_STEP", file_step)
    monkeypatch.setattr(transport, "base64", SimpleNamespace(b64encode=encode))
    files = [bytes(range(length)) for length in (1, 2, 3, 5, 6, 7, 12, 13)]
    body = {"input_ids": (1, 2), "image_data": files, "return_logprob": True}

    async with scripted() as script:
        script.says("/generate", 200, b"{}")
        api = ServerApi(script.url)
        await api.generate_whole(body)
        await api.generate_whole({"input_ids": (1, 2), "image_data": []})
        await api.close()

    sent_body, sent_text_body = (request[1] for request in script.requests)
    assert [base64.b64decode(text) for text in sent_body.pop("image_data")] == files
    assert sent_body == {"input_ids": [1, 2], "return_logprob": True}
    assert sent_text_body == {"input_ids": [1, 2], "image_data": []}
    assert sum(encoded_lengths) == sum(map(len, files))
    assert max(encoded_lengths) <= file_step


async def test_the_log_probs_of_a_row_with_images_are_taken_by_position() -> None:
    """A server names the ids of images 0."""
    ids = (5, *PNG_IDS, 6, 7)
    scored = [[None, 5], *([-9.0, 0] for _ in PNG_IDS), [-0.5, 6], [-0.25, 7]]
    async with connected(PromptWriter(LAYOUT)) as (script, client):
        meta_info = {"prompt_tokens": len(ids), "input_token_logprobs": scored}
        script.says("/generate", 200, msgspec.json.encode({"meta_info": meta_info}))
        logprobs = await client.score(ids, FILES)

    assert logprobs == (*(-9.0 for _ in PNG_IDS), -0.5, -0.25)
    [(_, body, _)] = script.requests
    assert body["input_ids"] == [5, PLACEHOLDER, 6, 7]
    assert [base64.b64decode(text) for text in body["image_data"]] == [FILES[PNG_DIGEST]]
    assert (body["logprob_start_len"], body["sampling_params"]["max_new_tokens"]) == (0, 0)


async def test_a_scorer_that_scales_images_again_is_refused() -> None:
    ids = (5, *PNG_IDS, 6)
    scored = [[None, 5], *([-9.0, 0] for _ in range(len(PNG_IDS) + 2)), [-0.5, 6]]
    async with connected(PromptWriter(LAYOUT)) as (script, client):
        meta_info = {"prompt_tokens": len(ids) + 2, "input_token_logprobs": scored}
        script.says("/generate", 200, msgspec.json.encode({"meta_info": meta_info}))
        for scoring in (client.score(ids, FILES), client.read(ids, 1, 0, FILES)):
            with pytest.raises(EngineRefused, match="as 10 tokens instead of 8: its image processor scales"):
                await scoring


async def test_a_scorer_that_does_not_report_the_length_of_a_prompt_is_refused() -> None:
    ids = (5, *PNG_IDS, 6)
    scored = [[None, 5], *([-9.0, 0] for _ in PNG_IDS), [-0.5, 6]]
    async with connected(PromptWriter(LAYOUT)) as (script, client):
        script.says("/generate", 200, msgspec.json.encode({"meta_info": {"input_token_logprobs": scored}}))
        for scoring in (client.score(ids, FILES), client.read(ids, len(ids) - 1, 0, FILES)):
            with pytest.raises(EngineRefused, match="does not report the length of a prompt with images"):
                await scoring


async def test_an_event_of_a_stream_need_not_report_the_length_of_a_prompt() -> None:
    ids = (5, *PNG_IDS, 6)
    async with connected(PromptWriter(LAYOUT)) as (script, client):
        script.streams(event([3], 1), event([3, 4], 2, finish=LENGTH, prompt_tokens=len(ids)), DONE)
        generation = await client.generate(replace(ask(ids, 2), images=FILES))
    assert generation.ids == (3, 4)


async def test_a_server_that_never_reports_the_length_of_a_prompt_is_refused() -> None:
    ids = (5, *PNG_IDS, 6)
    async with connected(PromptWriter(LAYOUT)) as (script, client):
        script.streams(event([3], 1), event([3, 4], 2, finish=LENGTH), DONE)
        with pytest.raises(EngineRefused, match="does not report the length of a prompt with images"):
            await client.generate(replace(ask(ids, 2), images=FILES))


def test_images_of_families_whose_prompts_servers_tokenize_again_are_refused(tmp_path: Path) -> None:
    model_config = {"model_type": "qwen3_vl", "vision_config": {}, "image_token_id": PLACEHOLDER}
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(model_config))
    write_image_processor(tmp_path)
    ids = (5, *PNG_IDS, 6)
    writer = PromptWriter.of_model(str(tmp_path))
    assert writer.write_prompt(ids, FILES)["image_data"] == [FILES[PNG_DIGEST]]

    processor_path = tmp_path / "preprocessor_config.json"
    processor = msgspec.json.decode(processor_path.read_bytes())
    processor["image_processor_type"] = "Glm4vImageProcessor"
    processor_path.write_bytes(msgspec.json.encode(processor))
    glm_writer = PromptWriter.of_model(str(tmp_path))
    assert glm_writer.write_prompt((5, 6), FILES) == {"input_ids": (5, 6)}
    with pytest.raises(EngineRefused, match=r"the prompt has images: .* tokenize prompts with images again"):
        glm_writer.write_prompt(ids, FILES)


@pytest.mark.parametrize(
    ("vision_config", "is_refused"),
    [
        ({}, False),
        ({"rope_parameters": {"rope_type": "axial", "rope_theta": 10_000.0}}, False),
        ({"rope_parameters": {"rope_type": "axial", "rope_theta": 10.0}}, True),
        ({"rope_parameters": {"rope_type": "axial"}, "rope_theta": 10.0}, True),
        ({"rope_scaling": {"rope_type": "axial", "rope_theta": 10.0}}, True),
    ],
)
def test_a_vision_tower_that_servers_compute_with_another_rotary_base_is_refused(
    tmp_path: Path, vision_config: dict[str, Any], is_refused: bool
) -> None:
    model_config = {"model_type": "qwen3_vl", "vision_config": vision_config, "image_token_id": PLACEHOLDER}
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(model_config))
    write_image_processor(tmp_path)
    run_options = {"name": "run", "engine": {"name": "sglang"}, "data": {"train": "none"}, "total_steps": 0}
    config = parse(run_options | {"model": {"path": str(tmp_path)}})
    writer = PromptWriter.of_model(str(tmp_path))
    if not is_refused:
        check_images(config)
        assert writer.write_prompt((5, *PNG_IDS, 6), FILES)["image_data"] == [FILES[PNG_DIGEST]]
        return

    complaint = r"vision tower with rope_theta=10000, but vision_config in config.json has 10"
    with pytest.raises(ConfigError, match=complaint):
        check_images(config)
    with pytest.raises(EngineRefused, match=complaint):
        writer.write_prompt((5, *PNG_IDS, 6), FILES)


async def test_a_scorer_reads_turns_behind_images() -> None:
    """A server names the ids of images 0."""
    ids = (5, *PNG_IDS, 6, 7)
    async with connected(PromptWriter(LAYOUT)) as (script, client):
        scored = [[None, 0], [-0.5, 6], [-0.25, 7]]
        meta_info = {"prompt_tokens": len(ids), "input_token_logprobs": scored}
        script.says("/generate", 200, msgspec.json.encode({"meta_info": meta_info}))
        scores = await client.read(ids, 2, 0, FILES)
        assert np.frombuffer(scores.logprobs, "<f4").tolist() == [-0.5, -0.25]

        [(_, body, _)] = script.requests
        assert body["input_ids"] == [5, PLACEHOLDER, 6, 7]
        assert body["logprob_start_len"] == len(ids) - 3
