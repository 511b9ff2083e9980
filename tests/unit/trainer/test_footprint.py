"""Compares the estimate of the dry run with the trainer's code on tensors without memory, and that with the
live tensors of a real micro-batch."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from asyncrl.config import RunConfig
from asyncrl.trainer.footprint import Footprint, footprint
from asyncrl.trainer.learner import Learner
from asyncrl.trainer.world import World
from asyncrl.types import EpisodeResult, Generation, StopReason, Turn, VersionSpan
from asyncrl.vision.image_ids import image_ids
from asyncrl.vision.layout import read_image_layout
from tests.fakes.forked import FORKED
from tests.fakes.image_data import noise_image, write_image_processor
from tests.fakes.layouts import qwen_layout
from tests.fakes.models import save_small
from tests.fakes.ranks import run_ranks
from tests.fakes.traced import LiveBytes, traced, traced_with
from tests.fakes.training import Episode, make_row, tiny_config

pytestmark = pytest.mark.slow

SMOLLM2 = Path(__file__).parents[3] / ".models" / "smollm2-135m-instruct"
ROWS = 4
LENGTH = 128


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """0.9M parameters in four layers: 3.6 MB of weights, about as much as a micro-batch takes."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "vocab_size": 2000}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    return save_small(tmp_path_factory.mktemp("model"), "Qwen2", **sizes, **heads)


def config_of(
    path: str,
    dtype: str = "float32",
    length: int = LENGTH,
    lora_rank: int = 0,
    critic: bool = False,
    reference: bool | str = False,
    **trainer: Any,
) -> RunConfig:
    """Micro-batches of four rows."""
    estimator = reference if isinstance(reference, str) else "auto"
    sections: dict[str, Any] = {"kl": {"where": "loss", "estimator": estimator}} if reference else {}
    if critic:
        sections |= {"algorithm": {"advantage": "gae"}, "buffer": {"filter_zero_variance": False}}
    return tiny_config(
        path,
        model={"dtype": dtype, "lora_rank": lora_rank},
        rollout={"max_tokens": length, "max_new_tokens": length // 2},
        trainer={"micro_batch_tokens": ROWS * length, **trainer},
        **sections,
    )


def episodes(length: int) -> list[Episode]:
    """Rows as long as may be, which share nothing, each with an advantage."""
    count = length - 1
    spans = (VersionSpan(0, count, 0, 0),)
    results = tuple(EpisodeResult(float(i % 2), count, (float(i % 2),)) for i in range(ROWS))
    turns = [
        Turn(0, (i,), Generation((i,) * count, (-5.0,) * count, spans, StopReason.STOP)) for i in range(ROWS)
    ]
    return [(make_row(f"g/{i}", "g", results, i, [turn], 1.0), [turn]) for i, turn in enumerate(turns)]


def measured(config: RunConfig, world: World, folder: Path) -> tuple[int, int]:
    """Live bytes of one rank with all that stays, and at most in the second micro-batch."""
    world = world.arranged(config.trainer.replicas, config.trainer.sequence_parallel)
    with mock.patch("asyncrl.trainer.loading.LAYER_MIN_PARAMETERS", 0), LiveBytes() as live:
        learner = Learner(config, world)
        for _ in range(2):
            live.peak = live.now
            learner.accumulate(episodes(config.rollout.max_tokens))
        return live.now, live.peak


def layered(config: RunConfig) -> Footprint:
    with mock.patch("asyncrl.trainer.loading.LAYER_MIN_PARAMETERS", 0):
        return traced(config)


def trace(*configs: RunConfig) -> list[Footprint]:
    """Trace in another process, as this one has a process group."""
    with FORKED.Pool(1) as pool:
        return pool.map(layered, configs)


def estimated(config: RunConfig) -> Footprint:
    with mock.patch("asyncrl.trainer.footprint.LAYER_MIN_PARAMETERS", 0):
        return footprint(config)


EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {"head_dim": 64, "tie_word_embeddings": True},
    "Gemma2": {"head_dim": 32},
    "Phi": {},
    "Qwen3Moe": {"num_experts": 8} | EXPERTS,
    "Qwen2": {},
    "Mistral": {},
    "Phi3": {"pad_token_id": 0},
    "Olmo2": {},
    "Cohere": {},
    "GPTNeoX": {},
    "SmolLM3": {"pad_token_id": 0},
    "GraniteMoe": {"num_local_experts": 8} | EXPERTS,
    "Mixtral": {"num_local_experts": 8} | EXPERTS,
    "GptOss": {"num_local_experts": 8, "head_dim": 32} | EXPERTS,
}
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "vocab_size": 2000}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
WAYS: list[dict[str, Any]] = [
    {"dtype": "bfloat16"},
    {"dtype": "float32"},
    {"dtype": "bfloat16", "length": 256},
    {"dtype": "bfloat16", "packing": "packed"},
    {"dtype": "bfloat16", "activation_checkpointing": "full"},
    {"dtype": "bfloat16", "lora_rank": 8},
    {"dtype": "bfloat16", "critic": True},
    {"dtype": "bfloat16", "reference": True},
    {"dtype": "bfloat16", "reference": "js"},
]


@pytest.mark.parametrize(
    "family",
    [
        next(iter(FAMILIES)),
        pytest.param([*FAMILIES][1], marks=pytest.mark.full),
        *(pytest.param(name, marks=pytest.mark.long) for name in [*FAMILIES][2:]),
    ],
)
def test_the_closed_form_is_near_the_trace_or_above(tmp_path: Path, family: str) -> None:
    path = save_small(tmp_path / "model", family, **SIZES | HEADS | FAMILIES[family])
    configs = [config_of(path, **way) for way in WAYS]
    for way, config, exact in zip(WAYS, configs, trace(*configs), strict=True):
        estimate = estimated(config)
        assert estimate.static == pytest.approx(exact.static, rel=0.03), way
        assert 0.85 < estimate.total / exact.total < 1.25, (way, estimate, exact)


def assert_near(estimate: Footprint, static: int, peak: int) -> None:
    assert estimate.static == pytest.approx(static, rel=0.15)
    assert estimate.total == pytest.approx(peak, rel=0.15)
    assert estimate.gradients > 0 and estimate.rows == ROWS


@pytest.mark.parametrize(
    "keys",
    [
        {"activation_checkpointing": 2, "dtype": "bfloat16"},
        pytest.param({}, marks=pytest.mark.long),
        pytest.param({"activation_checkpointing": "full"}, marks=pytest.mark.long),
        pytest.param({"optimizer": "sgd"}, marks=pytest.mark.long),
    ],
)
def test_the_trace_is_what_a_micro_batch_takes(
    world: World, model: str, tmp_path: Path, keys: dict[str, Any]
) -> None:
    config = config_of(model, **keys)
    assert_near(trace(config)[0], *measured(config, world, tmp_path))


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("recomputed", ["none", "full"])
def test_of_experts(world: World, tmp_path: Path, dtype: str, recomputed: str) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "vocab_size": 2000}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    path = save_small(tmp_path / "model", "Qwen3Moe", **sizes, **heads, **experts)
    config = config_of(path, dtype, activation_checkpointing=recomputed)
    assert_near(trace(config)[0], *measured(config, world, tmp_path))


@pytest.mark.long
@pytest.mark.parametrize("keys", [{}, {"replicas": 2}, {"sequence_parallel": 2}])
def test_of_one_rank_of_two(world: World, model: str, tmp_path: Path, keys: dict[str, Any]) -> None:
    config = config_of(model, ranks=2, **keys)
    assert_near(trace(config)[0], *run_ranks(2, partial(measured, config), tmp_path))


@pytest.mark.long
def test_ranks_that_share_a_micro_batch_keep_less_of_it(model: str) -> None:
    one, two = trace(*(config_of(model, ranks=4, sequence_parallel=n) for n in (1, 2)))
    assert two.static == one.static
    assert 0.4 * one.work < two.work < 0.8 * one.work


@pytest.mark.long
@pytest.mark.skipif(not SMOLLM2.exists(), reason="make smollm2 fetches the model")
@pytest.mark.parametrize("recomputed", ["none", "full"])
def test_of_a_pretrained_model(world: World, tmp_path: Path, recomputed: str) -> None:
    config = config_of(str(SMOLLM2), "bfloat16", 256, activation_checkpointing=recomputed)
    assert_near(trace(config)[0], *measured(config, world, tmp_path))


def test_what_is_freed_or_resized_does_not_count() -> None:
    with LiveBytes() as live:
        kept = torch.zeros(1000)
        gone = kept + 1
        assert live.now == live.peak == 8000
        del gone
        view = kept[:10]
        assert live.now == 4000 and view.numel() == 10
        kept.untyped_storage().resize_(0)
        assert live.now == 0 and live.peak == 8000


def both(config: RunConfig) -> tuple[Footprint, Footprint, int]:
    """From few layers, from all, and in how many models."""
    with mock.patch("tests.fakes.traced.traced_with", wraps=traced_with) as asked:
        return traced(config), traced_with(config, 0), asked.call_count


@pytest.mark.parametrize(
    "keys", [{"trainer": {"activation_checkpointing": 2}}, pytest.param({}, marks=pytest.mark.long)]
)
def test_many_layers_that_are_alike_are_estimated_from_few(tmp_path: Path, keys: dict[str, Any]) -> None:
    """As with all of them, which took 9 s for 30 layers."""
    path = save_small(tmp_path / "model", "Qwen2", num_hidden_layers=5, tie_word_embeddings=True)
    with FORKED.Pool(1) as pool:
        few, whole, models = pool.apply(both, (tiny_config(path, **keys),))
    assert few == whole and models == 2


IMAGE_SIDE = 256  # pixels of a square image, which has 64 ids
TEXT_SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "vocab_size": 2000}
TOWER_SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "depth": 4,
    "num_heads": 2,
    "out_hidden_size": 128,
}


@pytest.fixture(scope="module")
def image_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small Qwen3-VL whose tower keeps about as much of an image as the text part does."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    text = TEXT_SIZES | HEADS | {"head_dim": 32, "rope_parameters": rope, "tie_word_embeddings": True}
    tower = TOWER_SIZES | {"deepstack_visual_indexes": [1], "num_position_embeddings": 256}
    ids = {"image_token_id": 1999, "video_token_id": 1998, "vision_start_token_id": 1997}
    config = AutoConfig.for_model(
        "qwen3_vl", text_config=text, vision_config=tower, tie_word_embeddings=True, **ids
    )
    directory = tmp_path_factory.mktemp("image_model")
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(directory)
    layout = qwen_layout(ids["image_token_id"], patch_size=16, min_side=64, max_side=IMAGE_SIDE)
    write_image_processor(directory, layout, image_mean=[0.5, 0.5, 0.5], image_std=[0.5, 0.5, 0.5])
    return str(directory)


@pytest.mark.parametrize("train_vision", [True, pytest.param(False, marks=pytest.mark.full)])
def test_images_and_a_trained_tower_are_in_the_estimate(
    world: World, image_model: str, train_vision: bool
) -> None:
    config = tiny_config(
        image_model,
        model={"dtype": "float32", "train_vision": train_vision},
        rollout={"max_tokens": LENGTH, "max_new_tokens": LENGTH // 2},
        trainer={"micro_batch_tokens": ROWS * LENGTH},
    )
    layout = read_image_layout(image_model)
    image_id_count = layout.run_length(IMAGE_SIDE, IMAGE_SIDE)
    files: dict[str, bytes] = {}
    image_episodes: list[Episode] = []
    for index in range(ROWS):
        patches = IMAGE_SIDE // layout.factor
        image = noise_image(layout, patches, patches, seed=index)
        files[image.ref.digest] = image.file
        ids = image_ids(image.ref.digest, image_id_count)
        count = LENGTH - 1 - image_id_count
        spans = (VersionSpan(0, count, 0, 0),)
        generation = Generation((index,) * count, (-5.0,) * count, spans, StopReason.STOP)
        turns = [Turn(0, (index, *ids), generation)]
        results = tuple(EpisodeResult(float(i % 2), count, (float(i % 2),)) for i in range(ROWS))
        image_episodes.append((make_row(f"g/{index}", "g", results, index, turns, 1.0), turns))

    with mock.patch("asyncrl.trainer.loading.LAYER_MIN_PARAMETERS", 0), LiveBytes() as live:
        learner = Learner(config, world)
        learner.image_pixels.add_files(files)
        for _ in range(2):
            live.peak = live.now
            learner.accumulate(image_episodes)

    with mock.patch("asyncrl.trainer.footprint.LAYER_MIN_PARAMETERS", 0):
        estimate = footprint(config, image_id_count)
        without_images = footprint(config)
    assert estimate.static == pytest.approx(live.now, rel=0.15)
    assert 0.85 < estimate.total / live.peak < 1.3, (estimate, live.peak)
    pixel_bytes = ROWS * IMAGE_SIDE**2 * 3 * layout.temporal_patch_size * 4  # float32
    assert estimate.total - without_images.total >= pixel_bytes
    if train_vision:  # a frozen tower keeps only pixels, which are within the tolerance of the estimate
        assert without_images.total < 0.85 * live.peak
