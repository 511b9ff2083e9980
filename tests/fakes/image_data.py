"""Images of tests, and a tiny model directory whose processor reads images."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image

from asyncrl.vision.files import StoredImage, prepare_decoded
from asyncrl.vision.layout import ImageLayout
from asyncrl.wire.messages.shared import ImageRequest
from tests.fakes.layouts import qwen_layout

LAYOUT = qwen_layout(placeholder=258, patch_size=16, min_side=64, max_side=256)
IMAGE_TOKENS = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def image_file(
    width: int = 64,
    height: int = 64,
    color: Any = "red",
    kind: str = "PNG",
    mode: str = "RGB",
    **options: Any,
) -> bytes:
    """Return an image file of one colour. By default LAYOUT leaves the image as it is, with 4 ids."""
    return encode_image(PIL.Image.new(mode, (width, height), color), kind, **options)


def encode_image(image: PIL.Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """Return the file of an image in a format of Pillow, with the format's options."""
    file = io.BytesIO()
    image.save(file, format=kind, **options)
    return file.getvalue()


def animated_file(kind: str = "GIF") -> bytes:
    """Return the file of an animation of 3 frames."""
    first_frame, *later_frames = (PIL.Image.new("RGB", (64, 48), color) for color in ("red", "blue", "green"))
    return encode_image(first_frame, kind, save_all=True, append_images=later_frames)


def noise(height: int, width: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    """Return random pixels, [height, width, channels] of uint8; [height, width] for one channel."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return pixels[..., 0] if channels == 1 else pixels


def noise_image(layout: ImageLayout, rows: int, columns: int, seed: int) -> StoredImage:
    """Return an image of random pixels with this many merged patches."""
    pixels = noise(rows * layout.factor, columns * layout.factor, seed=seed)
    return prepare_decoded(PIL.Image.fromarray(pixels), layout)


def make_image_model(directory: Path) -> None:
    """Let the tiny chat model in a directory read images, as LAYOUT says; its weights stay those of a model
    of text."""
    from transformers import AutoTokenizer  # here: importing it takes seconds

    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.add_tokens(list(IMAGE_TOKENS), special_tokens=True)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)

    config = json.loads((directory / "config.json").read_text())
    config |= {
        "model_type": "qwen3_vl",
        "vision_config": {"patch_size": LAYOUT.patch_size, "spatial_merge_size": LAYOUT.merge_size},
        "image_token_id": tokenizer.convert_tokens_to_ids("<|image_pad|>"),
    }
    (directory / "config.json").write_text(json.dumps(config))
    write_image_processor(directory)


def write_image_processor(directory: Path, layout: ImageLayout = LAYOUT, **settings: Any) -> None:
    """Write the settings of an image processor that reads images as a layout of Qwen's kind says.
    `settings`: more of them."""
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": layout.patch_size,
        "merge_size": layout.merge_size,
        "temporal_patch_size": layout.temporal_patch_size,
        "size": {"shortest_edge": layout.min_pixels, "longest_edge": layout.max_pixels},
        **settings,
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))


async def refuse_request(request: ImageRequest) -> None:
    """Stand in for the coordinator of a worker whose episodes have no stored images."""
    raise AssertionError(f"image {request.digests[0]} is not here, and no coordinator can be asked")
