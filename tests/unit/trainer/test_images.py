"""The trainer reads images: each layout computes what transformers computes for single sequences."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncrl.algorithms.aggregation import aggregations
from asyncrl.config import ModelConfig, Packing
from asyncrl.engines.torch.engine import replace_weights
from asyncrl.episodes.image_checks import check_images
from asyncrl.episodes.parts import EpisodeParts
from asyncrl.errors import AsyncrlError, ConfigError, DeadlineError, ProtocolError, lacks_memory
from asyncrl.launch.models import check_model, decide_on_images
from asyncrl.model_class import auto_class_of, read_config
from asyncrl.store.checkpoints import CheckpointManifest
from asyncrl.trainer import images
from asyncrl.trainer.attention import use_forest_attention
from asyncrl.trainer.batch import collate, training_sample
from asyncrl.trainer.images import ImagePixels, digests_of
from asyncrl.trainer.model import Policy, load_policy
from asyncrl.trainer.performance import FlopCount
from asyncrl.trainer.scores import Selected
from asyncrl.trainer.world import World
from asyncrl.types import EpisodeResult, Generation, StopReason, Turn, VersionSpan
from asyncrl.vision import pixels as pixels_module
from asyncrl.vision.files import StoredImage
from asyncrl.vision.image_ids import (
    DIGEST_DIGITS,
    FIRST_IMAGE_ID,
    find_runs,
    image_ids,
    with_placeholders,
)
from asyncrl.vision.layout import read_image_layout
from asyncrl.vision.pixels import PixelReader, Pixels
from asyncrl.weights.checkpoint_match import trained_shapes
from asyncrl.weights.model_files import stored_tensors
from asyncrl.weights.names import checkpoint_pieces
from tests.fakes.image_data import image_file, noise_image
from tests.fakes.ranks import run_ranks
from tests.fakes.tiny_families import DEMO_MODEL, NORMALIZED, build_family
from tests.fakes.training import (
    Episode,
    difference,
    export,
    final_gradients,
    load_checkpoint,
    make_learner,
    make_row,
    run_batch,
    save_checkpoint,
    stored,
    tiny_config,
)

pytestmark = pytest.mark.slow

FAMILIES = ["qwen3_vl", pytest.param("qwen3_5", marks=pytest.mark.full)]
FAMILIES += [pytest.param(name, marks=pytest.mark.full) for name in ("glm4v", "qwen2_vl", "qwen2_5_vl")]
TOWER_WEIGHT = "model.visual.patch_embed.proj.weight"
LAYOUTS: tuple[Packing, ...] = ("padded", "packed", "tree")
GLM_PREPROCESSOR = NORMALIZED | {
    "size": {"shortest_edge": 2 * 56 * 56, "longest_edge": 2 * 280 * 280},
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_processor_type": "Glm4vImageProcessor",
}


def build_vision_model(family: str, directory: Path) -> str:
    build_family(family, directory)
    if family == "glm4v":
        (directory / "preprocessor_config.json").write_text(json.dumps(GLM_PREPROCESSOR))
    return str(directory)


@pytest.fixture(scope="module")
def model_paths(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    directory = tmp_path_factory.mktemp("vision")

    @cache
    def path_of(family: str) -> str:
        return build_vision_model(family, directory / family)

    return path_of


class Conversations:
    """Sequences with images of one layout. `image_pixels` has the files of all of them."""

    def __init__(self, path: str) -> None:
        self.layout = read_image_layout(path)
        self.image_pixels = ImagePixels(path, self.layout)
        wide, tall, other_wide = (
            noise_image(self.layout, rows, columns, seed)
            for seed, (rows, columns) in enumerate([(2, 3), (4, 2), (2, 3)])
        )
        self.files = {image.ref.digest: image.file for image in (wide, tall, other_wide)}
        self.image_pixels.add_files(self.files)

        question = list(range(40, 60))
        self.sequences = [
            self._row([5, wide, 6, *question], [30, 31], [7, tall, 8], [41, self.layout.placeholder]),
            self._row([5, wide, 6, *question], [50, 51, 52]),
            self._row([5, *question], [60, 61]),
            self._row([5, other_wide, 6, *question], [50, 51, 52]),
            self._row([9, tall, 6, wide, 70], [71, 72]),
        ]

    def _row(self, *parts: Sequence[int | StoredImage]) -> np.ndarray:
        """Return a sequence; an image becomes its run of ids."""
        ids: list[int] = []
        for item in (item for part in parts for item in part):
            if isinstance(item, StoredImage):
                run_length = self.layout.run_length(item.ref.height, item.ref.width)
                ids += image_ids(item.ref.digest, run_length)
            else:
                ids.append(item)
        return np.array(ids, dtype=np.int32)

    def select(
        self,
        packing: Packing,
        sequences: Sequence[np.ndarray] | None = None,
        *,
        in_step_with_images: bool = True,
    ) -> Selected:
        """Select all tokens but those of images and the first of each sequence."""
        sequences = self.sequences if sequences is None else sequences
        positions = [1 + np.flatnonzero(sequence[1:] < FIRST_IMAGE_ID) for sequence in sequences]
        sequence_of = np.repeat(np.arange(len(sequences)), [len(position) for position in positions])
        temperature = torch.ones(len(sequence_of), dtype=torch.float64)
        return Selected.lay_out(
            sequences,
            sequence_of,
            np.concatenate(positions),
            temperature,
            packing,
            image_pixels=self.image_pixels if in_step_with_images else None,
        )


def plain_model(path: str, dtype: torch.dtype) -> Any:
    return auto_class_of(read_config(path)).from_pretrained(path, dtype=dtype).eval()


def plain_logprobs(model: Any, path: str, conversations: Conversations) -> list[Tensor]:
    """Return the log-probs of the selected tokens of each sequence, by a forward of transformers alone."""
    reader = PixelReader(path)
    logprobs = []
    for sequence in conversations.sequences:
        context = sequence[:-1]
        is_image = context >= FIRST_IMAGE_ID
        ids = torch.from_numpy(with_placeholders(context, conversations.layout.placeholder)).long()[None]
        images = [reader.read(conversations.files[run.digest]) for run in find_runs(context)]
        image_arguments = {}
        if images:
            pixels = Pixels.concatenate(images)
            image_arguments = {"pixel_values": pixels.pixel_values, "image_grid_thw": pixels.grids}
        token_types = torch.from_numpy(is_image.astype(np.int32))[None]
        logits = model(input_ids=ids, mm_token_type_ids=token_types, **image_arguments).logits[0]
        labels = torch.from_numpy(sequence[1:]).long()
        is_text = labels < FIRST_IMAGE_ID
        table = logits.log_softmax(-1)[is_text]
        logprobs.append(table.gather(1, labels[is_text][:, None])[:, 0])

    return logprobs


def weighted_sum(logprobs: Tensor) -> Tensor:
    """Return a loss in which every token has a weight of its own."""
    return (logprobs * torch.linspace(0.1, 1, len(logprobs), dtype=logprobs.dtype)).sum()


def policy_gradients(policy: Policy) -> dict[str, Tensor]:
    gradients = {
        name: parameter.grad.full_tensor()
        for name, parameter in policy.lm.named_parameters()
        if parameter.grad is not None
    }
    policy.zero_grad()
    return gradients


def relative_distance(gradients: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the norm of the difference by the norm of what is expected, over all `gradients`."""
    difference = torch.stack([(gradients[name] - expected[name]).norm() for name in gradients]).norm()
    return float(difference / torch.stack([expected[name].norm() for name in gradients]).norm())


@pytest.mark.parametrize(
    ("dtype", "train_vision", "limit"),
    [("float32", False, 1e-5), pytest.param("float64", True, 1e-10, marks=pytest.mark.full)],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_layouts_compute_what_transformers_computes(
    family: str,
    dtype: str,
    train_vision: bool,
    limit: float,
    model_paths: Callable[[str], str],
    world: World,
) -> None:
    path = model_paths(family)
    conversations = Conversations(path)
    model = plain_model(path, getattr(torch, dtype))
    expected = torch.cat(plain_logprobs(model, path, conversations))
    weighted_sum(expected).backward()
    expected_gradients = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if train_vision or ".visual." not in name
    }
    if family == "qwen3_5":
        limit = max(limit, 1e-6)  # layers with a state compute in float32

    policy = load_policy(ModelConfig(path=path, dtype=dtype, train_vision=train_vision), world)
    for packing in LAYOUTS:
        if packing == "packed":
            use_forest_attention(policy.lm)
        logprobs = policy(conversations.select(packing)).logp
        weighted_sum(logprobs).backward()
        gradients = policy_gradients(policy)

        assert (logprobs - expected).abs().max() < limit, packing
        # Norms compute in float32.
        assert relative_distance(gradients, expected_gradients) < max(limit, 1e-6), packing


def test_a_shared_image_is_read_once(model_paths: Callable[[str], str]) -> None:
    conversations = Conversations(model_paths("qwen3_vl"))
    image_counts = {}
    for packing in LAYOUTS:
        images = conversations.select(packing).images
        assert images is not None
        image_counts[packing] = len(images.pixels.grids)
    assert image_counts == {"padded": 6, "packed": 6, "tree": 5}


def test_images_that_differ_late_in_their_digests_are_not_shared(
    model_paths: Callable[[str], str], world: World
) -> None:
    path = model_paths("qwen3_vl")
    conversations = Conversations(path)
    digests = ("0" * 28 + "1", "8" + "0" * 27 + "1")  # the first three of four ids are equal
    wide_file, _, other_wide_file = conversations.files.values()
    conversations.image_pixels.add_files(dict(zip(digests, (wide_file, other_wide_file), strict=True)))
    before = [*range(40, 60)]
    sequences = [np.array([*before, *image_ids(digest, 6), 30, 31], dtype=np.int32) for digest in digests]

    policy = load_policy(ModelConfig(path=path, dtype="float32"), world)
    use_forest_attention(policy.lm)
    separate = policy(conversations.select("packed", sequences)).logp
    tree = policy(conversations.select("tree", sequences)).logp
    assert (tree - separate).abs().max() < 1e-5


def test_sequences_of_several_adapters_keep_their_images(model_paths: Callable[[str], str]) -> None:
    conversations = Conversations(model_paths("qwen3_vl"))
    sequences = conversations.sequences[1:4]
    plain = conversations.select("packed", sequences)
    with_adapters = Selected.lay_out(
        sequences,
        np.array([0]),
        np.array([30]),
        torch.ones(1),
        "packed",
        adapters=[1, 0, 2],
        image_pixels=conversations.image_pixels,
    )
    assert plain.images is not None and with_adapters.images is not None
    assert torch.equal(with_adapters.ids, plain.ids)
    assert torch.equal(with_adapters.images.positions, plain.images.positions)
    assert torch.equal(with_adapters.images.pixels.pixel_values, plain.images.pixels.pixel_values)


def test_text_beside_a_dummy_image_has_the_scores_of_text_alone(
    model_paths: Callable[[str], str], world: World
) -> None:
    path = model_paths("qwen3_vl")
    conversations = Conversations(path)
    text = conversations.sequences[2:3]
    config = ModelConfig(path=path, dtype="float64", train_vision=True)
    policy = load_policy(config, world)
    with_dummy = conversations.select("padded", text)
    assert with_dummy.images is not None
    alone = conversations.select("padded", text, in_step_with_images=False)
    assert alone.images is None and with_dummy.ids.shape[0] == 2

    weighted_sum(policy(alone).logp).backward()
    expected_gradients = policy_gradients(policy)
    weighted_sum(policy(with_dummy).logp).backward()
    gradients = policy_gradients(policy)
    tower_gradients = [gradients.pop(name) for name in [*gradients] if ".visual." in name]
    assert tower_gradients and not any(gradient.any() for gradient in tower_gradients)
    assert relative_distance(gradients, expected_gradients) < 1e-6  # norms compute in float32


def test_an_image_without_its_file_is_named(model_paths: Callable[[str], str]) -> None:
    conversations = Conversations(model_paths("qwen3_vl"))
    conversations.image_pixels = ImagePixels(model_paths("qwen3_vl"), conversations.layout)
    with pytest.raises(ProtocolError, match=f"no file of image {next(iter(conversations.files))}"):
        conversations.select("tree")


def test_pixels_are_dropped_beyond_the_limit_of_their_memory(
    model_paths: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    conversations = Conversations(model_paths("qwen3_vl"))
    image_pixels = conversations.image_pixels
    digests = [*conversations.files]
    expected = {digest: image_pixels.pixels_of([digest])[digest].pixel_values for digest in digests}

    monkeypatch.setattr(images, "PIXEL_CACHE_BYTES", expected[digests[1]].nbytes)
    for digest in [*digests, *digests]:
        assert torch.equal(image_pixels.pixels_of([digest])[digest].pixel_values, expected[digest])
        assert image_pixels._cached_bytes <= images.PIXEL_CACHE_BYTES
    image_pixels.drop_files()
    with pytest.raises(ProtocolError, match="no file of image"):
        image_pixels.pixels_of(digests)


def turn_with(context: Sequence[int], taught: Sequence[int] = ()) -> Turn:
    generation = Generation((1,), (-0.5,), (VersionSpan(0, 1, 0, 0),), StopReason.STOP)
    return Turn(0, tuple(context), generation, taught=tuple(taught))


def test_episodes_whose_images_do_not_fit_are_left_out(model_paths: Callable[[str], str]) -> None:
    conversations = Conversations(model_paths("qwen3_vl"))
    wide, tall, other_wide = conversations.files
    layout = conversations.layout
    # Of as many whole patches as the image has ids, and of another model's patches.
    odd_file = image_file(3 * layout.factor + 14, 2 * layout.factor)
    odd = "1" * DIGEST_DIGITS
    damaged = "2" * DIGEST_DIGITS
    lost = "3" * DIGEST_DIGITS
    headless = "4" * DIGEST_DIGITS
    image_pixels = ImagePixels(model_paths("qwen3_vl"), layout)
    image_pixels.add_files(
        conversations.files
        | {
            odd: odd_file,
            damaged: conversations.files[wide][:-200],
            headless: b"no image",
        }
    )
    sound = turn_with([5, *image_ids(wide, 6), 6])
    reasons = image_pixels.read_images_of_episodes(
        {
            "sound": [sound, turn_with([*image_ids(tall, 8)])],
            "text": [turn_with([5, 6])],
            "other size": [sound, turn_with([*image_ids(other_wide, 8)])],
            "cut": [turn_with([5, *image_ids(tall, 8)[:5]])],
            "for a teacher": [turn_with([5], taught=[5, *image_ids(tall, 6)])],
            "odd": [turn_with([*image_ids(odd, 6)])],
            "damaged": [turn_with([*image_ids(damaged, 6)]), sound],
            "headless": [turn_with([*image_ids(headless, 6)])],
            "lost": [turn_with([*image_ids(lost, 6)])],
        }
    )
    size = f"{2 * layout.factor} x {4 * layout.factor} pixels"
    expected = {
        "other size": f"image {other_wide} has .* pixels, which do not fit 8 ids",
        "cut": f"image {tall} has {size}, which do not fit 5 ids",
        "for a teacher": f"image {tall} has {size}, which do not fit 6 ids",
        "odd": f"image {odd} has .* pixels, which do not fit 6 ids",
        "damaged": f"image {damaged}: a stored image cannot be decoded",
        "headless": f"image {headless}: a stored image cannot be decoded",
        "lost": f"image {lost} is lost",
    }
    assert reasons.keys() == expected.keys()
    assert all(re.match(pattern, reasons[uid]) for uid, pattern in expected.items()), reasons


def record_decoded_files(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Return a list to which each image file is appended when it is decoded."""
    decoded_files = list[bytes]()
    decode = pixels_module.decode_stored
    monkeypatch.setattr(
        pixels_module, "decode_stored", lambda file: decoded_files.append(file) or decode(file)
    )
    return decoded_files


def test_images_of_a_part_are_decoded_once(
    model_paths: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    conversations = Conversations(model_paths("qwen3_vl"))
    decoded_files = record_decoded_files(monkeypatch)
    turns_by_uid = {str(index): [turn_with(row)] for index, row in enumerate(conversations.sequences)}
    assert conversations.image_pixels.read_images_of_episodes(turns_by_uid) == {}
    for packing in LAYOUTS:
        conversations.select(packing)
    assert sorted(decoded_files) == sorted(conversations.files.values())


def test_the_first_images_of_a_part_beyond_the_cache_stay(
    model_paths: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    conversations = Conversations(model_paths("qwen3_vl"))
    decoded_files = record_decoded_files(monkeypatch)
    monkeypatch.setattr(images, "READ_AHEAD", 1)
    image_pixels = conversations.image_pixels
    first, second, third = conversations.files
    pixels_by_digest = image_pixels.pixels_of([third, first])  # of an earlier part
    kept_bytes = 2 * pixels_by_digest[first].pixel_values.nbytes
    monkeypatch.setattr(images, "PIXEL_CACHE_BYTES", kept_bytes + pixels_by_digest[first].pixel_values.nbytes)

    decoded_files.clear()
    turns = [turn_with(image_ids(first, 6)), turn_with(image_ids(second, 8)), turn_with(image_ids(third, 6))]
    part = {"a": turns[:2], "b": turns[2:]}
    assert image_pixels.read_images_of_episodes(part) == {}
    assert image_pixels._cached_bytes <= images.PIXEL_CACHE_BYTES
    image_pixels.pixels_of([first, second])
    assert decoded_files == [conversations.files[second], conversations.files[third]]
    image_pixels.pixels_of([third])
    assert decoded_files[2:] == [conversations.files[third]]


def test_behind_a_barrier_images_of_earlier_parts_stay(
    model_paths: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are trained before those of this part. In a stream their part has been trained."""
    monkeypatch.setattr(images, "READ_AHEAD", 1)
    for behind_barrier in (True, False):
        conversations = Conversations(model_paths("qwen3_vl"))
        image_pixels = conversations.image_pixels
        first, second, third = conversations.files
        pixels_by_digest = image_pixels.pixels_of(conversations.files)
        kept_bytes = sum(pixels_by_digest[digest].pixel_values.nbytes for digest in (first, second))
        monkeypatch.setattr(images, "PIXEL_CACHE_BYTES", kept_bytes)

        image_pixels = ImagePixels(model_paths("qwen3_vl"), conversations.layout)
        image_pixels.add_files({first: conversations.files[first]})
        part = {"a": [turn_with(image_ids(first, 6))]}
        assert image_pixels.read_images_of_episodes(part, behind_barrier=behind_barrier) == {}
        image_pixels.add_files(conversations.files)
        part = {"b": [turn_with(image_ids(second, 8)), turn_with(image_ids(third, 6))]}
        assert image_pixels.read_images_of_episodes(part, behind_barrier=behind_barrier) == {}
        assert (first in image_pixels._cache, second in image_pixels._cache) == (behind_barrier, True)
        monkeypatch.setattr(images, "PIXEL_CACHE_BYTES", 2 << 30)


def test_a_lack_of_memory_names_the_image_and_advice(
    model_paths: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    conversations = Conversations(model_paths("qwen3_vl"))
    digest = next(iter(conversations.files))
    monkeypatch.setattr(pixels_module, "decode_stored", mock.Mock(side_effect=MemoryError))
    advice = f"image {digest}: there is too little memory to decode the image .*; free memory, or set model"
    with pytest.raises(AsyncrlError, match=advice) as caught:
        conversations.image_pixels.read_images_of_episodes({"a": [turn_with(image_ids(digest, 6))]})
    assert lacks_memory(caught.value), "in a micro-batch, new processes halve the micro-batch"


def test_each_step_of_reading_a_part_is_announced(
    model_paths: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part may have a thousand images, each of which takes less than READ_POLL_SECONDS."""
    conversations = Conversations(model_paths("qwen3_vl"))
    monkeypatch.setattr(images, "READ_AHEAD", 1)
    monkeypatch.setattr(images, "READ_POLL_SECONDS", 60.0)
    announced = list[str]()
    image_pixels = ImagePixels(model_paths("qwen3_vl"), conversations.layout, 60.0, announced.append)
    image_pixels.add_files(conversations.files)
    turns_by_uid = {str(index): [turn_with(row)] for index, row in enumerate(conversations.sequences)}
    assert image_pixels.read_images_of_episodes(turns_by_uid) == {}
    assert announced == [images.READ_WAIT] * len(conversations.files) + [""]


def test_the_wait_for_images_has_a_name_and_an_end(
    model_paths: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    conversations = Conversations(model_paths("qwen3_vl"))
    may_decode = threading.Event()
    decode = pixels_module.decode_stored
    monkeypatch.setattr(pixels_module, "decode_stored", lambda file: may_decode.wait(60) and decode(file))
    monkeypatch.setattr(images, "READ_POLL_SECONDS", 0.001)
    announced = list[str]()

    def announce(wait_name: str) -> None:
        announced.append(wait_name)
        if len(announced) == 3:
            may_decode.set()

    patient = ImagePixels(model_paths("qwen3_vl"), conversations.layout, 60.0, announce)
    patient.add_files(conversations.files)
    digest = next(iter(conversations.files))
    patient.pixels_of([digest])
    assert announced[:3] == [images.READ_WAIT] * 3 and announced[-1] == ""

    may_decode.clear()
    hurried = ImagePixels(model_paths("qwen3_vl"), conversations.layout, 0.0)
    hurried.add_files(conversations.files)
    try:
        with pytest.raises(DeadlineError, match="waited 0 s for images to be decoded"):
            hurried.pixels_of([digest])
    finally:
        may_decode.set()


def episodes_of(conversations: Conversations, path: str) -> list[Episode]:
    """Return an episode of each sequence, whose last two ids are the model's."""
    with torch.no_grad():
        logprobs = plain_logprobs(plain_model(path, torch.float64), path, conversations)
    sequences = conversations.sequences
    rewards = [float(index % 2) for index in range(len(sequences))]
    results = tuple(EpisodeResult(reward, 2, (reward,)) for reward in rewards)
    episodes = []
    for index, sequence in enumerate(sequences):
        *context, first, second = sequence.tolist()
        sampled_logprobs = tuple(logprobs[index][-2:].tolist())
        span = VersionSpan(0, 2, 0, 0)
        generation = Generation((first, second), sampled_logprobs, (span,), StopReason.STOP)
        turns = [Turn(0, tuple(context), generation)]
        episodes.append((make_row(f"g/{index}", "g", results, index, turns, 1.0), turns))
    return episodes


def learn(world: World, path: str, sections: dict[str, Any], dtype: str) -> dict[str, Tensor]:
    """Return the gradients of a batch: the only text is on the last of two ranks."""
    conversations = Conversations(path)
    episodes = episodes_of(conversations, path)
    texts = [episode for episode in episodes if not digests_of(episode[1])]
    pictures = [episode for episode in episodes if digests_of(episode[1])]
    assert texts and pictures

    learner = make_learner(tiny_config(path, model={"train_vision": True}, **sections), world, dtype)
    if world.rank == 0:
        learner.image_pixels.add_files(conversations.files)
    cut = [[pictures, texts]] if world.size == 2 else [[pictures + texts]]
    return final_gradients(learner, cut)


SECTIONS: dict[str, dict[str, Any]] = {
    "streamed": {"trainer": {"packing": "tree", "micro_batch_tokens": 64}},
    "with critic and reference": {
        "trainer": {"packing": "padded", "micro_batch_tokens": 64},
        "algorithm": {"advantage": "gae"},
        "kl": {"where": "loss", "coef": 0.1},
        "buffer": {"filter_zero_variance": False},
    },
}


def learn_in_folder(name: str, dtype: str, world: World, folder: Path) -> dict[str, Tensor]:
    return learn(world, str(folder.parent / "model"), SECTIONS[name], dtype)


@pytest.mark.full
@pytest.mark.parametrize(("dtype", "limit"), [("float64", 1e-12), ("float32", 1e-6)])
@pytest.mark.parametrize("name", [*SECTIONS])
def test_a_rank_without_images_gives_the_gradients_of_one_rank(
    name: str, dtype: str, limit: float, world: World, tmp_path: Path
) -> None:
    path = build_vision_model("qwen3_vl", tmp_path / "model")
    expected = learn(world, path, SECTIONS[name], dtype)
    gradients = run_ranks(2, partial(learn_in_folder, name, dtype), tmp_path / "ranks")
    tower_gradients, expected_tower = (
        {parameter: gradient for parameter, gradient in all_gradients.items() if ".visual." in parameter}
        for all_gradients in (gradients, expected)
    )
    assert expected_tower
    # Measured in float32: at most 1.8e-8, of the tower 2.8e-8; in float64 2.0e-17.
    assert difference(gradients, expected) < limit
    assert difference(tower_gradients, expected_tower) < limit


def test_adapters_learn_from_images_and_the_tower_stays(
    model_paths: Callable[[str], str], world: World
) -> None:
    """They begin with B = 0: with the loss of the model without adapters, whose gradients the gradients of
    B follow from. A is as at the start, and gets no gradient yet."""
    path = model_paths("qwen3_vl")
    conversations = Conversations(path)
    selected = conversations.select("packed")
    plain = load_policy(ModelConfig(path=path, dtype="float64"), world)
    use_forest_attention(plain.lm)
    expected_loss = weighted_sum(plain(selected).logp)
    expected_loss.backward()
    weight_gradients = policy_gradients(plain)

    config = tiny_config(path, model={"lora_rank": 2, "lora_alpha": 6.0}, trainer={"packing": "packed"})
    learner = make_learner(config, world)
    parameters = dict(learner.policy.lm.named_parameters())
    loss = weighted_sum(learner.policy(selected).logp)
    assert loss.item() == pytest.approx(expected_loss.item(), abs=1e-10)
    loss.backward()
    gradients = policy_gradients(learner.policy)

    adapters = {name for name in parameters if name.endswith(("lora_a", "lora_b"))}
    assert gradients.keys() == adapters
    assert len(adapters) == 2 * 7 * 2, "A and B of each of seven layers in both blocks of the text part"
    assert not any(".visual." in name for name in adapters)
    expected_gradients = {}
    for name in adapters:
        stem, _, role = name.rpartition(".")
        if role == "lora_a":
            assert not gradients.pop(name).any()
        else:
            lora_a = parameters[f"{stem}.lora_a"].full_tensor().detach()
            expected_gradients[name] = 6.0 / 2 * weight_gradients[f"{stem}.weight"] @ lora_a.T
    assert relative_distance(gradients, expected_gradients) < 1e-6  # norms compute in float32

    frozen = {name: parameters[name].full_tensor().clone() for name in parameters.keys() - adapters}
    assert TOWER_WEIGHT in frozen
    learner.image_pixels.add_files(conversations.files)
    run_batch(learner, [[episodes_of(conversations, path)]])
    with torch.no_grad():
        loss_after = weighted_sum(learner.policy(selected).logp)
    assert abs(loss_after.item() - expected_loss.item()) > 1e-3
    assert all(torch.equal(parameters[name].full_tensor(), tensor) for name, tensor in frozen.items())


@pytest.mark.full
def test_a_trained_tower_is_published_exported_and_saved(world: World, tmp_path: Path) -> None:
    path = build_vision_model("qwen3_vl", tmp_path / "model")
    conversations = Conversations(path)
    learner = make_learner(tiny_config(path, model={"train_vision": True}), world, "float32")
    learner.image_pixels.add_files(conversations.files)
    run_batch(learner, [[episodes_of(conversations, path)]])

    parameters = {name: parameter.full_tensor() for name, parameter in learner.policy.lm.named_parameters()}
    published = stored(learner.policy)
    assert published.keys() == trained_shapes(path, train_vision=True).keys()
    model = plain_model(path, torch.float32)
    assert not torch.equal(model.state_dict()[TOWER_WEIGHT], parameters[TOWER_WEIGHT])
    replace_weights(model, published, checkpoint_pieces(model, model.state_dict(), stored_tensors(path)))
    exported = plain_model(export(tmp_path, learner.policy, world, path), torch.float32)
    for reader in (model, exported):
        read_parameters = dict(reader.named_parameters())
        assert all(torch.equal(read_parameters[name], tensor) for name, tensor in parameters.items())

    saved = save_checkpoint(
        tmp_path / "checkpoints", learner, CheckpointManifest(step=1, trainer_epoch=0), hf=False
    )
    restored = make_learner(learner.config, world, "float32")
    load_checkpoint(saved, restored)
    restored_parameters = dict(restored.policy.lm.named_parameters())
    assert all(
        torch.equal(restored_parameters[name].full_tensor(), tensor) for name, tensor in parameters.items()
    )
    assert restored.optimizer.state[restored_parameters[TOWER_WEIGHT]]["exp_avg"].full_tensor().any()


@pytest.mark.full
def test_a_step_without_images_leaves_a_trained_tower_as_it_is(
    model_paths: Callable[[str], str], world: World
) -> None:
    path = model_paths("qwen3_vl")
    conversations = Conversations(path)
    texts = [episode for episode in episodes_of(conversations, path) if not digests_of(episode[1])]
    config = ModelConfig(path=path, dtype="float32", train_vision=True)
    policy = load_policy(config, world)
    (row, turns) = texts[0]
    sample = training_sample(row, turns, 0, 4, aggregations.get("token_mean"))
    policy(collate([sample], torch.float32).selected).logp.sum().backward()
    gradients = policy_gradients(policy)
    assert gradients and not any(".visual." in name for name in gradients)
    weighted_sum(policy(conversations.select("padded")).logp).backward()
    assert TOWER_WEIGHT in policy_gradients(policy)


def test_sequence_parallel_does_not_go_with_images(model_paths: Callable[[str], str]) -> None:
    path = model_paths("qwen3_vl")
    assert decide_on_images(tiny_config(path)).model.read_images
    assert EpisodeParts(tiny_config(path)).require_images() == read_image_layout(path)

    config = decide_on_images(tiny_config(path, trainer={"ranks": 2, "sequence_parallel": 2}))
    parts = EpisodeParts(config)
    assert not config.model.read_images and parts.image_layout is None, "images of tools become notes"
    complaint = r"trainer\.sequence_parallel=2 does not work with images; set trainer\.sequence_parallel=1"
    with pytest.raises(ConfigError, match=complaint):
        parts.require_images()

    with pytest.raises(
        ConfigError, match=r"model\.max_image_tokens is set, but trainer\.sequence_parallel=2"
    ):
        decide_on_images(
            tiny_config(path, trainer={"ranks": 2, "sequence_parallel": 2}, model={"max_image_tokens": 64})
        )


@pytest.mark.full
def test_a_reference_and_a_critic_must_read_images_like_the_policy(model_paths: Callable[[str], str]) -> None:
    path = model_paths("qwen3_vl")
    complaints = {
        model_paths("glm4v"): r"kl\.reference: \S+ uses different patches or pixel values from \S+; use a",
        str(DEMO_MODEL): r"the model \(type \w+\) reads text only",
    }
    for reference, complaint in complaints.items():
        config = decide_on_images(tiny_config(path, kl={"where": "loss", "reference": reference}))
        assert not config.model.read_images, "images of tools become notes"
        with pytest.raises(ConfigError, match=complaint):
            EpisodeParts(config).require_images()

    config = tiny_config(path, algorithm={"advantage": "gae"}, critic={"path": str(DEMO_MODEL)})
    assert not decide_on_images(config).model.read_images


def test_the_servers_of_a_scorer_must_read_images_like_the_trainer(
    model_paths: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the scorer's own files, not by those of the working directory."""
    path = model_paths("qwen3_vl")
    scorer_path = tmp_path / "scorer"
    shutil.copytree(path, scorer_path)
    config_file = scorer_path / "config.json"
    settings = json.loads(config_file.read_text())
    settings["vision_config"]["rope_parameters"] = {"rope_type": "axial", "rope_theta": 10.0}
    config_file.write_text(json.dumps(settings))
    monkeypatch.chdir(scorer_path)

    keys = {"kl": {"where": "loss", "coef": 1.0}}
    escaped_path = re.escape(str(scorer_path))
    complaint = rf"scorers\.teacher: for {escaped_path}, .* vision_config in config\.json has 10"
    with pytest.raises(ConfigError, match=complaint):
        check_images(tiny_config(path, **keys, scorers={"teacher": {"path": str(scorer_path)}}))

    check_images(tiny_config(path, **keys, scorers={"teacher": {"urls": ["http://elsewhere"]}}))
    complaint = rf"scorers\.teacher: for a model like {escaped_path}, "
    with pytest.raises(ConfigError, match=complaint):
        check_images(
            tiny_config(str(scorer_path), **keys, scorers={"teacher": {"urls": ["http://elsewhere"]}})
        )


@pytest.mark.full
def test_an_architecture_of_text_alone_reads_no_images(tmp_path: Path) -> None:
    path = build_vision_model("qwen3_5", tmp_path / "model")
    config_file = tmp_path / "model" / "config.json"
    settings = json.loads(config_file.read_text())
    config_file.write_text(json.dumps(settings | {"architectures": ["Qwen3_5ForCausalLM"]}))
    config = decide_on_images(tiny_config(path))
    assert not config.model.read_images
    with pytest.raises(ConfigError, match="names a text-only class, so the model reads no images"):
        EpisodeParts(config).require_images()


def test_adapters_do_not_train_the_tower() -> None:
    with pytest.raises(ConfigError, match=r"model\.train_vision=true does not work with adapters"):
        tiny_config("model", model={"train_vision": True, "lora_rank": 4})


def test_a_model_of_text_has_no_tower_to_train() -> None:
    config = tiny_config(str(DEMO_MODEL), model={"train_vision": True})
    complaint = r"model\.train_vision=true: .* reads text only; .*; or set model\.train_vision=false"
    with pytest.raises(ConfigError, match=complaint):
        check_model(config)


@pytest.mark.full
def test_patches_count_in_the_operations_of_a_step(model_paths: Callable[[str], str], world: World) -> None:
    path = model_paths("qwen3_vl")
    counts = {
        train_vision: FlopCount.of(
            load_policy(ModelConfig(path=path, dtype="float32", train_vision=train_vision), world).lm
        )
        for train_vision in (False, True)
    }
    tower = plain_model(path, torch.float32).model.visual
    matrix_numbers = sum(weight.numel() for weight in tower.parameters() if weight.ndim > 1)
    embedding_numbers = tower.pos_embed.weight.numel()
    assert counts[False].patch == 2 * (matrix_numbers - embedding_numbers)
    assert counts[True].patch == 3 * counts[False].patch
    assert counts[True].body == counts[False].body
    positions = np.arange(5)
    assert counts[True].total_flops(positions, 2, patches=7) - counts[True].total_flops(positions, 2) == (
        pytest.approx(7 * counts[True].patch)
    )
