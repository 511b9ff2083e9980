"""Layouts of images: the sizes and positions of transformers' own processors and models."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForImageTextToText
from transformers.models.glm4v.image_processing_pil_glm4v import smart_resize as glm_resize
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as qwen_resize

from asyncrl.errors import ConfigError
from asyncrl.types import ImageRef
from asyncrl.vision.image_ids import DIGEST_DIGITS, find_runs, image_ids, with_placeholders
from asyncrl.vision.layout import ImageLayout, place_images, read_image_layout
from asyncrl.vision.positions import rope_positions
from tests.fakes.layouts import qwen_layout
from tests.fakes.tiny_families import build_family

QWEN = qwen_layout(placeholder=9, patch_size=14, min_side=56, max_side=280)
GLM = ImageLayout(
    placeholder=9,
    scaling="glm",
    patch_size=14,
    merge_size=2,
    temporal_patch_size=2,
    min_pixels=112 * 112,
    max_pixels=28 * 28 * 200,
)


def resize(layout: ImageLayout, height: int, width: int) -> tuple[int, int]:
    """Return the size that transformers gives an image."""
    limits = {"factor": 28, "min_pixels": layout.min_pixels, "max_pixels": layout.max_pixels}
    if layout.scaling == "glm":
        return glm_resize(num_frames=2, height=height, width=width, temporal_factor=2, **limits)
    return qwen_resize(height, width, **limits)


@pytest.mark.parametrize("layout", [QWEN, GLM], ids=["qwen", "glm"])
def test_sizes_equal_those_of_transformers(layout: ImageLayout) -> None:
    rng = np.random.default_rng(0)
    for height, width in rng.integers(8, 1200, (2000, 2)).tolist():
        final_size = layout.final_size(height, width)
        assert final_size == resize(layout, *final_size), "engines would scale the image again"
        first_size = resize(layout, height, width)
        if first_size == resize(layout, *first_size):
            assert final_size == first_size


def test_a_narrow_image_is_refused() -> None:
    with pytest.raises(ValueError, match="the longer side is 300 times the shorter side"):
        QWEN.final_size(10, 3000)


def test_a_limit_of_ids_scales_images_down() -> None:
    for layout in (QWEN.with_max_ids(16), GLM.with_max_ids(16)):
        rows, columns = layout.grid(*layout.final_size(1000, 900))
        assert 9 <= rows * columns <= 16


@pytest.mark.parametrize("family", ["qwen3_vl", "glm4v"])
def test_positions_equal_those_of_transformers(tmp_path: Path, family: str) -> None:
    model = AutoModelForImageTextToText.from_pretrained(build_family(family, tmp_path))
    merge_size = model.config.vision_config.spatial_merge_size
    placeholder = model.config.image_token_id
    rng = np.random.default_rng(0)
    for image_count in (0, 1, 3):
        ids: list[int] = []
        grids = {}
        for image in range(image_count):
            digest = f"{image:0{DIGEST_DIGITS}x}"
            rows, columns = rng.integers(2, 6, 2).tolist()
            grids[digest] = (rows, columns)
            ids += [*rng.integers(10, 100, image + 1).tolist(), *image_ids(digest, rows * columns)]
        row = np.array([*ids, 11, 12, 13])

        model_ids = torch.from_numpy(with_placeholders(row, placeholder))[None]
        model_grids = [[1, rows * merge_size, columns * merge_size] for rows, columns in grids.values()]
        expected, _ = model.model.get_rope_index(
            model_ids,
            mm_token_type_ids=(model_ids == placeholder).int(),
            image_grid_thw=torch.tensor(model_grids) if model_grids else None,
        )
        assert np.array_equal(rope_positions(row, grids), expected[:, 0].numpy())


def test_placeholders_become_runs() -> None:
    images = [ImageRef("1" * DIGEST_DIGITS, 56, 84), ImageRef("2" * DIGEST_DIGITS, 56, 56)]
    ids = place_images((5, 9, 6, 9), images, QWEN)
    assert [(run.start, run.end) for run in find_runs(ids)] == [(1, 7), (8, 12)]

    for ids_with_other_count in ((5, 9, 6), (9, 9, 9)):
        with pytest.raises(ConfigError, match="image placeholders for 2 images; use a template that"):
            place_images(ids_with_other_count, images, QWEN)


def test_a_prompt_with_a_placeholder_of_its_own_is_refused() -> None:
    layout = replace(QWEN, video_placeholder=10)
    assert layout.placeholder_complaint((5, 8, 6)) == ""
    assert "the token 9, which stands for images; remove image tokens" in layout.placeholder_complaint((5, 9))
    assert "the token 10, which stands for videos; remove video tokens" in layout.placeholder_complaint(
        (5, 10)
    )


def test_layouts_are_read_from_model_directories(tmp_path: Path) -> None:
    layout = read_image_layout(str(build_family("qwen3_vl", tmp_path)))
    assert (layout.factor, layout.scaling, layout.max_pixels) == (32, "qwen", 256 * 256)

    # As newer versions of transformers write it.
    processor = tmp_path / "preprocessor_config.json"
    settings = json.loads(processor.read_text())
    processor.unlink()
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": settings}))
    assert read_image_layout(str(tmp_path)) == layout

    (tmp_path / "processor_config.json").unlink()
    with pytest.raises(ConfigError, match=r"its image processor is missing; copy preprocessor_config\.json"):
        read_image_layout(str(tmp_path))


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"model_type": "llama"}, "reads text only"),
        ({"model_type": "gemma3", "vision_config": {}}, "attend to each other in both directions"),
        ({"model_type": "new", "vision_config": {}}, "its layout of images is not known"),
    ],
)
def test_models_that_read_no_images_are_refused(
    tmp_path: Path, config: dict[str, object], problem: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=problem):
        read_image_layout(str(tmp_path))
