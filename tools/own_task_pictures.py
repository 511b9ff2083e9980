"""Makes the pictures of docs/start/own_task.md, by headless Chromium (apt-get install chromium).

In the directory of the page's runs: python …/tools/own_task_pictures.py --out …/docs/pictures
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for tests.fakes

from asyncrl.commands.status import describe_ending
from asyncrl.viewer.views import Views
from tests.fakes.browser import browser, served


class Picture(NamedTuple):
    """Names what a picture shows. `drawn`: the condition that says that the page is drawn."""

    runs: tuple[str, ...]
    address: str
    drawn: str
    height: int  # pixels


WIDTH = 1400  # pixels of the window
PICTURES = {
    "cold": Picture(
        runs=("cold",),
        address="tab=episodes",
        drawn='document.querySelector("article").innerText.length > 200',
        height=560,
    ),
    "fast": Picture(
        runs=("fast",),
        address="tab=overview",
        drawn='document.querySelector(".overview .spark")',
        height=620,
    ),
    "learned": Picture(
        runs=("learned",),
        address="tab=overview",
        drawn='document.querySelector(".overview .spark")',
        height=560,
    ),
}


async def save_picture(picture: Picture, run_dir: Path, path: Path) -> None:
    with tempfile.TemporaryDirectory() as profile:
        runs = [run_dir / name for name in picture.runs]
        async with served(Views(runs, describe_ending)) as url, browser(Path(profile)) as tab:
            await tab.open("about:blank")
            await tab.call("Emulation.setScrollbarsHidden", hidden=True)
            await tab.call("Page.navigate", url=f"{url}#{picture.address}")
            await tab.until(picture.drawn)
            await asyncio.sleep(1.0)  # for the last frame

            clip = {"x": 0, "y": 0, "width": WIDTH, "height": picture.height, "scale": 1}
            screenshot = await tab.call("Page.captureScreenshot", format="png", clip=clip)
            await asyncio.to_thread(path.write_bytes, base64.b64decode(screenshot["data"]))
            print(path, *tab.complaints, sep="\n")


async def save_all(run_dir: Path, out: Path) -> None:
    for name, picture in PICTURES.items():
        await save_picture(picture, run_dir, out / f"own_task_{name}.png")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run-dir", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    asyncio.run(save_all(args.run_dir, args.out))


if __name__ == "__main__":
    main()
