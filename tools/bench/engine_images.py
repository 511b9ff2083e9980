"""Delay of the event loop while requests with images arrive at the embedded engine, in ms.

    python tools/bench/engine_images.py [--requests 8] [--side 512]

Each request has an image of its own. A task that sleeps a millisecond measures how late the loop wakes it:
first beside turns of text, then beside the images. Images are decoded in a thread, so both should be alike.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from common import loop_delays

from asyncrl.engines.base import Request, Sampling
from asyncrl.engines.torch.engine import TorchEngine
from asyncrl.engines.torch.images import ImageReader
from asyncrl.vision.image_ids import image_ids
from asyncrl.vision.layout import ImageLayout, read_image_layout
from tests.fakes.image_data import noise_image
from tests.fakes.tiny_families import FAMILIES, QWEN_PREPROCESSOR, random_model

FAMILY = "qwen3_vl"
NEW_TOKENS = 32


async def measure(engine: TorchEngine, requests: list[Request], label: str) -> None:
    start = time.perf_counter()
    async with loop_delays() as delays_ms:
        await asyncio.gather(*map(engine.generate, requests))
    seconds = time.perf_counter() - start

    middle, p99, worst = np.quantile(delays_ms, [0.5, 0.99, 1.0])
    print(f"{label:6} {seconds:6.2f} s, delays: p50 {middle:.2f} ms, p99 {p99:.2f} ms, worst {worst:.2f} ms")


def image_request(layout: ImageLayout, side: int, session: str, seed: int) -> Request:
    stored = noise_image(layout, side // layout.factor, side // layout.factor, seed)
    run = image_ids(stored.ref.digest, layout.run_length(stored.ref.height, stored.ref.width))
    ids = (*text(8, seed), *run, *text(8, -seed))
    return Request(session, ids, Sampling(NEW_TOKENS, ()), seed, images={stored.ref.digest: stored.file})


def text(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(8, 500), k=count)


async def run(directory: Path, count: int, side: int) -> None:
    model = random_model(FAMILIES[FAMILY], FAMILIES[FAMILY].configuration(), seed=0)
    model.config.save_pretrained(directory)
    processor = QWEN_PREPROCESSOR | {"size": {"shortest_edge": 32 * 32, "longest_edge": side * side}}
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    layout = read_image_layout(str(directory))
    reader = ImageReader.of_model(str(directory))
    engine = TorchEngine(model, lambda: model, count, 1024, 1024, image_reader=reader)

    await engine.generate(image_request(layout, side, "first", seed=count + 1))  # imports the processor
    length = len(image_request(layout, side, "", seed=0).ids)
    text_requests = [
        Request(f"text {index}", tuple(text(length, index)), Sampling(NEW_TOKENS, ()), index)
        for index in range(count)
    ]
    image_requests = [image_request(layout, side, f"image {index}", seed=index) for index in range(count)]
    await measure(engine, text_requests, "text")
    await measure(engine, image_requests, "images")
    await engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--side", type=int, default=512, help="of the square images, in pixels")
    args = parser.parse_args()

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(run(Path(directory), args.requests, args.side))


if __name__ == "__main__":
    main()
