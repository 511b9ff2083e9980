"""Says how a model's processor lays out images: to which size it scales them, and how many ids they get.

The files of the model say it: image_token_id in config.json, patches and limits in preprocessor_config.json
(or, with newer versions of transformers, processor_config.json). Nothing here imports transformers: its
processors, with which the pixels are read (pixels.py), take seconds to import.

    image of h x w pixels ──final_size──► multiples of `factor` within the limits ──run_length──► ids

An image is scaled once, when it is prepared (files.py). The processors of engines leave the final size as it
is, so engine and trainer read the same pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec

from asyncrl.errors import ConfigError
from asyncrl.types import ImageRef
from asyncrl.vision.image_ids import MIN_RUN_IDS, image_ids

Scaling = Literal["qwen", "glm"]

# The processors whose images are laid out as a grid of merged patches, and how each scales images.
SCALINGS: dict[str, Scaling] = {
    "Qwen2VLImageProcessor": "qwen",
    "Qwen2_5_VLImageProcessor": "qwen",
    "Qwen3VLImageProcessor": "qwen",
    "Glm4vImageProcessor": "glm",
    "Glm46VImageProcessor": "glm",
}
DEFAULT_LIMITS: dict[Scaling, tuple[int, int]] = {  # pixels
    "qwen": (56 * 56, 28 * 28 * 1280),
    "glm": (112 * 112, 28 * 28 * 15_000),
}
# Types of models whose images asyncrl reads: the positions of image ids are those of a grid.
GRID_MODELS = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "glm4v",
    "glm4v_moe",
    "glm46v",
)
# Why the images of other types of models are not read.
REFUSALS = {
    "gemma3": "the ids of an image attend to each other in both directions",
    "gemma3n": "the ids of an image attend to each other in both directions",
    "gemma4": "the ids of an image attend to each other in both directions",
    "mistral3": "the rows of an image's patches are separated by tokens",
    "pixtral": "the rows of an image's patches are separated by tokens",
    "llama4": "an image is cut into tiles",
    "idefics3": "an image is cut into tiles",
    "smolvlm": "an image is cut into tiles",
    "internvl": "an image is cut into tiles",
    "mllama": "images are read by cross attention",
}
SERVED_ROPE_THETA = 10_000.0  # of vision towers in SGLang, whatever config.json says
MAX_SCALINGS = 10  # until a size does not change any more
MAX_ASPECT_RATIO = 200  # longer side to shorter side


class ImageLayout(msgspec.Struct, frozen=True):
    """How a model reads images. A side of a scaled image is a multiple of `factor`; a merged patch of
    factor x factor pixels has one id. `placeholder`: the id that stands for a merged patch;
    `video_placeholder`: the same for videos, if the model reads videos. `patch_size`: side in pixels;
    `merge_size`: patches along a side of a merged patch; `temporal_patch_size`: in frames. `min_pixels`,
    `max_pixels`: limits of the scaled image, see `limit_scale`."""

    placeholder: int
    scaling: Scaling
    patch_size: int
    merge_size: int
    temporal_patch_size: int
    min_pixels: int
    max_pixels: int
    video_placeholder: int | None = None

    @property
    def placeholders(self) -> tuple[int, ...]:
        """Return the ids at which the model or its engine looks for an image or a video."""
        return tuple(token for token in (self.placeholder, self.video_placeholder) if token is not None)

    @property
    def factor(self) -> int:
        """Return the side of a merged patch, in pixels."""
        return self.patch_size * self.merge_size

    @property
    def smallest_limit(self) -> int:
        """Return the smallest argument of `with_max_ids`. Scaled sides are rounded down, to half the ids at
        worst, and an image of less than `min_pixels` would be scaled up again by engines."""
        return 2 * math.ceil(self.min_pixels / (self.limit_scale * self.factor**2))

    def with_max_ids(self, max_ids: int) -> ImageLayout:
        """Return the layout that scales larger images down to at most `max_ids` ids; very narrow images have
        more. `max_ids`: at least `smallest_limit`."""
        max_pixels = min(self.max_pixels, self.limit_scale * max_ids * self.factor**2)
        return msgspec.structs.replace(self, max_pixels=max_pixels)

    @property
    def limit_scale(self) -> int:
        """Return how often GLM's limits count each pixel: a still image is repeated for each frame."""
        return self.temporal_patch_size if self.scaling == "glm" else 1

    def final_size(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width after scaling, which the processors of engines leave as they are.
        ValueError for an image that is too narrow.

        Of a very narrow image transformers' result would be scaled again: then the result of the result."""
        size = (height, width)
        for _ in range(MAX_SCALINGS):
            scaled_size = self._scaled_size(*size)
            if scaled_size == size:
                return size
            size = scaled_size
        raise ValueError("the model's processor would rescale it at any size")

    def _scaled_size(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width as `smart_resize` of the model's processor in transformers computes
        them."""
        factor = self.factor
        if self.scaling == "glm" and min(height, width) < factor:
            enlargement = max(factor / height, factor / width)
            height = int(height * enlargement)
            width = int(width * enlargement)

        ratio = max(height, width) / min(height, width)
        if ratio > MAX_ASPECT_RATIO:
            raise ValueError(
                f"the longer side is {ratio:.0f} times the shorter side ({MAX_ASPECT_RATIO} at most)"
            )

        scaled_height = round(height / factor) * factor
        scaled_width = round(width / factor) * factor
        pixels = height * width * self.limit_scale
        scaled_pixels = scaled_height * scaled_width * self.limit_scale
        if scaled_pixels > self.max_pixels:
            divisor = math.sqrt(pixels / self.max_pixels)
            scaled_height = max(factor, math.floor(height / divisor / factor) * factor)
            scaled_width = max(factor, math.floor(width / divisor / factor) * factor)
        elif scaled_pixels < self.min_pixels:
            multiplier = math.sqrt(self.min_pixels / pixels)
            scaled_height = math.ceil(height * multiplier / factor) * factor
            scaled_width = math.ceil(width * multiplier / factor) * factor

        return scaled_height, scaled_width

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of merged patches of a scaled image."""
        return height // self.factor, width // self.factor

    def run_length(self, height: int, width: int) -> int:
        """Return the number of ids of a scaled image."""
        rows, columns = self.grid(height, width)
        return rows * columns

    def placeholder_complaint(self, ids: Sequence[int]) -> str:
        """Return what is wrong with a prompt that has a placeholder itself, where the model would look for an
        image or a video; "" for other prompts."""
        for medium, placeholder in (("image", self.placeholder), ("video", self.video_placeholder)):
            if placeholder in ids:
                return (
                    f"the prompt has the token {placeholder}, which stands for {medium}s; remove {medium} "
                    "tokens from the text"
                )
        return ""


def place_images(ids: Sequence[int], images: Sequence[ImageRef], layout: ImageLayout) -> tuple[int, ...]:
    """Put the ids of images, in order, in the place of the placeholders among `ids`. ConfigError for another
    number of placeholders: the template leaves out images, or writes them twice."""
    placeholder_count = sum(token == layout.placeholder for token in ids)
    if placeholder_count != len(images):
        raise ConfigError(
            f"the chat template writes {placeholder_count} image placeholders for {len(images)} images; "
            "use a template that writes each image of all messages once"
        )
    if not images:
        return tuple(ids)

    placed_ids: list[int] = []
    remaining_images = iter(images)
    for token in ids:
        if token == layout.placeholder:
            image = next(remaining_images)
            placed_ids += image_ids(image.digest, layout.run_length(image.height, image.width))
        else:
            placed_ids.append(token)

    return tuple(placed_ids)


def is_vision_model(model_directory: str) -> bool:
    """Return whether the model in a directory has a vision tower; False without a readable config.json."""
    with suppress(ConfigError):
        return "vision_config" in _read_object(Path(model_directory) / "config.json")
    return False


def difference_of_servers(model_directory: str, layout: ImageLayout) -> str:
    """Return what SGLang servers do differently from the trainer when the model in a directory reads images;
    "" for nothing."""
    if layout.scaling != "qwen":
        return (
            "SGLang servers tokenize prompts with images again, perhaps into other tokens than the trainer's"
        )

    vision_config = _read_object(Path(model_directory) / "config.json")["vision_config"]
    rope_parameters = vision_config.get("rope_scaling") or vision_config.get("rope_parameters") or {}
    rope_theta = rope_parameters.get("rope_theta") or vision_config.get("rope_theta") or SERVED_ROPE_THETA
    if rope_theta != SERVED_ROPE_THETA:
        return (
            f"SGLang servers compute the vision tower with rope_theta={SERVED_ROPE_THETA:g}, but "
            f"vision_config in config.json has {rope_theta}"
        )
    return ""


def read_image_layout(model_directory: str) -> ImageLayout:
    """Return how the model in a directory reads images. ConfigError for a model of text, for a model whose
    images asyncrl does not read, and for a directory without the files of the processor."""
    directory = Path(model_directory)
    config = _read_object(directory / "config.json")
    model_type = str(config.get("model_type", ""))
    if "vision_config" not in config:
        raise ConfigError(
            f"{directory}: the model (type {model_type}) reads text only; use a vision-language model, or "
            "remove the images from the data"
        )

    if model_type not in GRID_MODELS:
        reason = REFUSALS.get(model_type, "its layout of images is not known")
        raise ConfigError(
            f"{directory}: asyncrl does not read images with models of type {model_type} ({reason}); use one "
            f"of {', '.join(GRID_MODELS)}, or remove the images from the data"
        )

    processor = read_processor(directory)
    processor_name = str(processor.get("image_processor_type", "Qwen2VLImageProcessor")).removesuffix("Fast")
    if processor_name not in SCALINGS:
        raise ConfigError(
            f"{directory}: the image processor {processor_name} is not known to asyncrl; known processors: "
            f"{', '.join(SCALINGS)}"
        )

    scaling = SCALINGS[processor_name]
    limits = processor.get("size") or {}
    min_pixels, max_pixels = DEFAULT_LIMITS[scaling]
    layout = ImageLayout(
        placeholder=int(config["image_token_id"]),
        scaling=scaling,
        patch_size=int(processor.get("patch_size") or 14),
        merge_size=int(processor.get("merge_size") or 2),
        temporal_patch_size=int(processor.get("temporal_patch_size") or 2),
        min_pixels=int(processor.get("min_pixels") or limits.get("shortest_edge") or min_pixels),
        max_pixels=int(processor.get("max_pixels") or limits.get("longest_edge") or max_pixels),
        video_placeholder=config.get("video_token_id"),
    )

    vision_config = config["vision_config"]
    for name, value in (("patch_size", layout.patch_size), ("spatial_merge_size", layout.merge_size)):
        if vision_config.get(name, value) != value:
            raise ConfigError(
                f"{directory}: {name} is {vision_config[name]} in config.json, but {value} in the settings "
                "of the image processor; copy both files from the original model"
            )
    # The smallest image must have enough ids to spell its digest.
    smallest_run = layout.limit_scale * MIN_RUN_IDS * layout.factor**2
    return msgspec.structs.replace(layout, min_pixels=max(layout.min_pixels, smallest_run))


def layout_or_refusal(read_layout: Callable[[], ImageLayout]) -> tuple[ImageLayout | None, str]:
    """Return the layout and "", or None and the reason why the model reads no images: the text of the
    ConfigError of `read_layout`."""
    try:
        return read_layout(), ""
    except ConfigError as error:
        return None, str(error)


def read_processor(directory: Path) -> dict[str, Any]:
    """Return the settings of the image processor. ConfigError without any."""
    preprocessor_path = directory / "preprocessor_config.json"
    if preprocessor_path.is_file():
        return _read_object(preprocessor_path)

    processor_path = directory / "processor_config.json"
    if processor_path.is_file():
        settings = _read_object(processor_path).get("image_processor")
        if isinstance(settings, dict):
            return settings

    raise ConfigError(
        f"{directory}: the model reads images, but its image processor is missing; copy "
        "preprocessor_config.json from the original model"
    )


def _read_object(path: Path) -> dict[str, Any]:
    with ConfigError.instead_of(OSError, ValueError, text=f"{path}: not readable"):
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
