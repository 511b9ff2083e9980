"""How long `asyncrl view` takes over long runs: its answers, and its page in Chromium; how large both get.

    python tools/bench/viewer.py                100,000 episodes, 50,000 steps, under twenty names
    python tools/bench/viewer.py --keep DIR     made there once, and looked at again

The real command serves a run directory, each answer is asked for `--repeat` times, and a browser goes through
the tabs. CPU seconds are of the server: on a machine with other work only they say much. Episodes are opened
last: the memory of the server is printed before and after. Of the tab it is what its process alone has.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import urlopen

import psutil
from common import ROOT, table

from asyncrl.observe.timeline import Timeline
from asyncrl.types import DropReason, EpisodeEnd, Message, Sample, ToolCall, ToolReply
from tests.fakes.browser import Tab, browser
from tests.fakes.planted import PlantedRun, Played, Said, report

MEMBERS = 8
GROUPS = 2
NAMES = 150
SAMPLES = 5000
BEGIN = 1.7e9  # seconds
TOOLS = ("search", "calculator", "bash", "edit")
WORDS = [a + b + c for a in ("ra", "ko", "mi", "tu") for b in ("le", "no", "si") for c in ("m", "n", "")]
SORTS = """score -score reward tokens -tokens turns calls seconds -lag step end question answer source
    -components.acc failed_tool"""
CONDITIONS: list[list[Any]] = [
    *(["kind", "=", "train"], ["state", "=", "dropped"], ["reason", "=", "group_short"]),
    *(["end", "=", "length"], ["score", "=", [0.2, 0.4]], ["failed_tool", "=", "bash"]),
    *(["agent", "=", "helper"], ["source", "=", "logic"], ["components.acc", "=", 1.0]),
    *(["step", ">=", 5000], ["tokens", "<=", 60], ["lag", ">=", 3], ["group", "=", 77]),
]
PAGE_SECONDS = 1.0
ANSWER_SECONDS = 0.5
SEARCH_SECONDS = 2.0
MEMORY_BYTES = 200e6


def make_run(run_dir: Path, episodes: int, steps: int) -> None:
    """Write a run of so many episodes, of which each 16th group was dropped. Its metrics have more steps."""
    draw = random.Random(0)
    step = 0
    ready = 0

    samples = [
        Sample(
            row,
            ("math", "logic", "code")[row % 3],
            (Message("user", _random_text(draw, 25)),),
            str(row % 1000),
        )
        for row in range(SAMPLES)
    ]

    planted_run = PlantedRun(
        run_dir, samples, buffer={"episodes_per_group": MEMBERS, "groups_per_batch": GROUPS}
    )
    for number in range(episodes // MEMBERS):
        group = planted_run.buffer.admit_group(now=0.0)
        for uid in group.members:
            planted_run.land(uid, _played(draw, step), step)

        if number % 16 == 15:
            planted_run.buffer.drop_group(group, DropReason.GROUP_SHORT)
        elif ready := (ready + 1) % GROUPS:
            continue
        else:
            planted_run.commit()
            step += 1

    planted_run.close()
    names = ["rollout/score/mean", "actor/entropy", "actor/pg_loss", "actor/grad_norm", "async/ready"]
    names += [f"bench/{number}" for number in range(NAMES - len(names))]
    times = [
        {"training/step": float(at), "time_s": float(at), "timing_s/step": 1.0} for at in range(1, steps)
    ]
    report(run_dir, (row | {name: round(draw.random(), 6) for name in names} for row in times))

    timelines = {role: Timeline(run_dir / "timeline" / f"{role}-0.jsonl") for role in ("trainer", "rollout")}
    for at in range(min(steps, 2000)):
        for micro in range(8):
            start = BEGIN + at + micro / 10
            timelines["trainer"].record("train", start, start + 0.1, step=at + 1, micro=micro)
        timelines["trainer"].record("step", BEGIN + at + 0.8, BEGIN + at + 0.9, step=at + 1)
        for part in range(16):
            name = ("decode", "search", "calculator", "reward")[part % 4]
            start = BEGIN + at + part / 16
            timelines["rollout"].record(name, start, start + 0.05, calls=4, seconds=0.2)

    for timeline in timelines.values():
        timeline.close()


def _random_text(draw: random.Random, count: int) -> str:
    return " ".join(draw.choices(WORDS, k=count))


def _played(draw: random.Random, step: int) -> Played:
    """Return an episode with two tool calls, of which each tenth fails, and an answer."""
    old = max(0, step - draw.randrange(5))
    agent = draw.choice(("", "main", "helper"))
    errors = [f"Error {draw.randrange(4)}: it broke" if draw.random() < 0.1 else None for _ in range(2)]
    replies = [
        ToolReply(ToolCall(draw.choice(TOOLS), '{"a": 1}'), "42", error, draw.random()) for error in errors
    ]
    turns = [Said(_random_text(draw, 8), reply, agent=agent, versions=(old, step)) for reply in replies]
    answer = f"so the answer is {draw.randrange(10**6)} {_random_text(draw, 12)}"
    parts = {"acc": float(draw.random() < 0.5), "format": 1.0}
    return Played(turns, answer, round(draw.random(), 3), parts, draw.choice(list(EpisodeEnd)))


@contextmanager
def served(runs: list[Path]) -> Iterator[tuple[str, psutil.Process]]:
    """Serve the runs by the real command; yield the page's address and the server's process."""
    command = [sys.executable, "-m", "asyncrl.cli", "view", *map(str, runs)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip(), psutil.Process(process.pid)
        finally:
            process.terminate()


class Bench:
    """Requests answers and writes down their times and sizes."""

    def __init__(self, address: str, server: psutil.Process, repeat: int) -> None:
        self.address = address
        self.server = server
        self.repeat = repeat
        self.lines: list[list[str]] = []

    def ask(self, title: str, name: str, limit: float, **query: Any) -> None:
        walls = list[float]()

        cpus = list[float]()
        size = 0
        for _ in range(self.repeat):
            wall = time.perf_counter()
            cpu = self._cpu()

            try:
                with urlopen(f"{self.address}api/{name}?{urlencode(query)}") as answer:
                    size = len(answer.read())
            except HTTPError as error:
                raise SystemExit(f"{title}: {error.read().decode()}") from None

            walls.append(time.perf_counter() - wall)
            cpus.append(self._cpu() - cpu)

        verdict = "over" if median(cpus) > limit else ""
        seconds = [
            f"{min(seconds_of_kind):.2f} / {median(seconds_of_kind):.2f} / {max(seconds_of_kind):.2f}"
            for seconds_of_kind in (walls, cpus)
        ]

        self.lines.append([title, *seconds, f"{limit:g}", f"{size:,}", verdict])

    def _cpu(self) -> float:
        times = self.server.cpu_times()
        return times.user + times.system

    def memory(self, title: str) -> None:
        self.size(f"server {title}", self.server.memory_info().rss)

    def size(self, title: str, size: int) -> None:
        verdict = "over" if size > MEMORY_BYTES else ""
        self.lines.append(
            [f"memory: {title}", f"{size / 1e6:.0f} MB", "", f"{MEMORY_BYTES / 1e6:.0f} MB", "", verdict]
        )


def look(bench: Bench, groups: int) -> None:
    """Request every answer that the page requests, episodes last."""
    bench.memory("at the start")
    bench.ask("runs", "runs", PAGE_SECONDS)
    bench.ask("overview", "overview", PAGE_SECONDS)
    bench.ask("list, first page", "episodes", PAGE_SECONDS)
    bench.ask("list, page 500", "episodes", ANSWER_SECONDS, start=50_000)

    for order in SORTS.split():
        bench.ask(f"sort {order}", "episodes", ANSWER_SECONDS, order=order)
    for condition in CONDITIONS:
        bench.ask(
            "where {} {} {}".format(*condition), "episodes", ANSWER_SECONDS, where=json.dumps([condition])
        )

    every = json.dumps([CONDITIONS[at] for at in (0, 3, 6, 7, 8)])
    bench.ask("five facets and a sort", "episodes", ANSWER_SECONDS, where=every, order="-score")
    bench.ask("search: a word of answers", "episodes", SEARCH_SECONDS, search="answer")
    bench.ask("search: a word that is nowhere", "episodes", SEARCH_SECONDS, search="nowhere")
    bench.ask("tools", "tools", ANSWER_SECONDS)
    bench.ask("tools of long ones", "tools", ANSWER_SECONDS, where='[["end","=","length"]]')
    bench.memory("after lists")
    bench.ask("rows", "rows", PAGE_SECONDS)
    bench.ask("lanes", "lanes", PAGE_SECONDS)
    bench.memory("after charts and lanes")
    bench.ask("an episode", "episode", PAGE_SECONDS, uid="0.0")
    bench.ask("another", "episode", PAGE_SECONDS, uid=f"{groups // 2}.0")
    bench.memory("after episodes")


async def page(bench: Bench, profile: Path) -> None:
    """Open each tab of the page until the tab is drawn, and time a click on it."""
    async with browser(profile) as tab:
        await tab.open("about:blank")
        began = time.perf_counter()
        await tab.call("Page.navigate", url=bench.address)
        await drawn(tab, bench, "page: overview, the first", PAGE_SECONDS, began)

        for title, address, limit in (
            ("page: episodes", "tab=episodes", PAGE_SECONDS),
            ("page: sorted", "tab=episodes&order=-score", ANSWER_SECONDS),
            (
                "page: a facet",
                f"tab=episodes&order=-score&where={json.dumps([CONDITIONS[3]])}",
                ANSWER_SECONDS,
            ),
            ("page: a search", "tab=episodes&search=answer", SEARCH_SECONDS),
            ("page: an episode", "tab=episodes&uid=7.0&colour=versions", ANSWER_SECONDS),
            ("page: compare all runs", "tab=compare", 0.0),
            ("page: time", "tab=time", PAGE_SECONDS),
            ("page: charts of all runs", "tab=charts", 0.0),
        ):
            began = time.perf_counter()
            await tab.run(f"document.body.dataset.ready = ''; location.hash = {json.dumps(address)}")
            await drawn(tab, bench, title, limit, began)

        processes = psutil.Process().children(recursive=True)
        tabs = [renderer for renderer in processes if "--type=renderer" in renderer.cmdline()]
        size = max(renderer.memory_full_info().uss for renderer in tabs)
        bench.size("tab", size)

        bench.lines += [["page complains", text, "", "", "", "over"] for text in tab.complaints]


async def drawn(tab: Tab, bench: Bench, title: str, limit: float, began: float) -> None:
    await tab.until("document.body.dataset.ready")
    wall = time.perf_counter() - began
    bench.lines.append([title, f"{wall:.2f}", "", f"{limit:g}", "", "over" if wall > limit > 0 else ""])


def main() -> None:
    """Make the run, ask for answers, look at the page, print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument("--runs", type=int, default=20, help="so many names of the same run")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="make the run there, or look at the one there"
    )
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as temporary:
        directory = options.keep or Path(temporary)
        began = time.perf_counter()
        if not (directory / "run").exists():
            make_run(directory / "run", options.episodes, options.steps)
        print(f"made in {time.perf_counter() - began:.1f} s", flush=True)

        other_runs = [directory / f"run-{number}" for number in range(1, options.runs)]
        for other_run in (path for path in other_runs if not path.exists()):
            other_run.symlink_to("run")

        with served([directory / "run", *other_runs]) as (address, server):
            bench = Bench(address, server, options.repeat)
            look(bench, options.episodes // MEMBERS)
            asyncio.run(page(bench, Path(temporary) / "profile"))
            bench.memory("after the page")

        header = ["answer", "seconds: min / median / max", "CPU seconds, the same", "budget", "bytes", ""]
        print(table(header, bench.lines))


if __name__ == "__main__":
    main()
