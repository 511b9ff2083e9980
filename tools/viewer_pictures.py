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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for tests.fakes

from asyncrl.viewer.server import ViewServer
from asyncrl.viewer.views import Views
from tests.fakes.browser import Tab, browser

CHOOSE = '(s => {{ s.value = "{}"; s.dispatchEvent(new Event("change")) }})(document.querySelector("{}"))'
FIRST = 'document.querySelector("#list tbody td").textContent'


async def save(tab: Tab, path: Path) -> None:
    await asyncio.sleep(1.0)  # for the last frame
    shot = await tab.call("Page.captureScreenshot", format="png")
    await asyncio.to_thread(path.write_bytes, base64.b64decode(shot["data"]))
    print(path)


async def pictures(run: Path, out: Path, light: bool) -> None:
    server = ViewServer(Views([run], lambda path: "completed"))
    await server.start()
    with tempfile.TemporaryDirectory() as profile:
        try:
            async with browser(Path(profile)) as tab:
                await tab.open(server.url)
                scheme = [{"name": "prefers-color-scheme", "value": "light" if light else "dark"}]
                await tab.call("Emulation.setEmulatedMedia", features=scheme)
                await tab.call("Page.reload")
                await tab.until('document.querySelectorAll("canvas").length >= 10')
                await save(tab, out / "viewer_run.png")
                await tab.press("2")
                await tab.until('document.querySelectorAll("#list tbody tr").length > 10')
                newest = await tab.run(FIRST)
                await tab.run(CHOOSE.format("-lag", "[data-key=order]"))
                await tab.until(f'{FIRST} !== "{newest}"')
                await tab.run(CHOOSE.format("versions", "#colour"))
                await tab.press("j")
                await tab.until('document.querySelector("article")')
                await tab.run('document.querySelector("article").scrollIntoView()')
                await save(tab, out / "viewer_episode.png")
                await tab.run(CHOOSE.format("16", "[data-key=group]"))
                await tab.until(f'{FIRST}.startsWith("16.")')
                await tab.run('document.querySelector("#list tbody tr").click()')
                await tab.until('document.querySelector("article").dataset.uid.startsWith("16.")')
                await tab.run(CHOOSE.format("ratios", "#colour"))
                await tab.press("g")
                await tab.until('document.querySelectorAll("article").length > 1')
                await tab.run('document.querySelector("article").scrollIntoView()')
                await save(tab, out / "viewer_group.png")
                await tab.press("3")
                await tab.until('document.querySelector("#lanes canvas")')
                await save(tab, out / "viewer_time.png")
                print(*tab.complaints, sep="\n")
        finally:
            await server.close()


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
