"""Write the data of examples/multiturn/images and its start model, in about ten seconds.

    python tools/prepare_pictures.py --out images

<out>/model/                      a random Qwen3-VL of 0.5M parameters, with tokenizer and image processor
<out>/demonstrations.parquet      conversations to imitate: where red is; what some corner shows
<out>/train.parquet, test.parquet questions in verl's layout, with the column `images`

With --shuffle-images, a question comes with the picture of another question, while the tool still shows the
true one. Nothing then tells where the red corner is: a control, which must stay at chance.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import sys
from pathlib import Path
from typing import Any

import PIL.Image
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

from asyncrl.data.rows import Row, verl_row, write_rows

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for examples
from examples.multiturn.images.pictures import CORNERS, Picture

ROOT = Path(__file__).resolve().parents[1]
TEXT_MODEL = ROOT / "examples/multiturn/calculator/model"  # its tokenizer
IMAGE_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
RED_ZOOMS = 0.4  # of the demonstrations zoom into the red corner on purpose, the others at random
# Standard deviation of the tower's position embeddings, about that of the patches' embeddings. With 0.02, the
# default, some models did not learn where a colour is, only that it is there.
POSITION_STD = 0.2
TEST_SEEDS = 1_000_000  # pictures of the test have seeds from here on

CONTENT = """\
{%- macro write(content) -%}
{%- if content is string %}{{ content }}{% else %}
{%- for part in content %}
{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}
{%- endfor %}
{%- endif %}
{%- endmacro -%}
"""


def png(image: PIL.Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def shown_picture(seed: int, shuffled: bool) -> Picture:
    """Return the picture that a question comes with: its own, or that of the next seed."""
    return Picture(seed + 1 if shuffled else seed)


def question_row(seed: int, shuffled: bool = False) -> Row:
    """Return a row in verl's layout: `<image>` in the prompt stands for the image of the column."""
    picture = Picture(seed)
    prompt = [{"role": "user", "content": f"<image>{picture.question}"}]
    row = verl_row("pictures", prompt, picture.answer, ability="vision", seed=seed)
    return row | {"images": [{"bytes": png(shown_picture(seed, shuffled).image)}]}


def red_corner_row(seed: int, shuffled: bool = False) -> Row:
    """Return a conversation to imitate that tells where red is, in the words of a call of the tool."""
    answer = json.dumps({"corner": CORNERS[Picture(seed).corner]})
    messages = [
        {"role": "user", "content": "<image>Where is the red corner?"},
        {"role": "assistant", "content": answer},
    ]
    images = [{"bytes": png(shown_picture(seed, shuffled).image)}]
    return {"data_source": "red_corner", "messages": messages, "images": images}


def demonstrated_corner(seed: int, picture: Picture) -> int:
    """Return the corner that a demonstration zooms into."""
    # The seed alone would give the random numbers that drew the picture: colours would tell the corner.
    rng = random.Random(f"zoom {seed}")
    return picture.corner if rng.random() < RED_ZOOMS else rng.randrange(len(CORNERS))


def zoom_row(seed: int, shuffled: bool = False) -> Row:
    """Return a conversation to imitate that zooms into a corner, mostly at random, and reads it correctly."""
    picture = Picture(seed)
    corner = demonstrated_corner(seed, picture)
    call = {"name": "zoom", "arguments": json.dumps({"corner": CORNERS[corner]})}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": f"<image>{picture.question}"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": "<image>"},
        {"role": "assistant", "content": picture.patterns[corner]},
    ]
    shown_images = (shown_picture(seed, shuffled).image, picture.zoomed(corner))
    images = [{"bytes": png(image)} for image in shown_images]
    return {"data_source": "pictures", "messages": messages, "images": images}


def write_model(directory: Path, seed: int) -> None:
    """Write a random Qwen3-VL, with the calculator's tokenizer and tokens for images."""
    tokenizer = AutoTokenizer.from_pretrained(TEXT_MODEL)
    tokenizer.add_tokens(list(IMAGE_TOKENS), special_tokens=True)
    text_template = str(tokenizer.chat_template)
    tokenizer.chat_template = CONTENT + text_template.replace(
        "{{ message.content }}", "{{ write(message.content) }}"
    )
    tokenizer.save_pretrained(directory)

    start, end, image, video = tokenizer.convert_tokens_to_ids(list(IMAGE_TOKENS))
    config = AutoConfig.for_model(
        "qwen3_vl",
        text_config={
            "vocab_size": -(-len(tokenizer) // 64) * 64,
            "hidden_size": 96,
            "initializer_range": 0.06,
            "intermediate_size": 192,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 24,
            "max_position_embeddings": 2048,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1000.0,
                "mrope_section": [6, 3, 3],
                "mrope_interleaved": True,
            },
            "tie_word_embeddings": True,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "hidden_size": 48,
            "intermediate_size": 96,
            "depth": 1,
            "num_heads": 2,
            "out_hidden_size": 96,
            "patch_size": 8,
            "num_position_embeddings": 16,
            "rope_parameters": {"rope_type": "axial", "rope_theta": 10.0},  # for 4 x 4 patches
            "deepstack_visual_indexes": [0],
        },
        tie_word_embeddings=True,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
    )
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    positions = model.model.visual.pos_embed.weight.data
    positions *= POSITION_STD / positions.std()
    model.save_pretrained(directory)

    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 8,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 32 * 32, "longest_edge": 32 * 32},  # of any picture, in pixels
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(processor, indent=2))


def write_example(
    out: Path, *, seed: int, shuffled: bool = False, demonstrations: int = 20_000, questions: int = 2000
) -> None:
    """Write the model, with random weights by `seed`, and the data. `shuffled`: with pictures of other
    questions. `demonstrations`: their number, of both kinds together."""
    first_demonstration = questions  # no demonstration shows a picture of a question
    demonstration_seeds = range(first_demonstration, first_demonstration + demonstrations)
    test_seeds = range(TEST_SEEDS, TEST_SEEDS + 256)
    (out / "model").mkdir(parents=True, exist_ok=True)
    demonstration_rows = (
        red_corner_row(seed, shuffled) if seed % 2 else zoom_row(seed, shuffled)
        for seed in demonstration_seeds
    )
    write_rows(out / "demonstrations.parquet", demonstration_rows)
    write_rows(out / "train.parquet", (question_row(seed, shuffled) for seed in range(questions)))
    write_rows(out / "test.parquet", (question_row(seed, shuffled) for seed in test_seeds))
    write_model(out / "model", seed)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0, help="of the model's random weights")
    parser.add_argument(
        "--shuffle-images", action="store_true", help="show the picture of another question: a control"
    )
    arguments = parser.parse_args()

    write_example(arguments.out, seed=arguments.seed, shuffled=arguments.shuffle_images)
    print(f"wrote {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
