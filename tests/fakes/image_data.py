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
    """Put a tiny random Qwen3-VL, which reads images as LAYOUT says, into the directory of a chat model, of
    which only the tokenizer stays."""
    from transformers import (
        AutoConfig,
        AutoModelForImageTextToText,
        AutoTokenizer,
    )  # the import takes seconds

    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.add_tokens(list(IMAGE_TOKENS), special_tokens=True)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)

    config = AutoConfig.for_model(
        "qwen3_vl",
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
            "eos_token_id": tokenizer.eos_token_id,
        },
        vision_config={
            "hidden_size": 8,
            "intermediate_size": 8,
            "depth": 1,
            "num_heads": 1,
            "out_hidden_size": 16,
            "patch_size": LAYOUT.patch_size,
            "spatial_merge_size": LAYOUT.merge_size,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
    )
    AutoModelForImageTextToText.from_config(config).save_pretrained(directory)
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
