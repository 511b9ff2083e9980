"""How long the answers of `asyncrl view` take over long runs, and how large its server gets.

    python tools/bench/viewer.py                          100,000 episodes, 50,000 steps
    python tools/bench/viewer.py --runs 20 --keep DIR     the same run under twenty names

A run directory is made by what a run writes it with: the store with groups, episodes, questions, answers and
the payloads of their turns (two tool calls each), metrics of 150 names, a timeline. Then the real command
serves it, and each answer is asked for `--repeat` times. CPU seconds are of the server: on a machine with
other work only they say much. Episodes are opened last: the memory of the server is printed before and after.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import urlopen

import msgspec
import psutil
from common import ROOT, table

from asyncrl.buffer.records import EpisodeRecord, GroupRecord, State
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

MODEL = ROOT / "examples" / "multiturn" / "calculator" / "model"
MEMBERS, TOKENS, NAMES, SAMPLES = 8, 40, 150, 5000
BEGIN = 1.7e9  # seconds
TOOLS = ("search", "calculator", "bash", "edit")
SORTS = """score -score reward tokens -tokens turns calls seconds -lag step end question answer source
    -components.acc failed_tool"""
CONDITIONS: list[list[Any]] = [
    *(["kind", "=", "train"], ["state", "=", "dropped"], ["reason", "=", "group_short"]),
    *(["end", "=", "length"], ["score", "=", [0.2, 0.4]], ["failed_tool", "=", "bash"]),
    *(["agent", "=", "helper"], ["source", "=", "logic"], ["components.acc", "=", 1.0]),
    *(["step", ">=", 40000], ["tokens", "<=", 10], ["lag", ">=", 3], ["group", "=", 77]),
]
PAGE_SECONDS, ANSWER_SECONDS, SEARCH_SECONDS, SERVER_BYTES = 1.0, 0.5, 2.0, 200e6


def make_run(run_dir: Path, episodes: int, steps: int) -> None:
    """A run of so many episodes, of which each 16th group was dropped."""
    draw, ends, groups = random.Random(0), list(EpisodeEnd), episodes // MEMBERS
    words = [a + b + c for a in ("ra", "ko", "mi", "tu") for b in ("le", "no", "si") for c in ("m", "n", "")]

    def said(count: int) -> str:
        return " ".join(draw.choices(words, k=count))

    samples = [
        Sample(row, ("math", "logic", "code")[row % 3], (Message("user", said(25)),), str(row % 1000))
        for row in range(SAMPLES)
    ]
    path = samples_path(run_dir, "train")
    path.parent.mkdir(parents=True)
    with path.open("w+b") as file:
        Samples.write(file, [samples])
    with closing(RunStore(run_dir)) as store:
        for group in range(groups):
            step, uids = group * steps // groups, [f"{group}.{member}" for member in range(MEMBERS)]
            turn = Turn(0, (1,) * 20, (5,) * TOKENS, (-0.5,) * TOKENS, (VersionSpan(0, TOKENS, step, step),),
                        StopReason.STOP)  # fmt: skip
            generated, dropped = msgspec.msgpack.encode(turn), group % 16 == 15
            sample = samples[group % SAMPLES]
            record = GroupRecord(group, sample.row, step, uids, settled=True, baseline=tuple(range(MEMBERS)))
            store.put_groups([record], {})
            store.put_question(group, sample)
            found = []
            for member, uid in enumerate(uids):
                replies = tuple(_reply(draw) for _ in range(2))
                failed = next((reply.call.name for reply in replies if reply.failed), "")
                score, right = round(draw.random(), 3), float(draw.random() < 0.5)
                parts = {"acc": right, "format": 1.0}
                result = EpisodeResult(score, draw.randrange(TOKENS), (score,), parts, end=draw.choice(ends))
                stats = EpisodeStats(1, 2, seconds=draw.random(), failed=sum(one.failed for one in replies))
                found.append(
                    EpisodeRecord(
                        uid, group, member, state=State.DROPPED if dropped else State.TRAINED,
                        reason="group_short" if dropped else "", oldest=max(0, step - draw.randrange(5)),
                        newest=step, turns=1, tokens=60, result=result, stats=stats,
                        step=-1 if dropped else step, agent=draw.choice(("", "main", "helper")),
                        failed_tool=failed,
                    )
                )  # fmt: skip
                store.put_frame(uid, 0, "generated", generated)
                store.put_frame(uid, 0, "replied", msgspec.msgpack.encode(TurnReply(replies)))
                store.put_calls(uid, 0, replies)
                store.put_answer(uid, f"so the answer is {draw.randrange(10**6)} {said(12)}")
            store.put_episodes(found)
            if group % 100 == 0:
                store.commit()
        store.commit()
    _files(run_dir, steps)


def _reply(draw: random.Random) -> ToolReply:
    error = f"Error {draw.randrange(4)}: it broke" if draw.random() < 0.1 else None
    return ToolReply(ToolCall(draw.choice(TOOLS), '{"a": 1}'), "42", error, draw.random())


def _files(run_dir: Path, steps: int) -> None:
    """All but the store and the data."""
    mark_start(run_dir)
    config = {"name": run_dir.name, "model": {"path": str(MODEL)}, "data": {"train": "x"}}
    (run_dir / "config.yaml").write_bytes(msgspec.yaml.encode(parse(config)))
    names = ["rollout/score/mean", "actor/entropy", "actor/pg_loss", "actor/grad_norm", "async/ready"]
    names += [f"bench/{number}" for number in range(NAMES - len(names))]
    draw = random.Random(1)
    with (run_dir / "metrics.jsonl").open("w") as out:
        for step in range(1, steps + 1):
            row = {"training/step": float(step), "time_s": float(step), "timing_s/step": 1.0}
            out.write(json.dumps(row | {name: round(draw.random(), 6) for name in names}) + "\n")
    timelines = {role: Timeline(run_dir / "timeline" / f"{role}-0.jsonl") for role in ("trainer", "rollout")}
    for step in range(min(steps, 2000)):
        at = BEGIN + step
        for micro in range(8):
            start = at + micro / 10
            timelines["trainer"].record("train", start, start + 0.1, step=step + 1, micro=micro)
        timelines["trainer"].record("step", at + 0.8, at + 0.9, step=step + 1)
        for part in range(16):
            name, start = ("decode", "search", "calculator", "reward")[part % 4], at + part / 16
            timelines["rollout"].record(name, start, start + 0.05, calls=4, seconds=0.2)
    for timeline in timelines.values():
        timeline.close()


@contextmanager
def served(runs: list[Path]) -> Iterator[tuple[str, psutil.Process]]:
    """The address of the real command's page, and its process."""
    command = [sys.executable, "-m", "asyncrl.cli", "view", *map(str, runs)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip(), psutil.Process(process.pid)
        finally:
            process.terminate()


class Bench:
    """Asks, and writes down what that took."""

    def __init__(self, address: str, server: psutil.Process, repeat: int) -> None:
        self.address, self.server, self.repeat = address, server, repeat
        self.lines: list[list[str]] = []

    def ask(self, title: str, name: str, limit: float, **query: Any) -> None:
        walls, cpus, size = list[float](), list[float](), 0
        for _ in range(self.repeat):
            wall, cpu = time.perf_counter(), self._cpu()
            try:
                with urlopen(f"{self.address}api/{name}?{urlencode(query)}") as answer:
                    size = len(answer.read())
            except HTTPError as error:
                raise SystemExit(f"{title}: {error.read().decode()}") from None
            walls.append(time.perf_counter() - wall)
            cpus.append(self._cpu() - cpu)
        late = "over" if median(cpus) > limit else ""
        seconds = [f"{min(found):.2f} / {median(found):.2f} / {max(found):.2f}" for found in (walls, cpus)]
        self.lines.append([title, *seconds, f"{limit:g}", f"{size:,}", late])

    def _cpu(self) -> float:
        times = self.server.cpu_times()
        return times.user + times.system

    def memory(self, title: str) -> None:
        """Its own and its children's, which are processes for the time of an answer."""
        size = self.server.memory_info().rss
        self.lines.append([f"memory {title}", f"{size / 1e6:.0f} MB", "", f"{SERVER_BYTES / 1e6:.0f} MB", "",
                           "over" if size > SERVER_BYTES else ""])  # fmt: skip


def look(bench: Bench, groups: int) -> None:
    """All that the page asks for, episodes last."""
    bench.memory("at the start")
    bench.ask("runs", "runs", PAGE_SECONDS)
    bench.ask("list, first page", "episodes", PAGE_SECONDS)
    bench.ask("list, page 500", "episodes", ANSWER_SECONDS, start=50_000)
    for order in SORTS.split():
        bench.ask(f"sort {order}", "episodes", ANSWER_SECONDS, order=order)
    for one in CONDITIONS:
        bench.ask("where {} {} {}".format(*one), "episodes", ANSWER_SECONDS, where=json.dumps([one]))
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


def main() -> None:
    """Make the run, ask for answers, print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument("--runs", type=int, default=1, help="so many names of the same run")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="make the run there, or look at the one there"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        place, began = options.keep or Path(temporary), time.perf_counter()
        if not (place / "run").exists():
            make_run(place / "run", options.episodes, options.steps)
        print(f"made in {time.perf_counter() - began:.1f} s", flush=True)
        others = [place / f"run-{number}" for number in range(1, options.runs)]
        for other in (path for path in others if not path.exists()):
            other.symlink_to("run")
        with served([place / "run", *others]) as (address, server):
            bench = Bench(address, server, options.repeat)
            look(bench, options.episodes // MEMBERS)
        header = ["answer", "seconds: min / median / max", "CPU seconds, the same", "budget", "bytes", ""]
        print(table(header, bench.lines))


if __name__ == "__main__":
    main()
