"""Makes the pictures of README.md and docs/guides/after_a_run.md, by headless Chromium (apt-get install
chromium).

make demo ARGS=name=demo
python tools/viewer_pictures.py runs/demo --out docs
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import sys
import tempfile
from pathlib import Path
from typing import Literal
from urllib.parse import quote

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for tests.fakes

from asyncrl.commands.status import describe_ending
from asyncrl.viewer.views import Views
from tests.fakes.browser import Tab, browser, served

GROUP = "where=" + quote('[["group","=",16]]')
PICTURES = {
    "overview": ("tab=overview", 'document.querySelector(".overview .spark")'),
    "run": ("tab=charts", 'document.querySelectorAll("canvas").length >= 10'),
    "episode": ("tab=episodes&order=-lag&colour=versions", 'document.querySelector("article [data-at]")'),
    "group": (f"tab=episodes&{GROUP}&side=1", 'document.querySelectorAll(".column").length > 1'),
    "time": ("tab=time", 'document.querySelector("#time canvas")'),
}  # address of each picture, and the condition that says the picture is drawn
WIDTH = 1400  # pixels of the window
OVERVIEW_HEIGHT = 700  # pixels: down to the flow of episodes, without the configuration and its paths


async def save(tab: Tab, path: Path, height: int | None = None) -> None:
    """Write what the window shows, or its upper `height` pixels."""
    await asyncio.sleep(1.0)  # for the last frame
    options = {"clip": {"x": 0, "y": 0, "width": WIDTH, "height": height, "scale": 1}} if height else {}
    shot = await tab.call("Page.captureScreenshot", format="png", **options)
    await asyncio.to_thread(path.write_bytes, base64.b64decode(shot["data"]))
    print(path)


async def choose_scheme(tab: Tab, scheme: Literal["dark", "light"]) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    await tab.call("Emulation.setEmulatedMedia", features=features)


async def show(tab: Tab, url: str, name: str) -> None:
    address, loaded = PICTURES[name]
    await tab.call("Page.navigate", url="about:blank")
    await tab.call("Page.navigate", url=f"{url}#{address}")
    await tab.until(loaded)


async def pictures(run: Path, out: Path) -> None:
    """Write every picture in dark colours, and the Overview in light ones, too: README shows the reader's."""
    with tempfile.TemporaryDirectory() as profile:
        async with served(Views([run], describe_ending)) as url, browser(Path(profile)) as tab:
            await tab.open("about:blank")
            await tab.call("Emulation.setScrollbarsHidden", hidden=True)

            await choose_scheme(tab, "dark")
            for name in PICTURES:
                await show(tab, url, name)
                await save(tab, out / f"viewer_{name}.png", OVERVIEW_HEIGHT if name == "overview" else None)

            await choose_scheme(tab, "light")
            await show(tab, url, "overview")
            await save(tab, out / "viewer_overview_light.png", OVERVIEW_HEIGHT)

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
