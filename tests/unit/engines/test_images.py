"""The embedded engine reads images, against full forwards of transformers."""

from __future__ import annotations

import asyncio
import copy
import random
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from transformers import DynamicCache

from asyncrl.engines.base import EngineRefused, Request
from asyncrl.engines.torch import images as engine_images
from asyncrl.engines.torch import step_layout
from asyncrl.engines.torch.engine import TorchEngine
from asyncrl.engines.torch.images import PixelCache, PromptImages
from asyncrl.errors import EngineError
from asyncrl.types import Generation, PolicyVersion, StopReason
from asyncrl.vision.image_ids import FIRST_IMAGE_ID, ImageRun, find_runs, has_image_ids, image_ids
from asyncrl.vision.pixels import PixelReader
from asyncrl.vision.positions import rope_positions
from asyncrl.weights.adapters import Adapters
from tests.fakes import weights as fake_weights
from tests.fakes.loop import settle

from .test_weights import publish
from .tiny import ROUNDING, ask, generated, serve, tiny
from .tiny import prompt as text
from .tiny_images import Encoded, Ids, TinyVision, tiny_vision

FAMILIES = ["qwen3_vl", "qwen3_5", "glm4v", "qwen2_5_vl", "qwen2_vl"]


@pytest.fixture
def vision(tmp_path: Path) -> TinyVision:
    return tiny_vision("qwen3_vl", tmp_path)


@pytest.fixture(params=[*FAMILIES[:-1], pytest.param("qwen2_vl", marks=pytest.mark.full)])
def vision_of_family(request: pytest.FixtureRequest, tmp_path: Path) -> TinyVision:
    return tiny_vision(request.param, tmp_path)


# -- plans, without a model --------------------------------------------------------------------------


def test_chunks_and_prefixes_cut_no_image():
    first = ImageRun(20, 50, "a")
    second = ImageRun(50, 90, "b")
    images = PromptImages([first, second])
    assert [images.uncut_length(length) for length in (19, 20, 21, 49, 50, 51, 90, 91)] == [
        19,
        20,
        20,
        20,
        50,
        50,
        90,
        91,
    ]
    assert images.chunk_end(0, 16) == 16
    assert images.chunk_end(0, 32) == 20
    assert images.chunk_end(20, 32) == 50  # more than the budget
    assert images.chunk_end(20, 95) == 95

    assert images.prefix_ends(140) == [50, 90, 96, 128]
    assert images.prefix_ends(90) == [50]
    assert PromptImages([ImageRun(40, 64, "a")]).prefix_ends(97) == [32, 64, 96]
    assert [*PromptImages().prefix_ends(97)] == [32, 64, 96]


def test_positions_go_on_behind_the_images_of_a_prompt():
    digest = "1" * 29
    ids = np.array([7, *image_ids(digest, 6), 8, 9])
    expected = rope_positions(np.append(ids, [3, 4, 5]), {digest: (2, 3)})
    images = PromptImages(find_runs(ids), rope_positions(ids, {digest: (2, 3)}))
    assert images.rope_offset == 4 - 7
    for start, end in ((0, 12), (0, 1), (1, 9), (7, 12), (10, 12)):
        assert np.array_equal(images.positions_within(start, end), expected[:, start:end])
    assert np.array_equal(PromptImages().positions_within(2, 5), [[2, 3, 4]] * 3)


def test_patches_are_kept_as_far_as_memory_goes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    vision = tiny_vision("qwen3_vl", tmp_path)
    files = [vision.files[find_runs(vision.picture(2, 2, seed))[0].digest] for seed in range(3)]
    cache = PixelCache(str(tmp_path))
    first = cache.read("0", files[0])
    monkeypatch.setattr(engine_images, "CACHED_BYTES", 2 * first.pixel_values.nbytes)
    second = cache.read("1", files[1])
    assert cache.read("0", files[0]) is first
    cache.read("2", files[2])
    assert cache.read("0", files[0]) is first
    decoded_again = cache.read("1", files[1])
    assert decoded_again is not second and torch.equal(decoded_again.pixel_values, second.pixel_values)


# -- log-probs ---------------------------------------------------------------------------------------


async def test_turns_with_an_image_in_each(vision_of_family: TinyVision):
    """Of one, two and one image, some longer than the budget of a step; kept KV is not encoded again."""
    vision = vision_of_family
    engine = vision.serve(budget=16)
    encoded = Encoded(engine)
    additions = [
        text(9) + vision.picture(3, 7) + text(5, 1),
        text(2) + vision.picture(2, 2, 1) + text(1) + vision.picture(2, 3, 2) + text(1),
        text(1) + vision.picture(4, 3, 3),  # the prompt ends with an image
    ]
    ids: Ids = ()
    for turn, addition in enumerate(additions):
        ids += addition
        request = vision.ask(ids, 5, key=turn + 20)  # samples no placeholder
        generation = await engine.generate(request)
        vision.assert_logprobs(request, generation)
        assert generation.stop is StopReason.LENGTH
        ids += generation.ids
    assert encoded.images == 4
    await engine.close()


async def test_a_groups_image_is_encoded_once(vision_of_family: TinyVision):
    """The last complete block of the prompt ends inside the image."""
    vision = vision_of_family
    engine = vision.serve()
    encoded = Encoded(engine)
    prompt = text(20) + vision.picture(5, 6) + text(4, 1)
    prompt_with_other_image = text(20) + vision.picture(5, 6, seed=1) + text(4, 1)
    requests = [vision.ask(prompt, 4, f"member {key}", key) for key in range(4)]
    for request, generation in zip(
        requests, await asyncio.gather(*map(engine.generate, requests)), strict=True
    ):
        vision.assert_logprobs(request, generation)
    assert encoded.images == 1

    # An image of the same size is not that image, neither in another slot nor in the same slot.
    for session in ("another", "member 0"):
        request = vision.ask(prompt_with_other_image, 4, session)
        vision.assert_logprobs(request, await engine.generate(request))
    assert encoded.images == 2
    await engine.close()


async def test_a_rewritten_turn_goes_on_behind_its_image(tmp_path: Path):
    """States are those of the snapshot, behind the image; an image at the cut is encoded again."""
    vision = tiny_vision("qwen3_5", tmp_path)
    engine = vision.serve(budget=48)
    encoded = Encoded(engine)
    start = text(30) + vision.picture(4, 5) + text(7, 1)
    first = await engine.generate(vision.ask(start, 6))
    rewritten = start + first.ids[:2] + text(5, 2)
    request = vision.ask(rewritten, 6)
    vision.assert_logprobs(request, await engine.generate(request))
    assert encoded.images == 1
    assert engine.reprefilled_tokens == 7 + 2

    cut = vision.ask(start[:50], 3)  # the prompt ends with the image, whose last id needs logits
    vision.assert_logprobs(cut, await engine.generate(cut))
    assert encoded.images == 2
    await engine.close()


async def play_turns(engine: TorchEngine, vision: TinyVision, name: str, seed: str) -> None:
    """Play up to three turns with random text and images."""
    rng = random.Random(seed)
    ids = text(rng.choice((0, 20, 40)), 0)
    for turn in range(rng.randint(1, 3)):
        for _ in range(rng.randint(0, 2)):
            # transformers computes no positions for two images without text between.
            ids += text(rng.choice((1, 3)), rng.random())
            ids += vision.picture(rng.randint(2, 5), rng.randint(2, 5), rng.randint(0, 1))
        ids += text(rng.choice((0, 1, 20)), rng.random()) if ids else text(5)
        if len(ids) > 170:
            break

        request = vision.ask(ids, rng.randint(1, 6), name, turn)
        generation = await engine.generate(request)
        vision.assert_logprobs(request, generation)
        if generation.stop is StopReason.STOP:  # a sampled placeholder
            break
        ids += generation.ids


async def test_random_rows_in_one_batch(vision: TinyVision):
    await play_sessions(vision, seed=0, budget=24)


@pytest.mark.full
@settings(max_examples=20, deadline=None)
@given(family=st.sampled_from(FAMILIES), seed=st.integers(0, 10**6), budget=st.integers(8, 64))
def test_random_rows_of_all_families(
    tmp_path_factory: pytest.TempPathFactory, family: str, seed: int, budget: int
) -> None:
    vision = tiny_vision(family, tmp_path_factory.mktemp("model"))
    asyncio.run(play_sessions(vision, seed, budget))


async def play_sessions(vision: TinyVision, seed: int, budget: int) -> None:
    """Six sessions in three slots."""
    engine = vision.serve(slots=3, budget=budget)
    sessions = (play_turns(engine, vision, str(index), f"{seed} {index}") for index in range(6))
    await asyncio.wait_for(asyncio.gather(*sessions), 60)
    await engine.close()


@pytest.mark.full
async def test_slots_that_move_take_their_positions_along(
    vision: TinyVision, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(step_layout, "_WORTHWHILE_CELLS", 32)
    monkeypatch.setattr(step_layout, "_SHORT_LENGTH", 8)
    engine = vision.serve(budget=48)
    move = Mock(wraps=engine._batcher.cache.move_slots)
    monkeypatch.setattr(engine._batcher.cache, "move_slots", move)
    sessions = (play_turns(engine, vision, str(index), f"moves {index}") for index in range(8))
    await asyncio.wait_for(asyncio.gather(*sessions), 60)
    assert move.call_count > 3
    await engine.close()


async def test_text_alone_is_as_before(vision: TinyVision):
    engine = vision.serve()
    request = vision.ask(text(40), 8)
    vision.assert_logprobs(request, await engine.generate(request))
    await engine.close()


async def test_positions_of_images_take_no_memory_in_every_slot(vision: TinyVision):
    """A table of all positions would take 24 bytes for each token of each slot."""
    cache = vision.serve(slots=4, max_len=192)._batcher.cache
    layer_tables = {id(pool) for pool in cache.pools}
    tables = [table for table in vars(cache).values() if isinstance(table, torch.Tensor)]
    token_table_bytes = sum(
        table.nbytes for table in tables if table.numel() >= 4 * 192 and id(table) not in layer_tables
    )
    assert token_table_bytes == cache.ids.nbytes + cache.logprobs.nbytes


async def test_a_sampled_placeholder_ends_the_turn(vision: TinyVision):
    """Also at the last position of a slot, which then holds the placeholder while others read images."""
    for placeholder in vision.layout.placeholders:
        await check_sampled_placeholder(vision, placeholder)


async def check_sampled_placeholder(vision: TinyVision, placeholder: int) -> None:
    engine = vision.serve(slots=2, max_len=40)
    engine._model.lm_head.register_forward_hook(  # type: ignore[union-attr, operator]
        lambda _module, _args, logits: logits.index_fill(-1, torch.tensor([placeholder]), 1e4)
    )
    for length in (39, 10):
        generation = await engine.generate(vision.ask(text(length), 5, str(length)))
        assert generation.ids == (placeholder,) and generation.stop is StopReason.STOP

    # Padding of the second prompt's chunk, and slots that sit out, read the scratch position.
    requests = [
        vision.ask(text(3) + vision.picture(rows, 4), 1, str(length)) for rows, length in ((2, 10), (3, 39))
    ]
    for generation in await asyncio.gather(*map(engine.generate, requests)):
        assert generation.ids == (placeholder,)
    await engine.close()


# -- weights -----------------------------------------------------------------------------------------


async def generate_with_two_versions(
    old_vision: TinyVision, new_vision: TinyVision, directory: Path, sleeps: bool
) -> tuple[Request, Generation, int, int]:
    """Load the new weights within a turn behind an image. Return the request, the turn, the number of tokens
    that the old weights sampled, and the number of images encoded."""
    engine = old_vision.serve(stepwise=True)
    encoded = Encoded(engine)
    request = old_vision.ask(text(9) + old_vision.picture(3, 4) + text(3), 20)
    turn = asyncio.create_task(engine.generate(request))
    await generated(engine, 5)
    if sleeps:
        await engine.sleep()
    await engine.load(publish(new_vision.model, directory, 3))
    generation = await turn
    await engine.close()

    old_token_count = generation.spans[0].end
    assert 5 <= old_token_count < 20
    return request, generation, old_token_count, encoded.images


async def test_images_are_encoded_again_after_a_sleep(vision: TinyVision, tmp_path: Path):
    new_vision = vision.changed(seed=1)
    request, generation, cut, encoded_images = await generate_with_two_versions(
        vision, new_vision, tmp_path / "version", sleeps=True
    )
    assert encoded_images == 2
    old_part = replace(generation, ids=generation.ids[:cut], logprobs=generation.logprobs[:cut])
    vision.assert_logprobs(request, old_part)
    new_part = replace(generation, ids=generation.ids[cut:], logprobs=generation.logprobs[cut:])
    new_vision.assert_logprobs(vision.ask(request.ids + old_part.ids), new_part)


async def test_weights_swap_between_two_tokens_behind_an_image(vision: TinyVision, tmp_path: Path):
    """KV of the image stays that of the old weights; positions go on behind the image."""
    new_vision = vision.changed(seed=1)
    request, generation, cut, encoded_images = await generate_with_two_versions(
        vision, new_vision, tmp_path / "version", sleeps=False
    )
    assert encoded_images == 1
    expected = mixed_logprobs(vision, new_vision, request.ids + generation.ids, len(request.ids) + cut - 1)
    torch.testing.assert_close(torch.tensor(generation.logprobs[cut:]), expected, **ROUNDING)


@torch.no_grad()
def mixed_logprobs(old: TinyVision, new: TinyVision, ids: Ids, split: int) -> torch.Tensor:
    """Log-probs of ids[split + 1:] when `old` wrote the KV of ids[:split] and `new` goes on."""
    assert not has_image_ids(ids[split:])
    old_model: Any = old.model
    cache = DynamicCache(config=old_model.config)
    arguments = old.arguments(ids[:split])
    old_model(**arguments, past_key_values=cache, use_cache=True)
    largest_position = int(old_model.model.get_rope_index(**old.arguments(ids[:split]))[0].max())
    positions = largest_position + 1 + torch.arange(len(ids) - split - 1)
    logits = new.model(
        torch.tensor([ids[split:-1]]),
        position_ids=positions.expand(3, 1, -1),
        past_key_values=cache,
        use_cache=True,
    ).logits[0]
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[split + 1 :])[:, None])[:, 0]


async def test_agents_with_adapters_read_the_same_image(vision: TinyVision, tmp_path: Path):
    """Adapters are in the text part: the image is encoded for each agent, by the same tower."""
    sizes = {"planner": (3, 6.0), "coder": (2, 8.0)}
    adapted_model = copy.deepcopy(vision.model)
    adapters = Adapters(adapted_model, sizes)
    draw = torch.Generator().manual_seed(0)
    tensors = {}
    for piece in adapters.published:
        shape = adapted_model.get_parameter(piece.parameter).shape
        tensors[piece.name] = 0.1 * torch.randn(shape, generator=draw)
    ref = fake_weights.publish(tensors, tmp_path / "version", PolicyVersion(1, 1), adapters.specs)

    engine = vision.serve()
    encoded = Encoded(engine)
    await engine.load(ref)
    ids = text(30) + vision.picture(3, 4) + text(3)
    for agent, size in sizes.items():
        adapted = TinyVision(vision.directory, copy.deepcopy(vision.model), vision.files)
        with torch.no_grad():
            for piece in Adapters(adapted.model, {"": size}).published:
                name = piece.name.replace(".weight", f".{agent}.weight")
                adapted.model.get_parameter(piece.parameter).copy_(tensors[name])
        request = replace(vision.ask(ids, 6, agent), agent=agent)
        adapted.assert_logprobs(request, await engine.generate(request))
    assert encoded.images == 2
    await engine.close()


# -- requests ----------------------------------------------------------------------------------------


async def test_images_are_read_beside_the_loop_and_the_steps(
    vision: TinyVision, monkeypatch: pytest.MonkeyPatch
):
    """Turns of others go on meanwhile, and the session can be released."""
    may_read = threading.Event()
    is_reading = threading.Event()
    read = PixelReader.read

    def read_late(self: PixelReader, file: bytes) -> object:
        is_reading.set()
        assert may_read.wait(60)
        return read(self, file)

    monkeypatch.setattr(PixelReader, "read", read_late)
    engine = vision.serve()
    request = vision.ask(text(3) + vision.picture(2, 3), 4, "late")
    released_request = vision.ask(text(3) + vision.picture(2, 3, 1), 4, "released")
    late_turn = asyncio.create_task(engine.generate(request))
    released_turn = asyncio.create_task(engine.generate(released_request))
    assert await asyncio.to_thread(is_reading.wait, 60)
    assert len((await engine.generate(vision.ask(text(9), 8, "text"))).ids) == 8

    with pytest.raises(EngineError, match="'late': its previous turn is still running"):
        await engine.generate(request)
    engine.release("released")
    aborted = await released_turn
    assert (aborted.ids, aborted.stop) == ((), StopReason.ABORT)
    assert not late_turn.done()

    may_read.set()
    generation: Generation = await late_turn
    vision.assert_logprobs(request, generation)
    await engine.close()


async def test_a_scored_row_whose_session_is_released_has_no_scores(
    vision: TinyVision, monkeypatch: pytest.MonkeyPatch
):
    may_read = threading.Event()
    is_reading = threading.Event()

    def read_late(self: PixelReader, file: bytes) -> None:
        is_reading.set()
        assert may_read.wait(60)

    monkeypatch.setattr(PixelReader, "read", read_late)
    engine = vision.serve()
    ids = text(3) + vision.picture(2, 3) + text(2)
    rows = [
        asyncio.create_task(engine.score(ids, vision.files)) for _ in range(2)
    ]  # one waits for the thread
    try:
        assert await asyncio.to_thread(is_reading.wait, 60)
        engine.release("scored row 1")
        with pytest.raises(EngineError, match="'scored row 1' was released while its images were read"):
            await rows[1]
    finally:
        may_read.set()
        await asyncio.gather(*rows, return_exceptions=True)
        await engine.close()


async def test_a_cancelled_request_and_a_closed_engine_wait_for_no_image(
    vision: TinyVision, monkeypatch: pytest.MonkeyPatch
):
    may_read = threading.Event()
    monkeypatch.setattr(PixelReader, "read", lambda self, file: may_read.wait(60))
    engine = vision.serve()
    tasks = [
        asyncio.create_task(engine.generate(vision.ask(vision.picture(2, 3, seed), 4, str(seed))))
        for seed in range(3)
    ]
    await settle()
    tasks[1].cancel()
    await asyncio.wait_for(asyncio.gather(tasks[1], return_exceptions=True), 60)
    assert tasks[1].cancelled()
    await engine.close()
    may_read.set()
    for outcome in await asyncio.wait_for(asyncio.gather(tasks[0], tasks[2], return_exceptions=True), 60):
        assert isinstance(outcome, EngineError) and "closed" in str(outcome)


async def test_requests_that_cannot_be_served_are_refused(vision: TinyVision, tmp_path: Path):
    engine = vision.serve()
    picture = vision.picture(2, 3)
    digest = find_runs(picture)[0].digest
    other_digest = find_runs(vision.picture(3, 3))[0].digest
    valid_request = vision.ask(text(3) + picture + text(2))
    refused = {
        "which stands for images": vision.ask((1, vision.layout.placeholder, 2)),
        "begin with the first 4 ids of an image": vision.ask((1, *picture[2:], 2)),
        f"the file of image {digest} is not among": replace(valid_request, images={}),
        "has 6 ids instead of 3 x 3": replace(valid_request, images={digest: vision.files[other_digest]}),
        "a stored image cannot be decoded": replace(
            valid_request, images={digest: vision.files[digest][:90]}
        ),
    }
    for reason, request in refused.items():
        with pytest.raises(EngineRefused, match=reason):
            await engine.generate(request)
    for scoring in (engine.score(valid_request.ids), engine.read(valid_request.ids, 2, 1)):
        with pytest.raises(EngineRefused, match=f"the file of image {digest} is not among"):
            await scoring
    vision.assert_logprobs(valid_request, await engine.generate(valid_request))
    await engine.close()

    text_engine = serve(tiny())
    with pytest.raises(EngineRefused, match="has images: the model reads text only"):
        await text_engine.generate(replace(ask((1, *picture)), images=vision.files))
    await text_engine.close()


async def test_rows_with_images_are_scored(vision_of_family: TinyVision):
    vision = vision_of_family
    engine = vision.serve()
    ids = text(3) + vision.picture(2, 3) + text(5, 1) + vision.picture(3, 2, 1) + text(2, 2)
    expected = vision.model(**vision.arguments(ids), use_cache=False).logits[0].log_softmax(-1)
    scored_ids = [index for index, token in enumerate(ids) if index and token < FIRST_IMAGE_ID]
    logprobs = await engine.score(ids, vision.files)
    torch.testing.assert_close(
        torch.tensor([logprobs[index - 1] for index in scored_ids]),
        torch.stack([expected[index - 1, ids[index]] for index in scored_ids]).detach(),
        **ROUNDING,
    )
    assert len(await engine.score(text(7))) == 6

    scores = await engine.read(ids, 2, 0, vision.files)
    assert np.frombuffer(scores.logprobs, "<f4").tolist() == pytest.approx(logprobs[-2:], abs=1e-5)
    await engine.close()


async def test_a_missing_processor_refuses_images_alone(vision: TinyVision):
    (vision.directory / "preprocessor_config.json").unlink()
    engine = vision.serve()
    with pytest.raises(EngineRefused, match="its image processor is missing; copy preproc"):
        await engine.generate(vision.ask(text(3) + vision.picture(2, 3)))
    request = vision.ask(text(30), 4)
    vision.assert_logprobs(request, await engine.generate(request))
    await engine.close()
