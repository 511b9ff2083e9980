"""What must hold after any fault: read from the run's files alone, also while it goes on."""

from __future__ import annotations

import math
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.buffer.records import EpisodeRecord, State
from asyncrl.config import read_config
from asyncrl.observe.files import read_rows, read_summary
from asyncrl.observe.timeline import merge_spans, timeline_files
from asyncrl.runtime.activity import DECODE
from asyncrl.runtime.weight_loader import LOAD
from asyncrl.store.checkpoints import CheckpointError, CheckpointManifest, Checkpoints
from asyncrl.store.reader import RunReader

ISSUED = """SELECT (SELECT max(id) + 1 FROM groups),
    (SELECT count(*) FROM episodes WHERE group_id >= 0) + (SELECT coalesce(sum(count), 0) FROM pruned)"""

COMPUTED = ("train", "step", "probe", "trying the largest micro-batch")  # by a rank, on its device
CLOCKS = 0.02  # seconds by which a span may seem to lie elsewhere: two processes stamp them


def manifests(run: Path) -> list[CheckpointManifest]:
    """Return the manifests of all complete checkpoints, oldest first.

    A checkpoint may be about to be complete.
    """
    checkpoints = Checkpoints(run / "checkpoints")
    manifests_of_steps = list[CheckpointManifest]()
    for step in reversed(checkpoints.steps()):
        with suppress(CheckpointError):
            manifests_of_steps.append(checkpoints.manifest(step))
    return manifests_of_steps


def trained_uids(run: Path) -> Counter[str]:
    """How often each episode is in a batch of the lineage, as far as no checkpoint covers the batches."""
    trained: Counter[str] = Counter()
    with closing(RunReader.open(run)) as reader:
        for batch in reader.committed_plans():
            trained.update(batch.uids)
    return trained


def running(run: Path) -> dict[str, int]:
    """Return the number of durable turns of each episode in flight."""
    rows = _read(run, "SELECT record FROM episodes WHERE state='running'")
    return {e.uid: e.turns for e in (msgspec.msgpack.decode(row[0], type=EpisodeRecord) for row in rows)}


def spans(run: Path, role: str, *names: str) -> list[tuple[float, float]]:
    lines = (line for file in timeline_files(run) if file.role == role for line in file.read_added())
    return merge_spans((line.start, line.end) for line in lines if line.name in names)


def at_once(run: Path) -> Iterator[tuple[float, float]]:
    """Return the spans of time in which a rank and an engine computed."""
    decoded = spans(run, "rollout", DECODE)
    if read_config(run).engine.remote:  # workers hear of a server's sleep later
        decoded = [span for spans_of_engine in decoded for span in _awake(spans_of_engine, [*_asleep(run)])]
    for start, end in spans(run, "trainer", *COMPUTED):
        for a, b in decoded:
            if min(end, b) - max(start, a) > CLOCKS:
                yield max(start, a), min(end, b)


def _asleep(run: Path) -> Iterator[tuple[float, float]]:
    """Yield the spans in which servers held nothing: from the answer that they sleep to the next load."""
    loads = [start for start, _ in spans(run, "engine", LOAD)]
    for _, slept in spans(run, "coordinator", "sleep"):
        yield slept, min((start for start in loads if start > slept), default=math.inf)


def _awake(span: tuple[float, float], asleep: list[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Yield the parts of a span outside of other spans, which are in order."""
    start, end = span
    for slept, woke in asleep:
        if slept < end and woke > start:
            yield start, max(start, slept)
            start = woke
    if start < end:
        yield start, end


def troubles(run: Path) -> list[str]:
    """Return the rules that a run breaks, ended or not.

    Each query reads a state of the store; the run may go on between two queries.
    """
    config = read_config(run)
    problems = list[str]()
    buffer = config.buffer
    size = buffer.episodes_per_group
    bound = buffer.max_staleness
    if twice := [uid for uid, times in trained_uids(run).items() if times > 1]:
        problems.append(f"in two batches: {twice}")
    ((groups, episodes),) = _read(run, ISSUED)
    if groups * size != episodes:
        problems.append(f"{groups} groups of {size} were issued, and the store has {episodes} episodes")

    for manifest in manifests(run):
        if len(set(manifest.trained)) < len(manifest.trained):
            problems.append(f"the checkpoint of step {manifest.step} counts an episode twice")

    lag = max((row.get("staleness/lag/max", 0.0) for row in read_rows(run)), default=0.0)
    if lag > bound:
        problems.append(f"a token was trained at a lag of {lag:g}, over the bound of {bound}")
    # A paused worker seems to sample as long; its server may sleep meanwhile.
    if config.shifts and not config.engine.remote and (both := [*at_once(run)]):
        problems.append(f"engines and trainer computed at once: {both}")

    return problems


def troubles_at_end(run: Path) -> list[str]:
    """Return the rules that a completed run breaks: each issued episode is accounted for, and three counts
    of trained episodes agree (the index, the plans, and the last checkpoint along its lineage)."""
    summary = read_summary(run)
    last = manifests(run)[-1]
    with closing(RunReader.open(run)) as reader:
        trained = {"index": reader.counts().get(State.TRAINED, 0), "plans": reader.trained_in_plans()}
    trained |= {"last checkpoint": last.trained_total, "summary": summary["flow"]["trained"]}
    problems = [] if len(set(trained.values())) == 1 else [f"trained, by each: {trained}"]
    problems += [] if last.step == summary["steps"] else [f"the last checkpoint is of step {last.step}"]
    return problems + ([] if summary["conserved"] else [f"not conserved: {summary['flow']}"])


def reward(run: Path, first: bool) -> float:
    """Mean reward of the first, or last, tenth of the steps."""
    scores = [row["rollout/score/mean"] for row in read_rows(run) if "rollout/score/mean" in row]
    some = scores[: max(1, len(scores) // 10)] if first else scores[-max(1, len(scores) // 10) :]
    return sum(some) / max(1, len(some))


def _read(run: Path, query: str) -> list[Any]:
    with closing(sqlite3.connect(f"file:{run / 'run.db'}?mode=ro", uri=True, timeout=10)) as db:
        return db.execute(query).fetchall()
