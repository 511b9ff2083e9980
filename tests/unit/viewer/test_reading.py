"""The tab of episodes in a browser, served and from a file: who looks finds, and can read what is found."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

from asyncrl.viewer.page import write_page
from asyncrl.viewer.views import Views
from tests.fakes.browser import Tab, look, needs_chromium, served
from tests.fakes.planted import ended
from tests.fakes.read import HOSTILE, LONG, save_conversations

pytestmark = needs_chromium
LISTED = '[...document.querySelectorAll("#list tbody tr")].map(row => row.dataset.uid).join()'


def test_episodes_are_found_read_and_compared(tmp_path: Path) -> None:
    views = Views([save_conversations(tmp_path / "run")], ended)
    write_page(tmp_path / "page.html", views)
    views = Views([tmp_path / "run", save_pages(tmp_path / "pages")], ended)

    async def test(tab: Tab) -> None:
        async with served(views) as url:
            await tab.open(url + "#tab=episodes")
            await found(tab)
            await walked(tab)
            await read(tab)
            await compared(tab)
            await an_agents(tab)
            await megabytes(tab)
            await tab.call("Page.navigate", url=(tmp_path / "page.html").as_uri() + "#tab=episodes")
            await found(tab)
            await compared(tab)
            await goes(tab, "uid=0.0&colour=advantages")
            await tab.until(
                'document.querySelector(".model [data-at]").style.background.includes("color-mix")'
            )
            assert await tab.run('document.querySelectorAll("img").length') == 0, "a text was read as HTML"

    look(tmp_path / "profile", test)


def save_pages(run_dir: Path) -> Path:
    """124 episodes, which are listed on two pages."""
    save_conversations(run_dir, long=1000)
    with closing(sqlite3.connect(run_dir / "run.db")) as db, db:
        db.execute("CREATE TEMP TABLE copied AS SELECT * FROM episodes WHERE uid = '0.1'")
        for number in range(120):
            db.execute("UPDATE copied SET uid = ?", (f"0.1-{number:03}",))
            db.execute("INSERT INTO episodes SELECT * FROM copied")
    return run_dir


async def click(tab: Tab, selector: str) -> None:
    await tab.until(f"document.querySelector(`{selector}`)")
    await tab.run(f"document.querySelector(`{selector}`).click()")


async def shows(tab: Tab, uids: str) -> None:
    await tab.until(f"{LISTED} === '{uids}'")


async def goes(tab: Tab, address: str) -> None:
    """By an address, as whoever got a link."""
    await tab.run(f"document.body.dataset.ready = ''; location.hash = `#tab=episodes&{address}`")
    await tab.until("document.body.dataset.ready")


async def found(tab: Tab) -> None:
    """By facets, in an order, by words; each can be taken out again. And by the tool that failed."""
    await shows(tab, "1.0,1.1,0.0,0.1")
    await tab.until('document.querySelector("article").dataset.uid === "1.0"')  # the first is open
    await click(tab, '[data-facet="score"][data-value="0"]')
    await shows(tab, "1.1,0.1")
    counts = (
        '[...document.querySelectorAll(`[data-facet="failed_tool"] b`)].map(one => one.textContent).join()'
    )
    assert await tab.run(counts) == "1,1"
    await click(tab, '[data-facet="failed_tool"][data-value="shell"]')
    await shows(tab, "0.1")
    await click(tab, '#active [title="remove"]')  # the score
    await shows(tab, "0.0,0.1")
    await click(tab, '#active [title="remove"]')
    await shows(tab, "1.0,1.1,0.0,0.1")
    await click(tab, "#sort-score")
    await shows(tab, "0.0,1.0,1.1,0.1")
    await click(tab, "#sort-score")
    await tab.until('document.querySelector("#list th[aria-sort]").ariaSort === "ascending"')
    await tab.run('search.value = "exit status NOTES.txt title"; search.dispatchEvent(new Event("input"))')
    await tab.until('document.getElementById("list").textContent === "No episode matches."')
    await tab.run('search.value = "search Result"; search.dispatchEvent(new Event("input"))')
    await shows(tab, "1.0")
    assert "transcripts of 4 of 4" in await tab.run('document.getElementById("searched").textContent')
    await goes(tab, "sub=tools")
    await tab.until('document.querySelector("#tools tbody tr")?.cells[0].textContent === "shell"')
    cells = '[...document.querySelector("#tools tbody tr").cells].map(one => one.textContent)'
    _, calls, failed, _, p50, _, error = await tab.run(cells)
    assert (calls, failed, error) == ("5", "40%", "exit status 1 (×2)") and p50.endswith("ms")
    await click(tab, "#tools a")
    await shows(tab, "1.1,0.0,0.1")  # that called it
    await goes(tab, "sub=tools")
    await click(tab, "#tools a.bad")
    await shows(tab, "0.0,0.1")  # in which it failed
    await goes(tab, 'where=[["tokens",">=",1]]')
    await shows(tab, "1.0,1.1,0.0,0.1")


async def walked(tab: Tab) -> None:
    """From one episode to the next, by buttons, keys and over the end of a page; to those of its question."""
    selected = """document.querySelector('#list [aria-selected="true"]')?.dataset.uid"""
    await goes(tab, "uid=1.0")
    for step, uid in {'[data-act="›"]': "1.1", "j": "0.0", "k": "1.1", '[data-act="‹"]': "1.0"}.items():
        await (tab.press(step) if len(step) == 1 else click(tab, step))
        await tab.until(f"{selected} === '{uid}'")
        await tab.until(f"""document.querySelector("article").dataset.uid === '{uid}'""")

    await tab.press("k")  # there is none before
    await goes(tab, "order=score")
    await tab.until(f"{selected} === '1.1'")  # of another list the first one is open
    await goes(tab, "uid=1.0")
    await click(tab, "#same-question")
    await shows(tab, "1.0,1.1")
    await goes(tab, "run=1&uid=0.1-095")
    await tab.until(f"{selected} === '0.1-095'")
    await tab.press("j")
    await tab.until(f"{selected} === '0.1-096'")
    assert "101 to 124 of 124" in await tab.run('document.querySelector(".pager").textContent')
    await tab.press("k")
    await tab.until(f"{selected} === '0.1-095'")
    await goes(tab, "run=1&order=-newest&start=100")
    await tab.until(f"""{selected} === document.querySelector("#list tbody tr").dataset.uid""")


async def read(tab: Tab) -> None:
    """What is long is folded, what failed is open; each colour explains itself; all of it can be copied."""
    await goes(tab, "uid=0.0")
    await tab.until('document.querySelector("article")?.dataset.uid === "0.0"')
    text = 'document.querySelector("article").textContent'
    summaries = '[...document.querySelectorAll("article summary")].map(one => one.textContent).join("|")'
    assert "12 earlier: user example 0" in await tab.run(summaries)
    assert "thinking" in await tab.run(summaries) and "First I look" not in await tab.run(text)
    assert "no such file" in await tab.run(text), "what failed is open"
    await tab.run('document.querySelectorAll("article summary").forEach(one => one.click())')
    await tab.until(f"{text}.includes('First I look')")
    assert HOSTILE.replace("\x1b", "^[").replace("\u202e", "⟨202e⟩") in await tab.run(text)

    for colour, legend in {
        "versions": "version 0: 6",
        "lags": "buffer.max_staleness",
        "logprobs": "-2.5: 8%",
        "ratios": "no π/μ",
        "masked": "too old",
        "advantages": "better the episode did than its group",
    }.items():
        await click(tab, f"#colour-{colour}")
        await tab.until(f'document.querySelector(".colours").textContent.includes("{legend}")')

    await tab.until('document.querySelector(".model [data-at]").style.background.includes("color-mix")')
    assert await tab.run('document.querySelectorAll(".model > details:not([open])").length') == 0, "tokens"
    await tab.run("""document.querySelector(".model [data-at]").dispatchEvent(
        new PointerEvent("pointermove", { bubbles: true }))""")
    tip = await tab.run('document.querySelector(".tip").textContent')
    assert "advantage 0.5" in tip
    await tab.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])

    for tab_name, part in {"text": "There are 7 words.", "JSON": '"logprobs": ['}.items():
        await click(tab, f'[data-act="{tab_name}"]')
        await tab.until(
            f"""document.querySelector('[data-act="{tab_name}"]').textContent === "{tab_name} copied" """
        )
        assert part in await tab.run("navigator.clipboard.readText()")


async def compared(tab: Tab) -> None:
    """Turns that are the same are a line; of others, the words that differ are marked."""
    await goes(tab, "uid=0.0")
    await tab.until('document.querySelector("article")?.dataset.uid === "0.0"')
    await tab.press("g")
    await tab.until('document.querySelectorAll(".column").length === 2')
    marked = '[...document.querySelectorAll("mark")].map(one => one.textContent).join("|")'
    assert (await tab.run(marked)).strip() == "8"
    assert await tab.run('document.querySelectorAll(".same").length') == 2
    assert "differs from turn 3" in await tab.run('document.querySelectorAll(".column")[1].textContent')
    await tab.press("n")
    await tab.until('document.querySelector(".column").dataset.uid === "0.1"')
    await tab.press("g")
    await tab.until('document.querySelectorAll("article").length === 1')


async def an_agents(tab: Tab) -> None:
    """Forty turns: a table of contents, what is aside folded with its title, a history that was cut goes on
    where it was."""
    await goes(tab, "uid=1.0")
    await tab.until('document.querySelectorAll(".contents button").length === 40')
    aside = '[...document.querySelectorAll(".aside > details > summary")].map(one => one.textContent)'
    search, title = await tab.run(aside)
    assert "Find where parse is called (3 turns, from turn 21 onward)" in search and "A title for" in title
    rows = '[...document.querySelectorAll(".contents button")].slice(19, 21).map(one => one.textContent)'
    assert await tab.run(rows) == ["20 Now step 19.", "21 ↳ I search."]
    heads = '[...document.querySelectorAll(".row-head")].map(one => one.textContent)'
    assert "continues after turn 1 of conversation 1" in (await tab.run(heads))[1]
    assert await tab.run('!document.querySelector(".aside > details[open]")')
    await click(tab, ".contents button:last-child")
    await tab.until('document.getElementById("turn-1.0-39").textContent.includes("Test fix")')
    assert await tab.run('document.querySelectorAll("#turn-1\\\\.0-23 .role.system").length') == 0, "repeated"


async def megabytes(tab: Tab) -> None:
    """A line of 10 MB and 60,000 tokens: the beginning, and more at a click."""
    await goes(tab, "uid=1.1&colour=versions")
    await tab.until('document.querySelector("article")?.dataset.uid === "1.1"')
    tokens = 'document.querySelectorAll(".model [data-at]").length'
    size = 'document.querySelector("article").textContent.length'
    before = await tab.run(size)
    assert 8000 <= await tab.run(tokens) < 9000 and before < LONG / 50
    more = (
        """[...document.querySelectorAll("article button")].filter(one => one.textContent.includes("more"))"""
    )
    assert (
        await tab.run(f"{more}.map(one => one.textContent).join()")
        == "show 200k more of 10M characters,show 55.9k more of 63.9k tokens"
    )
    await tab.run(f"{more}.forEach(one => one.click())")
    assert await tab.run(tokens) > 16000 and await tab.run(size) > before + 180_000
    spaces = 'import("view/parts.js").then(its => its.messages(" ".repeat(3e6) + "x").length)'
    assert await asyncio.wait_for(tab.run(spaces), 30) == 1, "an hour where each space is a beginning"
