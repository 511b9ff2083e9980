"""Write a small geometry task with drawn figures as parquet files, in the layout of verl's geo3k.

    python tools/make_geometry.py --out geometry --train 256 --test 64

The columns are those that verl's examples/data_preprocess/geo3k.py writes for hiyouga/geometry3k: `<image>`
in the prompt's text, and the figure in `images`. A figure shows a right triangle with two labelled sides; the
question asks for the third side or the area. The same seed writes the same rows.

verl's reward for geo3k, 0.9 for the answer in the box and 0.1 for the format, is with a ChatML template:

    rollout.reward='{math: {boxed: true, weight: 0.9}, regex: {weight: 0.1, of: transcript, pattern: …}}'

with REWARD's pattern. The pattern begins with the model's turn, as the prompt names the tags, too.
"""

from __future__ import annotations

import argparse
import io
import random
from pathlib import Path
from typing import Any

import PIL.Image
import PIL.ImageDraw

from asyncrl.data.rows import write_rows

INSTRUCTION = (
    "You FIRST think about the reasoning process as an internal monologue and then provide the final answer. "
    "The reasoning process MUST BE enclosed within <think> </think> tags. The final answer MUST BE put in "
    "\\boxed{}."
)
TRIPLES = ((3, 4, 5), (5, 12, 13), (8, 15, 17), (7, 24, 25), (20, 21, 29))
FORMAT = r"assistant\n\s*<think>.*</think>.*\\boxed\{.*\}"
REWARD = (
    f"{{math: {{boxed: true, weight: 0.9}}, regex: {{weight: 0.1, of: transcript, pattern: '{FORMAT}'}}}}"
)
FIGURE_SIZE = (320, 240)  # pixels
MARGIN = 40  # pixels


def figure(base: int, height: int, labels: tuple[str, str, str]) -> bytes:
    """Draw a right triangle as PNG file, with the labels of base, height and hypotenuse."""
    image = PIL.Image.new("RGB", FIGURE_SIZE, "white")
    draw = PIL.ImageDraw.Draw(image)
    scale = min((FIGURE_SIZE[0] - 2 * MARGIN) / base, (FIGURE_SIZE[1] - 2 * MARGIN) / height)
    left = MARGIN
    bottom = FIGURE_SIZE[1] - MARGIN
    right = left + round(base * scale)
    top = bottom - round(height * scale)

    draw.polygon([(left, bottom), (right, bottom), (left, top)], outline="black", width=3)
    draw.rectangle([left, bottom - 12, left + 12, bottom], outline="black")
    base_label, height_label, hypotenuse_label = labels
    draw.text(((left + right) // 2, bottom + 8), base_label, fill="black")
    draw.text((left - 28, (top + bottom) // 2), height_label, fill="black")
    draw.text(((left + right) // 2 + 10, (top + bottom) // 2 - 16), hypotenuse_label, fill="black")

    file = io.BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()


def rows(rng: random.Random, split: str, count: int) -> list[dict[str, Any]]:
    """Return rows with the columns of verl's geo3k."""
    split_rows: list[dict[str, Any]] = []
    for index in range(count):
        factor = rng.randint(1, 9)
        base, height, hypotenuse = (side * factor for side in rng.choice(TRIPLES))
        if rng.random() < 0.5:
            problem = "Find x."
            answer = str(hypotenuse)
        else:
            problem = "Find the area of the triangle."
            answer = f"{base * height / 2:g}"

        split_rows.append(
            {
                "data_source": "drawn/geometry3k",
                "prompt": [{"role": "user", "content": f"<image>{problem} {INSTRUCTION}"}],
                "images": [{"bytes": figure(base, height, (str(base), str(height), "x")), "path": None}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": answer},
                "extra_info": {"split": split, "index": index, "answer": answer, "question": problem},
            }
        )
    return split_rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--train", type=int, default=256)
    parser.add_argument("--test", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    options.out.mkdir(parents=True, exist_ok=True)
    for number, split in enumerate(("train", "test")):
        split_rows = rows(random.Random(options.seed + number), split, getattr(options, split))
        write_rows(options.out / f"{split}.parquet", split_rows)


if __name__ == "__main__":
    main()
