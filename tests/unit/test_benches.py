"""Benchmarks of tools/bench: what they replay from a seed, plan, count and sum up; one of them in small."""

from __future__ import annotations

import argparse
import ast
import asyncio
import json
import math
import statistics
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from asyncrl.engines.base import Request, Sampling
from asyncrl.store.runstore import RunStore
from asyncrl.tools import Toolbox
from asyncrl.types import Generation, Sample, StopReason, ToolCall, Turn, VersionSpan
from tests.fakes.scripts import TOOLS, bench_script

bench = bench_script("async_ratio")
replayed = bench_script("replayed")


def test_the_interval_of_a_rate_stays_between_none_and_all() -> None:
    """Rounding gave -0% of none."""
    for trials in (1, 5, 19):
        assert bench_script("common").wilson(0, trials)[0] >= 0.0
        assert bench_script("common").wilson(trials, trials)[1] <= 1.0


def _delays(seed: int, samples: list[int], log: Path, monkeypatch: pytest.MonkeyPatch) -> dict[Any, float]:
    """By sample, member and call, with the episodes of `samples` opened in that order."""
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def play() -> dict[Any, float]:
        box = Toolbox({"calculator": calculator})
        found = {}
        for at, row in enumerate(samples):
            session = box.session(Sample(row, "", (), ""))
            await session.open()
            for number in range(2):
                reply = await session.call(ToolCall("calculator", '{"a": 6, "op": "times", "b": 7}'))
                assert reply.content == "42"
                found[row, samples[:at].count(row), number] = slept.pop()
            await session.close()
        return found

    calculator = replayed.slow_calculator(mu=-1.0, sigma=1.0, seed=seed, log=str(log))
    monkeypatch.setattr(replayed.asyncio, "sleep", sleep)
    return asyncio.run(play())


def test_delays_depend_on_seed_sample_member_and_call_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "lives"
    one = _delays(0, [5, 5, 9], log, monkeypatch)
    assert one == _delays(0, [9, 5, 5], log, monkeypatch)
    assert len(set(one.values())) == 6
    assert not set(one.values()) & set(_delays(1, [5, 5, 9], log, monkeypatch).values())
    assert [json.loads(line)[:2] for line in log.read_text().splitlines()][:3] == [[5, 0], [5, 1], [9, 0]]


@pytest.mark.parametrize(("forced", "shortest"), [("forced_lengths", 30), ("forced_answers", 2)])
def test_forced_lengths_depend_on_the_episodes_key(
    forced: str, shortest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Sampling] = []

    class Engine:
        async def generate(self, request: Request) -> None:
            asked.append(request.sampling)

    monkeypatch.setattr(replayed.engines, "load", lambda name: Engine)
    engine = getattr(replayed, forced)()
    for key in [*range(200), 0]:
        asyncio.run(engine.generate(Request("s", (1,), Sampling(500, (2,)), key)))
    lengths = [sampling.max_new_tokens for sampling in asked]
    assert lengths[0] == lengths[-1]
    assert 1 <= min(lengths) <= shortest and 120 < max(lengths) <= 500
    assert all(not sampling.stop_ids for sampling in asked)


@pytest.fixture
def finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A plan whose runs are ten made-up steps: the third to the eighth take 2 s, others 100 s; half of the
    tokens of the seventh and the eighth are masked; groups live 3 s; 8 are live after each commit."""
    folder = tmp_path / "run"
    lives = tmp_path / "lives"
    folder.mkdir()
    clock = 0.0
    lines = []
    for step in range(1, 11):
        clock += 2.0 if 2 < step <= 8 else 100.0
        row = {"time_s": clock, "timing_s/step": 0.0, "trainer/model_tokens": 100.0, "async/live_groups": 8.0}
        row |= {"staleness/masked_token_frac": 0.5 * (step in (7, 8)), "staleness/lag/mean": 1.0}
        lines.append(json.dumps(row | {"staleness/lag/max": float(step)}))
    (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"time_s": 1.0}']))
    members = [[0, m, 10.0 + (m > 5), 12.0 + (m == 2)] for m in range(8)]
    lives.write_text("\n".join(map(json.dumps, [*members, *([0, 8 + m, 20.0, 23.0] for m in range(8))])))
    watch = bench.Watch(folder, lives)
    watch.samples = [(0.0, n, {"rollout-0": 5.0 + 2 * n, "trainer-0": 1.0 * n}) for n in range(11)]
    monkeypatch.setattr(bench.Plan, "_run", lambda *args, **kwargs: watch)
    return bench.Plan(tmp_path, [], 10, 0, {"calculator": 0.2})


def test_a_mode_is_charged_for_masked_tokens_in_the_middle_of_the_run(finished: Any) -> None:
    figures = finished.mode("zero", "async", [])
    assert figures["s"] == pytest.approx(2.0)
    assert figures["T"] == pytest.approx(2.0 * 4 / 3)
    assert figures["masked"] == pytest.approx(1 / 4)
    assert figures["cpu"] == pytest.approx(3.0)
    assert figures["lag_max"] == 8.0
    assert figures["littles"] == pytest.approx(3.0 * bench.GROUPS / (8 + bench.GROUPS))


def test_delays_and_deadlines_follow_the_machines_g() -> None:
    work = bench.WORKLOADS["real"]
    assert work.delay(0.2) == f"mu: {math.log(0.1):.4f}, sigma: 2.42"
    assert work.limit(0.2) == ["rollout.episode_timeout=6.40"]
    assert bench.WORKLOADS["zero"].delay(0.2) == "" and bench.WORKLOADS["zero"].limit(0.2) == []


def test_the_trainer_is_stopped_while_episodes_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []

    class Process:
        def cpu_times(self) -> Any:
            return type("Times", (), {"user": 1.0, "system": 0.5})

        def send_signal(self, number: Any) -> None:
            sent.append(number.name)

    names = ["coordinator-0", "rollout-0", "trainer-0"]
    monkeypatch.setattr(bench, "role_processes", lambda launcher: {name: Process() for name in names})
    monkeypatch.setattr(bench.psutil, "Process", lambda pid: Process())
    watch = bench.Watch(tmp_path, tmp_path / "lives", hold=2)
    for written in ("", "a\n", "a\nb\n", "a\nb\nc\n"):
        (tmp_path / "lives").write_text(written)
        watch(1)
    assert sent == ["SIGSTOP", "SIGCONT"]
    assert watch.samples[-1][2] == dict.fromkeys([*names, "launcher"], 1.5)


def test_a_mode_keeps_commas_within_values() -> None:
    assert bench.mode("x=a.b=1,c={d: 1, e: 2},f=[g,h]") == ("x", ["a.b=1", "c={d: 1, e: 2}", "f=[g,h]"])
    with pytest.raises(Exception, match="give NAME=OVERRIDE"):
        bench.mode("x")


def row(arm: str, lag: int, seed: int, success: float) -> dict[str, Any]:
    return {"arm": arm, "lag": lag, "seed": seed, "success": success, "low": success - 0.1, "seconds": 9.6}


@pytest.mark.slow
def test_lags_come_first_and_controls_run_once() -> None:
    bench = bench_script("staleness")
    planned = [(p.arm, p.lag, p.seed) for p in bench.plan(["start", "shuffled", "none"], [16, 0], 2)]
    assert planned == [
        ("none", 16, 0),
        ("none", 16, 1),
        ("start", 0, 0),
        ("shuffled", 0, 0),
        ("none", 0, 0),
        ("shuffled", 0, 1),
        ("none", 0, 1),
    ]


@pytest.mark.slow
def test_the_bound_is_the_lag_and_only_one_arm_is_uncorrected() -> None:
    bench = bench_script("staleness")
    assert bench.Point("none", 8, 3).config().algorithm.correction == {}
    for arm in ("dapo", "rloo"):
        config = bench.Point(arm, 8, 3).config()
        assert (config.buffer.max_staleness, config.seed) == (8, 3)
        assert config.algorithm.correction != {}


@pytest.mark.slow
def test_differences_are_paired_by_seed() -> None:
    report = bench_script("staleness_report")
    rows = [row("none", 4, seed, value) for seed, value in enumerate((0.1, 0.5))]
    rows += [row("rloo", 4, seed, value) for seed, value in ((2, 0.9), (1, 0.75), (0, 0.35))]
    line = report.markdown(rows, ["none", "rloo"]).splitlines()[-1]
    # Means over all seeds, the gap over the two that both have: +0.25 in each.
    assert line.startswith("| `rloo` | 4 | 0.667 [")
    assert "+0.250 [+0.250, +0.250]" in line and "0.35 0.75 0.90" in line and line.endswith("| 0.25 | 10 |")


@pytest.mark.slow
@pytest.mark.full
def test_good_episodes_do_not_wait_for_bad_tools() -> None:
    """One that hangs (in three ways), crashes, ignores cancellation, replies 10 MB: all episodes end, and the
    turns of the good ones end long before the deadline of the bad tools."""
    bench = bench_script("episodes")
    bad = len(bench.BAD)
    load = bench.Load(episodes=12 + bad, turns=3, tool_seconds=0.02, turn_seconds=0.05, bad=bad)
    figures = asyncio.run(bench.run(load))
    assert not figures.failed
    assert figures.turns == 2 * 3 * (12 + len(bench.BAD))
    assert len(figures.overhead) == 2 * 2 * 12
    assert statistics.median(figures.overhead) < bench.BAD_SECONDS / 2
    assert figures.row("good").count("|") == 6


def test_what_a_sleep_lost_is_counted_within_turns_and_between_them() -> None:
    def turn(context: int, *ends: tuple[int, int]) -> Turn:
        starts = [0, *(end for end, _ in ends)]
        spans = tuple(VersionSpan(start, end, v, v) for start, (end, v) in zip(starts, ends, strict=False))
        return Turn(
            0, (1,) * context, Generation((2,) * starts[-1], (0.0,) * starts[-1], spans, StopReason.STOP)
        )

    lost = bench_script("shifts").lost
    assert not [*lost([turn(10, (5, 3)), turn(4, (6, 3))])]
    assert [*lost([turn(10, (5, 3), (8, 4)), turn(4, (6, 4)), turn(2, (7, 6))])] == [15, 10 + 8 + 4 + 6 + 2]


def test_the_bench_of_images_deletes_only_its_runs(tmp_path: Path) -> None:
    """`--run-dir .` in the directory of the image example, whose data lie in `images/`."""
    images_bench = bench_script("images")
    options = argparse.Namespace(run_dir=tmp_path)
    example = tmp_path / "images" / "train.parquet"
    example.parent.mkdir()
    example.write_bytes(b"rows")
    with pytest.raises(SystemExit, match="images was not made by this bench, and is not deleted"):
        images_bench.fresh_directory(options, "images")
    assert example.read_bytes() == b"rows"

    for _ in range(2):
        run_dir = images_bench.fresh_directory(options, "texts")
        assert not (run_dir / "run.db").exists()
        (run_dir / "run.db").touch()


def test_the_bench_of_images_measures_stored_files(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    for uid, digest, file in (("0.0", "d1", b"small"), ("0.1", "d1", b"small"), ("0.1", "d2", b"larger")):
        store.put_image(uid, 0, digest, file)
    store.commit()
    store.close()
    assert bench_script("images").stored_image_sizes(tmp_path) == (3, [len(b"small"), len(b"larger")])


OPTIONAL = {"atheris", "peft", "sglang", "trl", "tvm_ffi", "verifiers"}  # not in this environment


def test_scripts_import_what_is_there() -> None:
    """mypy does not ask, as some libraries are optional; a bench may lose a neighbour that it needs."""
    files = [path for path in TOOLS.rglob("*.py") if path.parent != TOOLS / "clients"]
    known = {path.stem for path in files} | {path.parent.name for path in files} | sys.stdlib_module_names
    missing = set()
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            tops = {name.partition(".")[0] for name in names} - known - OPTIONAL
            missing |= {(path.name, top) for top in tops if find_spec(top) is None}
    assert not missing
