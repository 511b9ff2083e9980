"""Images of tests, and a tiny model directory whose processor reads images."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import PIL.Image

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
    file = io.BytesIO()
    PIL.Image.new(mode, (width, height), color).save(file, format=kind, **options)
    return file.getvalue()


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


def write_image_processor(directory: Path) -> None:
    """Write the settings of an image processor that reads images as LAYOUT says."""
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": LAYOUT.patch_size,
        "merge_size": LAYOUT.merge_size,
        "temporal_patch_size": LAYOUT.temporal_patch_size,
        "size": {"shortest_edge": LAYOUT.min_pixels, "longest_edge": LAYOUT.max_pixels},
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))


async def refuse_request(request: ImageRequest) -> None:
    """Stand in for the coordinator of a worker whose episodes have no stored images."""
    raise AssertionError(f"image {request.digests[0]} is not here, and no coordinator can be asked")
