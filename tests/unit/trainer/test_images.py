"""The trainer reads images: each layout computes what transformers computes for single sequences."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from torch import Tensor

from asyncrl.config import ModelConfig, Packing
from asyncrl.model_class import auto_class_of, read_config
from asyncrl.trainer.attention import set_text_attention, use_forest_attention
from asyncrl.trainer.images import ImagePixels
from asyncrl.trainer.model import Policy, load_policy
from asyncrl.trainer.scores import Selected
from asyncrl.trainer.world import World
from asyncrl.vision.files import StoredImage, prepare_decoded
from asyncrl.vision.image_ids import FIRST_IMAGE_ID, find_runs, image_ids, with_placeholders
from asyncrl.vision.layout import ImageLayout, read_image_layout
from asyncrl.vision.pixels import PixelReader, Pixels
from tests.fakes.tiny_families import NORMALIZED, build_family

pytestmark = pytest.mark.slow

FAMILIES = ["qwen3_vl", pytest.param("qwen3_5", marks=pytest.mark.full)]
FAMILIES += [pytest.param("glm4v", marks=pytest.mark.full)]
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


def noise_image(layout: ImageLayout, rows: int, columns: int, seed: int) -> StoredImage:
    """Return an image of random pixels with this many merged patches."""
    shape = (rows * layout.factor, columns * layout.factor, 3)
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    return prepare_decoded(PIL.Image.fromarray(pixels), layout)


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

    def select(self, packing: Packing, sequences: Sequence[np.ndarray] | None = None) -> Selected:
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
            image_pixels=self.image_pixels,
        )


def plain_model(path: str, dtype: torch.dtype) -> Any:
    return auto_class_of(read_config(path)).from_pretrained(path, dtype=dtype).eval()


def plain_logprobs(model: Any, path: str, conversations: Conversations) -> Tensor:
    """Return the log-probs of the selected tokens, by forwards of transformers alone, sequence by
    sequence."""
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

    return torch.cat(logprobs)


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
    ("dtype", "limit", "gradient_limit"), [("float32", 1e-5, 1e-5), ("float64", 1e-10, 1e-6)]  # norms compute in float32
)
@pytest.mark.parametrize("family", FAMILIES)
def test_layouts_compute_what_transformers_computes(
    family: str,
    dtype: str,
    limit: float,
    gradient_limit: float,
    model_paths: Callable[[str], str],
    world: World,
) -> None:
    path = model_paths(family)
    conversations = Conversations(path)
    model = plain_model(path, getattr(torch, dtype))
    expected = plain_logprobs(model, path, conversations)
    weighted_sum(expected).backward()
    expected_gradients = {name: parameter.grad for name, parameter in model.named_parameters()}

    policy = load_policy(ModelConfig(path=path, dtype=dtype), world)
    for packing in LAYOUTS:
        if packing == "packed":
            use_forest_attention(policy.lm)
        logprobs = policy(conversations.select(packing)).logp
        weighted_sum(logprobs).backward()
        gradients = policy_gradients(policy)

        assert (logprobs - expected).abs().max() < limit, packing
        assert relative_distance(gradients, expected_gradients) < gradient_limit, packing
        assert gradients and not any(".visual." in name for name in gradients), "the tower is frozen"
