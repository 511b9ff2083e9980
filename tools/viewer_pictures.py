"""The pictures of docs/viewer.md, of a run of the demo, by headless Chromium (apt-get install chromium).

python tools/viewer_pictures.py runs/NAME --out docs
python tools/viewer_pictures.py runs/NAME --out /tmp --light
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import sys
import tempfile
from pathlib import Path
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


async def save(tab: Tab, path: Path) -> None:
    await asyncio.sleep(1.0)  # for the last frame
    shot = await tab.call("Page.captureScreenshot", format="png")
    await asyncio.to_thread(path.write_bytes, base64.b64decode(shot["data"]))
    print(path)


async def pictures(run: Path, out: Path, light: bool) -> None:
    with tempfile.TemporaryDirectory() as profile:
        async with served(Views([run], describe_ending)) as url, browser(Path(profile)) as tab:
            await tab.open("about:blank")
            scheme = [{"name": "prefers-color-scheme", "value": "light" if light else "dark"}]
            await tab.call("Emulation.setEmulatedMedia", features=scheme)

            for name, (address, loaded) in PICTURES.items():
                await tab.call("Page.navigate", url="about:blank")
                await tab.call("Page.navigate", url=f"{url}#{address}")
                await tab.until(loaded)
                await save(tab, out / f"viewer_{name}.png")

            print(*tab.complaints, sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--light", action="store_true")
    args = parser.parse_args()
    asyncio.run(pictures(args.run, args.out, args.light))


if __name__ == "__main__":
    main()
