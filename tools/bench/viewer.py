"""How long `asyncrl view` takes over a long run: seconds from an action in Chromium to the drawn page.

    python tools/bench/viewer.py --episodes 100000

A run directory is made by what a run writes it with: the store with groups, episodes and the payloads of
their turns (two tool calls each), metrics of 150 names, a timeline. Then the page is served, and headless
Chromium opens it, filters and orders the list, opens episodes, and the time. `--answers`: the answers of the
server alone. CPU seconds are of the server and Chromium: on a machine with other work only they say much.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
import msgspec
import psutil
from common import ROOT, table

from asyncrl.buffer.records import EpisodeRecord, GroupRecord, State
from asyncrl.commands.status import ending
from asyncrl.config import parse
from asyncrl.data import Samples, samples_path
from asyncrl.observe.files import mark_start
from asyncrl.observe.timeline import Timeline
from asyncrl.store.runstore import RunStore
from asyncrl.types import (
    EpisodeEnd,
    EpisodeResult,
    EpisodeStats,
    Message,
    Sample,
    StopReason,
    ToolCall,
    ToolReply,
    Turn,
    TurnReply,
    VersionSpan,
)
from asyncrl.viewer.server import ViewServer
from asyncrl.viewer.views import Views

sys.path.append(str(ROOT))
from tests.fakes.browser import Tab, browser

MODEL = ROOT / "examples" / "multiturn" / "calculator" / "model"
MEMBERS, GROUPS_PER_STEP = 8, 8
TOKENS = 40
BEGIN = 1.7e9  # seconds
PRESS_J = 'document.body.dispatchEvent(new KeyboardEvent("keydown", {key: "j", bubbles: true}))'
# What is chosen in the list, one after another, each alone.
FILTERS = {
    "state=trained": {"state": "trained"},
    "state=dropped": {"state": "dropped"},
    "reason=group_short": {"reason": "group_short"},
    "end=length": {"end": "length"},
    "step 100 to 200": {"step_from": "100", "step_to": "200"},
    "reward from 0.9": {"reward_from": "0.9"},
    "tokens from 30": {"length_from": "30"},
    "group=77": {"group": "77"},
    "tool=search": {"tool": "search"},
    "tool that nobody called": {"tool": "none"},
    "order=-reward": {"order": "-reward"},
    "order=-lag": {"order": "-lag"},
    "trained, end=length, order=-length": {"state": "trained", "end": "length", "order": "-length"},
}


def make_run(run_dir: Path, episodes: int) -> None:
    """A run of so many episodes, of which each 16th group was dropped."""
    draw, ends, store = random.Random(0), list(EpisodeEnd), RunStore(run_dir)
    called = TurnReply(
        tuple(ToolReply(ToolCall(name, '{"a": 1}'), "42") for name in ("search", "calculator"))
    )
    replied = msgspec.msgpack.encode(called)
    for group in range(episodes // MEMBERS):
        step, uids = group // GROUPS_PER_STEP, [f"{group}.{member}" for member in range(MEMBERS)]
        spans = (VersionSpan(0, TOKENS, step, step),)
        turn = Turn(0, (1,) * 20, (5,) * TOKENS, (-0.5,) * TOKENS, spans, StopReason.STOP)
        generated = msgspec.msgpack.encode(turn)
        dropped = group % 16 == 15
        record = GroupRecord(group, group % 100, step, uids, settled=True, baseline=tuple(range(MEMBERS)))
        store.put_groups([record], {})
        found = []
        for member, uid in enumerate(uids):
            reward = draw.random()
            end = ends[draw.randrange(len(ends))]
            result = EpisodeResult(reward, draw.randrange(TOKENS), (reward,), end=end)
            stats = EpisodeStats(1, tool_calls=2, seconds=1.0)
            state, reason = (State.DROPPED, "group_short") if dropped else (State.TRAINED, "")
            found.append(
                EpisodeRecord(
                    uid, group, member, state=state, reason=reason, oldest=step, newest=step, turns=1,
                    tokens=60, result=result, stats=stats, step=-1 if dropped else step,
                )
            )  # fmt: skip
            store.put_frame(uid, 0, "generated", generated)
            store.put_frame(uid, 0, "replied", replied)
        store.put_episodes(found)
        if group % 100 == 0:
            store.commit()
    store.commit()
    store.close()
    _files(run_dir, episodes // MEMBERS // GROUPS_PER_STEP)


def _files(run_dir: Path, steps: int) -> None:
    """All but the store."""
    mark_start(run_dir)
    samples = [Sample(row, "bench", (Message("user", f"question {row}"),), "1") for row in range(100)]
    path = samples_path(run_dir, "train")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w+b") as file:
        Samples.write(file, [samples])
    config = {"name": run_dir.name, "model": {"path": str(MODEL)}, "data": {"train": "x"}}
    (run_dir / "config.yaml").write_bytes(msgspec.yaml.encode(parse(config)))
    names = ["rollout/score/mean", "actor/entropy", "actor/pg_loss", "actor/grad_norm", "async/ready"]
    names += [f"bench/{number}" for number in range(145)]
    draw = random.Random(1)
    with (run_dir / "metrics.jsonl").open("w") as out:
        for step in range(1, steps + 1):
            row = {"training/step": float(step), "time_s": float(step), "timing_s/step": 1.0}
            out.write(json.dumps(row | {name: draw.random() for name in names}) + "\n")
    timelines = {role: Timeline(run_dir / "timeline" / f"{role}-0.jsonl") for role in ("trainer", "rollout")}
    for step in range(steps):
        at = BEGIN + step
        for micro in range(8):
            start = at + micro / 10
            timelines["trainer"].record("train", start, start + 0.1, step=step + 1, micro=micro)
        timelines["trainer"].record("step", at + 0.8, at + 0.9, step=step + 1)
        timelines["trainer"].record("snapshot", at + 0.9, at + 1, version=(1, step + 1))
        timelines["rollout"].record("load_weights", at, at + 0.1, version=(1, step), engine="train")
        for part in range(16):
            name, start = ("decode", "search", "calculator", "reward")[part % 4], at + part / 16
            timelines["rollout"].record(name, start, start + 0.05, calls=4, seconds=0.2)
    for timeline in timelines.values():
        timeline.close()


class Clock:
    """Seconds of the wall clock, and of the CPU by this process, which has the server, and by Chromium."""

    def __init__(self) -> None:
        self.lines: list[list[str]] = []
        self._began = self._now()

    def begin(self) -> None:
        self._began = self._now()

    def note(self, title: str) -> None:
        """What took from `begin` to here."""
        wall, cpu = (now - began for now, began in zip(self._now(), self._began, strict=True))
        self.lines.append([title, f"{wall:.2f}", f"{cpu:.2f}"])

    def _now(self) -> tuple[float, float]:
        own = psutil.Process()
        times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
        return time.perf_counter(), sum(each.user + each.system for each in times)


async def drawn(tab: Tab, place: str, action: str) -> None:
    """Until the element `place` has changed after `action`, and two more frames were shown."""
    await tab.run(f"""new Promise(done => {{
        new MutationObserver((_, it) => {{
            it.disconnect();
            requestAnimationFrame(() => requestAnimationFrame(done));
        }}).observe(document.getElementById("{place}"), {{childList: true, subtree: true}});
        {action};
    }})""")


def choose(query: dict[str, str]) -> str:
    """A script: these fields of the filter have the values, the others none."""
    return f"""(wanted => {{
        const fields = [...document.querySelectorAll("#filters [data-key]")];
        const changed = fields.filter(f => f.value !== (wanted[f.dataset.key] ?? (f.dataset.key === "order" ? "newest" : "")));
        changed.forEach(f => f.value = wanted[f.dataset.key] ?? (f.dataset.key === "order" ? "newest" : ""));
        changed.forEach(f => f.dispatchEvent(new Event("change")));
    }})({json.dumps(query)})"""  # noqa: E501


async def in_chromium(views: Views, profile: Path) -> list[list[str]]:
    """Lines of the table."""
    server = ViewServer(views)
    await server.start()
    views.warm_up()
    try:
        async with browser(profile) as tab:
            clock = Clock()
            await tab.open(server.url)
            await tab.until('document.querySelectorAll("#run canvas").length >= 5')
            clock.note("run page")
            clock.begin()
            await tab.press("2")
            await tab.until('document.querySelectorAll("#list tbody tr").length')
            clock.note("episodes, first page")
            for title, query in (FILTERS | {"all again": {}}).items():
                clock.begin()
                await drawn(tab, "list", choose(query))
                clock.note(title)
            for title in ("an episode", "the next one"):
                clock.begin()
                await drawn(tab, "transcript", PRESS_J)
                clock.note(title)
            clock.begin()
            await tab.press("3")
            await tab.until('document.querySelectorAll("#lanes button").length')
            clock.note("time")
            return clock.lines
    finally:
        await server.close()


async def answers(views: Views) -> list[list[str]]:
    """Lines of the table."""
    server, clock = ViewServer(views), Clock()
    await server.start()
    views.warm_up()
    asked = {"runs": ("runs", {}), "rows": ("rows", {}), "first page": ("episodes", {})}
    asked |= {title: ("episodes", query) for title, query in FILTERS.items()}
    asked |= {"an episode": ("episode", {"uid": "0.0"}), "another": ("episode", {"uid": "1.0"})}
    asked |= {"lanes": ("lanes", {}), "lanes, a window": ("lanes", {"from": "50", "to": "60"})}
    try:
        async with aiohttp.ClientSession() as client:
            for title, (name, query) in asked.items():
                clock.begin()
                async with client.get(f"{server.url}api/{name}", params=query) as answer:
                    size = len(await answer.read())
                    assert answer.status == 200, await answer.text()
                clock.note(f"{title} ({size:,} bytes)")
    finally:
        await server.close()
    return clock.lines


def main() -> None:
    """Make the run, look at it, print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--answers", action="store_true")
    parser.add_argument("--run", type=Path, help="keep the run in this directory, or look at the one there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        run_dir = options.run or Path(temporary) / "run"
        began = time.perf_counter()
        if not run_dir.exists():
            make_run(run_dir, options.episodes)
        print(f"made in {time.perf_counter() - began:.1f} s", flush=True)
        views = Views([run_dir], ending)
        looked = answers(views) if options.answers else in_chromium(views, Path(temporary) / "profile")
        print(table(["what", "seconds", "of the CPU"], asyncio.run(looked)))
        print(
            f"memory of the server at its peak: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MB"
        )


if __name__ == "__main__":
    main()
