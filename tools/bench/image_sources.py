"""The pictures of images.py, and the tools, the environment and the agent that show them.

    python tools/bench/image_sources.py BASE_URL KEY    the agent's requests

Apart from images.py, as processes of tools import this file alone.
"""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import json
import os
import random
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageDraw

from asyncrl import ImageFile
from asyncrl.environments import Environment, image_observation
from asyncrl.gateway import Endpoint
from asyncrl.tools import tool
from asyncrl.types import Message, Observation, Sample

THIS_FILE = Path(__file__).resolve()
IMAGES = 4  # of an episode, or of a request
SMALL = (320, 240)  # pixels
SCREEN = (2000, 1500)  # pixels
SCREENS = 8  # different screenshots; each use has another number on it


def draw_figure(seed: int) -> PIL.Image.Image:
    """Draw a small figure of lines and texts, as in a geometry task."""
    rng = random.Random(seed)
    image = PIL.Image.new("RGB", SMALL, "white")
    draw = PIL.ImageDraw.Draw(image)
    for _ in range(6):
        points = [(rng.randrange(SMALL[0]), rng.randrange(SMALL[1])) for _ in range(3)]
        draw.polygon(points, outline="black", width=3)
        draw.text(points[0], str(rng.randrange(1000)), fill="black")
    return image


def draw_screen(seed: int) -> PIL.Image.Image:
    """Draw a screenshot, as browsers make them: lines of text, a photograph on a ninth of it, and an opaque
    alpha channel."""
    rng = np.random.default_rng(seed)
    image = PIL.Image.new("RGBA", SCREEN, (250, 250, 252, 255))
    draw = PIL.ImageDraw.Draw(image)
    for y in range(10, SCREEN[1], 14):
        draw.text((20, y), " ".join(str(number) for number in rng.integers(0, 10**6, 40)), fill="black")
    noise = rng.integers(0, 256, (125, 167, 3), dtype=np.uint8)
    photograph = PIL.Image.fromarray(noise).resize((667, 500), PIL.Image.Resampling.BICUBIC)
    image.paste(photograph, (1200, 700))
    return image


_drawn_screens: list[PIL.Image.Image] = []
_drawing_lock = threading.Lock()
_screen_numbers = itertools.count()


def next_screen() -> PIL.Image.Image:
    """Return a screenshot that no call has returned before, in a few milliseconds."""
    with _drawing_lock:
        if not _drawn_screens:
            _drawn_screens.extend(map(draw_screen, range(SCREENS)))
    number = next(_screen_numbers)
    image = _drawn_screens[number % SCREENS].copy()
    PIL.ImageDraw.Draw(image).text((20, 2), f"screenshot {os.getpid()}.{number}", fill="black")
    return image


def png(image: PIL.Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()


# -- what episodes do ---------------------------------------------------------------------------------------


@tool(blocking=True)
class Figures:
    """The tool of `bytes` and `small`. With `texts`, the sample wants texts instead of images."""

    _numbers = itertools.count(1_000_000)

    def reset(self, sample: Sample) -> None:
        self._group_seed = 1000 + sample.row
        self._returns_texts = sample.extra_info["texts"]

    def look(self, call: int) -> Any:
        """Look at a figure: the first one of a group is the same for all members."""
        seed = self._group_seed if call == 0 else next(self._numbers)
        return f"figure {seed}" if self._returns_texts else draw_figure(seed)


@tool(name="look", blocking=True)
def look_at_screen(call: int) -> Any:
    """Look at the screen."""
    return next_screen()


@tool(name="look", process=True, concurrency=2)
def look_in_process(call: int) -> Any:
    """Look at the screen."""
    return next_screen()


class Screens(Environment):
    """Shows a screenshot after each turn, as an agent's browser does."""

    needs_images = True
    replay = "no"

    async def reset(self, sample: Sample) -> Observation:
        self._turn = 0
        return await self._observe()

    async def step(self, message: Message) -> Observation:
        self._turn += 1
        if self._turn == IMAGES:
            return Observation((), reward=1.0, done=True)
        return await self._observe()

    async def _observe(self) -> Observation:
        file = await asyncio.to_thread(lambda: png(next_screen()))
        return image_observation("screen: ", ImageFile(file))


async def agent(sample: Sample, endpoint: Endpoint) -> float:
    """Send requests from a process of their own."""
    arguments = (endpoint.base_url, endpoint.api_key)
    process = await asyncio.create_subprocess_exec(sys.executable, str(THIS_FILE), *arguments)
    try:
        if await process.wait():
            raise RuntimeError("the client has failed")
    finally:
        if process.returncode is None:
            process.kill()
    return 1.0


def send_requests(base_url: str, key: str) -> None:
    """Send two requests with IMAGES screenshots each: the second one repeats the history."""
    files = [base64.b64encode(png(next_screen())).decode() for _ in range(IMAGES)]
    parts = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{file}"}} for file in files]
    messages: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": "see"}, *parts]}]
    for _ in range(2):
        request = urllib.request.Request(
            f"{base_url}/chat/completions",
            json.dumps({"messages": messages}).encode(),
            {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as response:
            answer = json.loads(response.read())
        messages += [answer["choices"][0]["message"], {"role": "user", "content": "go on"}]


if __name__ == "__main__":
    send_requests(*sys.argv[1:])
