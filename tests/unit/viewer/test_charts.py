from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncrl.viewer.views import Views
from tests.fakes import planted
from tests.fakes.browser import Tab, look, needs_chromium, served
from tests.fakes.planted import ended

pytestmark = needs_chromium
SEEDS = 8
STEPS = 24
REWARD = "Reward, before shaping"
LOSS = "Policy loss"
NORM = "Gradient norm"
HELD_OUT = "Held-out success"
# Of a chart the pixels in the colour of the first run: how many are of a line, of raw values behind it and of
# a band, and how far from the top the line is in the middle, as a share.
PAINT = """
window.paint = (title) => {
  const canvas = document.querySelector(`[data-title="${title}"] canvas`), { width, height } = canvas;
  const copy = Object.assign(document.createElement("canvas"), { width, height })
    .getContext("2d", { willReadFrequently: true });
  copy.drawImage(canvas, 0, 0);
  const { data } = copy.getImageData(0, 0, width, height);
  const found = { line: 0, edge: 0, raw: 0, band: 0 }, middle = [];
  for (let at = 0; at < data.length; at += 4) {
    const [red, , blue, alpha] = data.slice(at, at + 4);
    if (blue < red + 50) continue;
    const kind = alpha > 0xf0 ? "line" : alpha > 0x50 ? "edge" : alpha > 0x40 ? "raw" : "band";
    found[kind] += 1;
    if (kind === "line" && (at / 4) % width === Math.round(width / 2)) middle.push(at / 4 / width / height);
  }
  return { ...found, down: middle[0] };
}
"""
PLOT = """(place => [place.left, place.top, place.width, place.height])(
    document.querySelector(`[data-title="{title}"] .u-over`).getBoundingClientRect())"""


def test_curves_are_compared_zoomed_chosen_and_lead_to_episodes(tmp_path: Path) -> None:
    async def test(tab: Tab) -> None:
        async with served(Views(save_seeds(tmp_path), ended)) as url:
            await tab.open(f"{url}#tab=charts")
            await seeds_are_a_mean_with_a_band(tab)
            await raw_values_are_faint_behind_smoothed_ones(tab)
            await an_axis_is_logarithmic(tab)
            await what_is_looked_at_is_in_the_address(tab)
            await a_click_on_a_step_shows_its_episodes(tab)
            await a_mark_says_what_happened_and_lets_a_click_through(tab)

    look(tmp_path / "profile", test)


async def seeds_are_a_mean_with_a_band(tab: Tab) -> None:
    await tab.until(f"""document.querySelector('[data-title="{REWARD}"] canvas')""")
    await tab.run(PAINT)
    assert await tab.run('document.querySelector("#chart-bar .legend").innerText') == "8 seeds: seed-0 …"
    assert "step 12\n0.35 (0 to 0.7)" in await pointed_at(tab, REWARD, 11 / 23)
    await tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
    await tab.until('!document.getElementById("tip")')
    painted = await paint(tab, REWARD)
    assert painted["line"] > 500 and painted["band"] > 50000 and painted["raw"] < 100


async def raw_values_are_faint_behind_smoothed_ones(tab: Tab) -> None:
    other_seeds = ",".join(map(str, range(1, SEEDS)))
    await tab.run(f'location.hash = "tab=charts&seeds=apart&out={other_seeds}"')
    await tab.until('document.querySelectorAll("#chart-bar .legend button").length === 8')
    painted = await paint(tab, LOSS)
    assert painted["raw"] > 0.3 * painted["line"] > 200
    await tab.run("""(slider => { slider.value = 0; slider.dispatchEvent(new Event("input")); })(
        document.getElementById("smooth"))""")
    raw = f'paint("{LOSS}").raw < 0.15 * paint("{LOSS}").line'  # where edges look like it
    await tab.until(f'location.hash.includes("smooth=0") && {raw}')


async def an_axis_is_logarithmic(tab: Tab) -> None:
    assert (await paint(tab, NORM))["down"] > 0.8
    await tab.run('document.getElementById("log").click()')
    await tab.until(f'location.hash.includes("log=1") && paint("{NORM}").down < 0.6')
    await tab.run('document.getElementById("log").click()')


async def what_is_looked_at_is_in_the_address(tab: Tab) -> None:
    await tab.run("""(names => { names.value = "entropy, policy"; names.dispatchEvent(new Event("change")) })(
        document.getElementById("panels"))""")
    titles = '[...document.querySelectorAll("figure")].map(one => one.dataset.title).join()'
    await tab.until(f'{titles} === "{LOSS},own/entropy"')
    left, top, wide, high = await tab.run(PLOT.replace("{title}", LOSS))
    await tab.drag((left + 0.5 * wide, top + high / 2), (left + 0.9 * wide, top + high / 2))
    await tab.until('document.getElementById("whole")')
    address = await tab.run("location.hash")
    low, high = map(float, address.partition("zoom=")[2].partition("&")[0].split("%7E"))
    assert low == pytest.approx(12.5, abs=0.2) and high == pytest.approx(21.7, abs=0.2)
    await tab.call("Page.reload")
    await tab.until(f'!window.paint && {titles} === "{LOSS},own/entropy"')
    assert await tab.run("location.hash") == address
    assert "step 13\n1" in await pointed_at(tab, LOSS, 0.02)
    await tab.press("0")
    await tab.until('!document.getElementById("whole")')


async def a_click_on_a_step_shows_its_episodes(tab: Tab) -> None:
    assert "step 5\n1" in await pointed_at(tab, LOSS, 4.1 / 23)
    left, top, wide, high = await tab.run(PLOT.replace("{title}", LOSS))
    pointer = (left + 4.1 / 23 * wide, top + high / 2)
    await tab.drag(pointer, pointer)
    await tab.until('document.querySelectorAll("#list tbody tr").length === 4')
    assert '[["step","=",5],["kind","=","train"]]' in await tab.run("decodeURIComponent(location.hash)")


async def a_mark_says_what_happened_and_lets_a_click_through(tab: Tab) -> None:
    await tab.run('location.hash = "tab=charts&panels=held-out"')
    await tab.until(f"""document.querySelector('[data-title="{HELD_OUT}"] .happening')""")
    left, top, wide, high = await tab.run(PLOT.replace("{title}", HELD_OUT))
    mark = (left + 11 / 23 * wide, top + high - 3)  # of the validation at step 12
    await tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=mark[0], y=mark[1])
    await tab.until("""document.querySelector("#tip .happened").innerText.includes("50.0% (step 12)")""")
    await tab.drag(mark, mark)
    await tab.until('document.querySelectorAll("#list tbody tr").length === 24')
    assert '[["step","=",12],["kind","=","held+out"]]' in await tab.run("decodeURIComponent(location.hash)")


async def paint(tab: Tab, title: str) -> dict[str, Any]:
    return await tab.run(f"paint({json.dumps(title)})")


async def pointed_at(tab: Tab, title: str, share: float) -> str:
    """What is said beside the mouse there."""
    left, top, wide, high = await tab.run(PLOT.replace("{title}", title))
    await tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=left + share * wide, y=top + high / 2)
    await tab.until('document.getElementById("tip")')
    return await tab.run('document.getElementById("tip").innerText')


def save_seeds(directory: Path) -> list[Path]:
    """The first one has episodes, too. The reward of each seed is always the same, a tenth of its number; the
    loss goes up and down, and the norm grows tenfold in six steps."""
    first = planted.regression(directory / "seed-0", worse=False)
    config = msgspec.yaml.decode((first / "config.yaml").read_bytes())
    runs = [directory / f"seed-{seed}" for seed in range(SEEDS)]
    for seed, run_dir in enumerate(runs):
        run_dir.mkdir(exist_ok=True)
        (run_dir / "config.yaml").write_bytes(msgspec.yaml.encode(config | {"seed": seed}))
        rows = [
            {
                "training/step": float(step),
                "time_s": 2.0 * step,
                "timing_s/step": 1.0,
                "rollout/score/mean": seed / 10,
                "actor/pg_loss": float(step % 2),
                "actor/grad_norm": 10 ** (step / 6),
                "own/entropy": 1.0 / step,
                **({"val-core/all/sampled/success": 0.5} if step == 12 else {}),
            }
            for step in range(1, STEPS + 1)
        ]
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    return runs
