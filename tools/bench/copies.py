"""What a copy of `run.db` costs the coordinator (`asyncrl/store/copies.py`), in a run of many episodes.

    python tools/bench/copies.py --episodes 1000000 --batch 512 --kept 100 --turns 4

The run has trained all of them but what is live: five batches' worth. The index still has them all, and the
plans and turns of the newest `--kept` batches, which no checkpoint covers. A loop goes on writing, a turn of
64 episodes every millisecond or so, as the coordinator does. It prints what the loop gives to a copy, its
longest turn with and without one, the seconds until the copy is in place, and its size; and the seconds of a
look for damage, as before a start, whole and with a limit of 0.1 s.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import time
from collections import Counter
from pathlib import Path

from common import ROOT, table

from asyncrl.buffer.batches import Batch
from asyncrl.buffer.records import EpisodeRecord, GroupRecord, State
from asyncrl.store import schema
from asyncrl.store.reader import RunReader
from asyncrl.store.runstore import RunStore
from asyncrl.types import EpisodeResult, EpisodeStats

SIZE, LIVE = 8, 5  # episodes of a group; batches' worth of what is live


def fill(store: RunStore, options: argparse.Namespace) -> Counter[State]:
    """All of a run, in transactions of a batch; the episodes by state."""
    groups, batches, counts = options.batch // SIZE, options.episodes // options.batch, Counter[State]()
    for step in range(batches):
        live = step >= batches - LIVE
        state = State.RUNNING if live else State.TRAINED
        numbers = range(step * groups, (step + 1) * groups)
        found = [GroupRecord(g, g, step, [f"{g}.{m}" for m in range(SIZE)], position=g) for g in numbers]
        store.put_groups(found, {group.id: group for group in found} if live else {})
        uids = [uid for group in found for uid in group.members]
        result, stats = EpisodeResult(1.0, 1000, (0.5, 0.5)), EpisodeStats(options.turns)
        store.put_episodes(
            EpisodeRecord(uid, int(uid.split(".")[0]), 0, state=state, result=result, stats=stats, step=step)
            for uid in uids
        )
        counts[state] += len(uids)
        if not live:
            store.put_commit(step + 1, 1, "0" * 32)
        if step >= batches - LIVE - options.kept:
            for uid in uids:
                for turn in range(options.turns):
                    store.put_frame(uid, turn, "generated", b"x")
                    store.put_frame(uid, turn, "replied", b"x")
            if not live:
                store.put_batches([Batch(step, [uids], set(numbers), closed=True)])
        store.commit()
    store.cover(batches - LIVE - options.kept, 0)
    store.commit()
    return counts


def turns(store: RunStore, seconds: float) -> list[float]:
    """Of a loop that writes, until a copy is in place, and `seconds` at least."""
    found, end, number = [], time.perf_counter() + seconds, 0
    while time.perf_counter() < end or store.copies.busy:
        begin, number = time.perf_counter(), number + 1
        for member in range(64):
            store.put_frame(f"new{number}.{member}", 0, "generated", b"x" * 1000)
        store.commit()
        found.append(1000 * (time.perf_counter() - begin))
        time.sleep(0.001)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=512, help="episodes of a batch")
    parser.add_argument("--kept", type=int, default=100, help="batches that no checkpoint covers")
    parser.add_argument("--turns", type=int, default=4, help="of an episode, each with a reply")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--run-dir", type=Path, default=ROOT / "runs" / "copies")
    options = parser.parse_args()
    shutil.rmtree(options.run_dir, ignore_errors=True)
    store = RunStore(options.run_dir)
    counts = fill(store, options)
    lines = []
    for _ in range(options.repeat):
        without, begin = turns(store, 1.0), time.perf_counter()
        store.copies.due = True
        store.copies.take(counts)
        given = 1000 * (time.perf_counter() - begin)
        during = turns(store, 0.0)
        took = time.perf_counter() - begin
        newest = max((options.run_dir / "copies").iterdir())
        reader = RunReader.open(newest)
        assert sum(reader.counts().values()) == counts.total()
        reader.close()
        size = (newest / "run.db").stat().st_size / 2**20
        shown = [
            f"{max(without):.0f}",
            f"{given:.1f}",
            f"{max(during):.0f}",
            f"{statistics.median(during):.1f}",
        ]
        lines.append([*shown, f"{took:.2f}", f"{size:.0f}"])
    store.close()
    header = ["longest turn without, ms", "given to it, ms", "longest turn meanwhile, ms", "median, ms"]
    looks = []
    for schema.LOOK in (600.0, 0.1):
        begin = time.perf_counter()
        schema.check_schema(options.run_dir)
        looks.append(f"{time.perf_counter() - begin:.2f}")
    size = (options.run_dir / "run.db").stat().st_size / 2**20
    print(f"run.db: {size:.0f} MiB, looked at in {looks[0]} s; {looks[1]} s with the limit")
    print(table([*header, "in place after, s", "MiB"], lines))
    shutil.rmtree(options.run_dir)


if __name__ == "__main__":
    main()
