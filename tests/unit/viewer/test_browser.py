from __future__ import annotations

import json
from pathlib import Path

from asyncrl.observe.timeline import Timeline
from asyncrl.viewer.page import write_page
from asyncrl.viewer.views import Views
from tests.fakes.browser import Tab, look, needs_chromium, served
from tests.fakes.contrast import pale
from tests.fakes.planted import MARKUP, ended, save_run

pytestmark = needs_chromium

WIDTHS = (390, 800, 1440)  # pixels: a phone, half of a screen, a laptop
# What is wider than the window, or than the card around it; parts that scroll are left out.
BOXES = ".card, figure, .alert, .facets, #reader"
TOO_WIDE = f"""[document.scrollingElement, ...document.querySelectorAll({BOXES!r})]
    .filter(box => box === document.scrollingElement || getComputedStyle(box).overflowX === "visible"
        || box.matches(".facets"))
    .filter(box => box.scrollWidth > box.clientWidth + 1)
    .map(box => `${{innerWidth}}: ${{box.id || box.className}} has ${{box.scrollWidth}} px`)"""
CUT_FACETS = """[...document.querySelectorAll(".facets")]
    .filter(box => box.scrollHeight > box.clientHeight + 1).map(box => `${innerWidth}: facets are cut`)"""

ROWS = 'document.querySelectorAll("#list tbody tr").length'

LANE = """(place => [place.left, place.width, place.top])(
    document.querySelector("[data-lane='trainer 0/trainer']").getBoundingClientRect())"""


def test_the_page_opens_filters_and_shows_an_episode_without_an_error(tmp_path: Path) -> None:
    views = Views([save_run(tmp_path / "a"), save_run(tmp_path / "b", lr=0.5)], ended)
    for run, more in (("a", {}), ("b", {"perf/throughput": 700.0})):  # a: a run that has not this curve
        file = tmp_path / run / "metrics.jsonl"
        rows = [
            json.loads(line) | {"rollout/tokens_per_s": 900.0} | more
            for line in file.read_text().splitlines()
        ]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    worker = Timeline(tmp_path / "a" / "timeline" / "rollout-0.jsonl")
    worker.record("decode", 0, 4000, calls=100, seconds=8000.0)
    worker.record("fresher weights", 0, 4000, calls=900, seconds=0.5)
    worker.close()
    write_page(tmp_path / "page.html", views)

    async def test(tab: Tab) -> None:
        async with served(views) as url:
            await tab.open("about:blank")
            await coloured(tab, "light", url)
            await looked_at(tab)
            await zoomed_in(tab)

        assert tab.complaints == []
        await tab.press("3")
        await tab.until(
            'document.getElementById("error").textContent.includes("is asyncrl view still running?")'
        )
        await selected_without_a_server(tab)
        assert all("ERR_CONNECTION_REFUSED" in complaint for complaint in tab.complaints)
        tab.complaints.clear()
        await coloured(tab, "dark", (tmp_path / "page.html").as_uri())
        await looked_at(tab)

    look(tmp_path / "profile", test)


async def coloured(tab: Tab, scheme: str, url: str) -> None:
    """The page of an address, which a change of the scheme would load again."""
    await tab.call("Page.navigate", url="about:blank")
    feature = {"name": "prefers-color-scheme", "value": scheme}
    await tab.call("Emulation.setEmulatedMedia", features=[feature])
    await tab.call("Page.navigate", url=url)


async def too_wide(tab: Tab) -> list[str]:
    """Return what does not fit into windows of WIDTHS on the page as shown; the window is given back."""
    wide_parts: list[str] = []
    for width in WIDTHS:
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        await tab.call("Emulation.setDeviceMetricsOverride", **size)
        await tab.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        wide_parts += await tab.run(f"[...{TOO_WIDE}, ...{CUT_FACETS}]")
    await tab.call("Emulation.clearDeviceMetricsOverride")
    return wide_parts


async def zoomed_in(tab: Tab) -> None:
    """The steps of two seconds are shown one by one; a stretch that is dragged over is summed, a span that is
    clicked at says what it is, and keys lead to the next one and back to the whole run."""
    panel = 'document.getElementById("time-panel").innerText'
    address = "location.hash"
    await tab.until(f'{panel}.includes("WHOLE RUN") && {panel}.includes("4,000")')
    assert "2 at once" in await tab.run(panel)
    names = '[...document.querySelectorAll("#lanes .lane")].filter(o => o.checkVisibility())'
    lanes = f"{names}.map(o => o.innerText).join()"
    assert await tab.run(lanes) == "trainer 0,worker 0,generate,short (1 of worker 0)"
    await tab.run(f"{names}.at(-1).parentElement.click()")
    await tab.until(f'{lanes}.endsWith("short (1 of worker 0),wait for fresher weights")')
    await tab.run('location.hash = "tab=time&from=1000&to=1010"')
    await tab.until(f'{panel}.includes("THIS WINDOW") && {panel}.includes("10 s, from")')
    left, wide, top = await tab.run(LANE)
    await tab.drag((left + 0.2 * wide, top + 8), (left + 0.5 * wide, top + 8))  # from 1002 to 1005
    await tab.until(
        f'{panel}.includes("SELECTED") && /forward and backward trainer\\s+[45]\\s/.test({panel})'
    )
    assert "100%" in await tab.run(panel)
    pointer = (left + 0.55 * wide, top + 8)
    await tab.drag(pointer, pointer)
    await tab.until('document.getElementById("chosen").textContent === "forward and backward"')
    assert "step 1005: charts, episodes" in await tab.run(panel)
    await tab.press("j")
    await tab.until(f'{panel}.includes("step 1006: charts")')
    await tab.press("0")
    await tab.until(f'!{address}.includes("from") && {panel}.includes("SELECTED")')


async def selected_without_a_server(tab: Tab) -> None:
    """Sums of a stretch that are not known say why."""
    await tab.press("4")
    await tab.until(f"({LANE})[1] > 0")
    left, wide, top = await tab.run(LANE)
    await tab.drag((left + 0.2 * wide, top + 8), (left + 0.4 * wide, top + 8))
    panel = 'document.getElementById("time-panel").innerText'
    await tab.until(f'{panel}.includes("is asyncrl view still running?")')


async def looked_at(tab: Tab) -> None:
    """The overview; by keys curves, alerts and differences, the list, a filter, an episode, its neighbour and
    its group, a comparison, lanes. All texts and signs stand out."""
    await tab.until('document.querySelector("#overview h1")')
    overview_text = await tab.run('document.getElementById("overview").textContent')
    assert "No reward recorded in 12 steps" in overview_text and "data.trainx" in overview_text
    assert await tab.run('document.querySelector("[data-alert]").dataset.alert') == "skipped optimizer steps"
    assert "trainer.lr, now 1e-06" in overview_text
    assert await pale(tab) == [] and await too_wide(tab) == []
    await tab.press("3")
    await tab.until('document.querySelectorAll("#charts canvas").length >= 2')
    keys = await tab.run("document.querySelector(\"[data-title='Tokens per second']\").textContent")
    assert "tokens sampled/s" in keys and "tokens/s of a rank" in keys and ": same as a" in keys
    await tab.until(
        'document.querySelector(".happening").getAttribute("aria-label").includes("skipped optimizer")'
    )
    assert await pale(tab) == [] and await too_wide(tab) == []
    await tab.press("2")
    await tab.until(f"{ROWS} === 8")
    await tab.run("""document.querySelector('[data-facet="state"][data-value="trained"]').click()""")
    await tab.until(f"{ROWS} === 4")
    for key, uid in (("j", "1.1"), ("k", "1.0"), ("n", "1.1")):
        await tab.press(key)
        await tab.until(f'document.querySelector("article").dataset.uid === "{uid}"')

    await tab.run('document.getElementById("colour-versions").click()')
    await tab.until('document.querySelectorAll(".model [data-at]").length === 10')
    assert MARKUP in await tab.run('document.querySelector("article").textContent')
    await tab.run('document.querySelectorAll("details").forEach(one => (one.open = true))')
    assert await pale(tab) == [] and await too_wide(tab) == []
    await tab.press("g")
    await tab.until('document.querySelectorAll("article").length === 2')
    await tab.press("/")
    assert await tab.run('document.activeElement.id === "search"')
    await tab.run("document.activeElement.blur()")
    assert await pale(tab) == [] and await too_wide(tab) == []
    await tab.press("5")
    await tab.until('document.querySelector("#compare .card")')
    assert await pale(tab) == [] and await too_wide(tab) == []
    await tab.press("4")
    await tab.until('document.querySelector("#time-panel table")')
    assert await pale(tab) == [] and await too_wide(tab) == []
    assert await tab.run('document.querySelectorAll("img").length') == 0, "a text was read as HTML"
