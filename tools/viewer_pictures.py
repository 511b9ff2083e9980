"""Takes the pictures of the page for README.md and docs/guides/after_a_run.md, in dark and light colors, by
headless Chromium (apt-get install chromium).

make demo ARGS=name=demo
python tools/viewer_pictures.py runs/demo --out docs/pictures
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for tests.fakes

from asyncrl.commands.status import describe_ending
from asyncrl.viewer.views import Views
from tests.fakes.browser import Tab, browser, served

ROOT = Path(__file__).resolve().parents[1]
GROUP = "where=" + quote('[["group","=",16]]')
Scheme = Literal["dark", "light"]
SUFFIXES: dict[Scheme, str] = {"dark": "", "light": "_light"}  # of the names of files
PICTURES = {
    "overview": ("tab=overview", 'document.querySelector(".overview .spark")'),
    "run": ("tab=charts", 'document.querySelectorAll("canvas").length >= 10'),
    "episode": ("tab=episodes&order=-lag&colour=versions", 'document.querySelector("article [data-at]")'),
    "group": (f"tab=episodes&{GROUP}&side=1", 'document.querySelectorAll(".column").length > 1'),
    "time": ("tab=time", 'document.querySelector("#time canvas")'),
}  # address of each picture, and the condition that says the picture is drawn
WIDTH = 1400  # pixels of the window
OVERVIEW_HEIGHT = 866  # pixels: without the configuration
MAX_COLORS = 256  # of a picture; this makes it a third as large
# Paths are shown as seen from the checkout: where it is says nothing about a run.
RELATIVE_PATHS = f"""for (const element of document.querySelectorAll(".breakable"))
    if (element.textContent.includes({json.dumps(f"{ROOT}/")}))
        element.textContent = element.textContent.replaceAll({json.dumps(f"{ROOT}/")}, "");"""


async def save(tab: Tab, path: Path, height: int | None = None) -> None:
    """Write what the window shows, or its upper `height` pixels."""
    await asyncio.sleep(1.0)  # for the last frame
    await tab.run(RELATIVE_PATHS)
    options = {"clip": {"x": 0, "y": 0, "width": WIDTH, "height": height, "scale": 1}} if height else {}
    shot = await tab.call("Page.captureScreenshot", format="png", **options)
    picture = Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB")
    picture.quantize(MAX_COLORS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
        path, optimize=True
    )
    print(path)


async def choose_scheme(tab: Tab, scheme: Scheme) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    await tab.call("Emulation.setEmulatedMedia", features=features)


async def show(tab: Tab, url: str, name: str) -> None:
    address, loaded = PICTURES[name]
    await tab.call("Page.navigate", url="about:blank")
    await tab.call("Page.navigate", url=f"{url}#{address}")
    await tab.until(loaded)


async def pictures(run: Path, out: Path) -> None:
    with tempfile.TemporaryDirectory() as profile:
        async with served(Views([run], describe_ending)) as url, browser(Path(profile)) as tab:
            await tab.open("about:blank")
            await tab.call("Emulation.setScrollbarsHidden", hidden=True)

            for scheme in SUFFIXES:
                await choose_scheme(tab, scheme)
                for name in PICTURES:
                    await show(tab, url, name)
                    height = OVERVIEW_HEIGHT if name == "overview" else None
                    await save(tab, out / f"viewer_{name}{SUFFIXES[scheme]}.png", height)

            print(*tab.complaints, sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    asyncio.run(pictures(args.run, args.out))


if __name__ == "__main__":
    main()
