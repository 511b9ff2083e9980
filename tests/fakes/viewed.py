"""A run directory to look at: a real store with two trained groups, one under way and one dropped."""

from __future__ import annotations

import json
import math
from pathlib import Path

import msgspec

from asyncrl.config import parse
from asyncrl.coordinator.reporting import save_transcripts
from asyncrl.data import samples_path
from asyncrl.errors import ConfigError
from asyncrl.observe.timeline import Timeline
from asyncrl.observe.transcripts import TokenRatios, save_ratios
from asyncrl.store.runstore import RunStore
from asyncrl.types import DropReason, EpisodeStats, ToolCall, ToolReply, TurnReply, VersionSpan
from tests.fakes.data import rows, stored
from tests.unit.buffer.machine import admit, land, make, run, train, turn_payload

MODEL = Path(__file__).resolve().parents[2] / "examples" / "multiturn" / "calculator" / "model"
REWARDS = (1.0, 0.0, 0.5, 0.5)
SPANS = (VersionSpan(0, 4, 0, 0), VersionSpan(4, 10, 1, 0))
MARKUP = "</script><img src=x onerror=alert(1)>"


def save_run(run_dir: Path, **training: float) -> Path:
    """Groups 0 and 1 are trained in step 1, an episode of group 2 runs, group 3 is dropped. The policy's
    tokens are the digits 0 to 9 of ids; tools answer with markup."""
    buffer, batches = make(max_staleness=4)
    store, samples = RunStore(run_dir), stored(rows(100))
    admit(buffer, 4)
    for number, reward in enumerate(REWARDS):
        uid = f"{number // 2}.{number % 2}"
        land(buffer, uid, reward, components={"acc": reward}).stats = EpisodeStats(1, tool_calls=1)
        store.put_frame(uid, 0, "generated", turn_payload(spans=SPANS))
        reply = ToolReply(ToolCall("calculator" if number else "search", '{"a": 1}'), MARKUP)
        store.put_frame(uid, 0, "replied", msgspec.msgpack.encode(TurnReply((reply,))))
        store.put_calls(uid, 0, [reply])
        store.put_answer(uid, f"the answer of {uid}")
        store.put_question(number // 2, samples[number // 2])
    train(batches, 0)
    run(buffer, "2.0")
    land(buffer, "3.0")
    buffer.drop_group(buffer.live[3], DropReason.GROUP_SHORT)
    groups, episodes = buffer.changes()
    store.put_groups(groups, buffer.live)
    store.put_episodes(episodes)
    store.put_commit(1, 1, batches.batches[0].plan_hash)
    store.commit()
    store.close()
    samples.save(samples_path(run_dir, "train"))
    config = {
        "name": run_dir.name,
        "model": {"path": str(MODEL)},
        "data": {"train": "x"},
        "trainer": training,
    }
    (run_dir / "config.yaml").write_bytes(msgspec.yaml.encode(parse(config)))
    metrics = [
        {
            "training/step": float(step),
            "timing_s/step": 1.0,
            "time_s": 2.0 * step,
            "actor/entropy": 1.0 / step,
        }
        for step in range(1, 13)
    ]
    metrics[-1]["actor/skipped_steps"] = 1.0
    metrics[-1]["actor/grad_norm"] = math.nan  # of the skipped step
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    entry = {"sample": 7, "mode": "greedy", "score": 1.0, "text": MARKUP}
    save_transcripts(run_dir, "validation", 1, [entry])
    kept = TokenRatios("0.0", [math.log(2), None] + [0.0] * 8, [True] + [False] * 9)
    save_ratios(run_dir, 1, 0, [kept])
    timeline = Timeline(run_dir / "timeline" / "trainer-0.jsonl")
    for step in range(4000):
        timeline.record("train", step, step + 1, step=step)
    timeline.close()
    return run_dir


def ended(run_dir: Path) -> str:
    """In place of `asyncrl status`, which looks for the launcher's lock."""
    if not (run_dir / "config.yaml").exists():
        raise ConfigError(f"{run_dir}: no run")
    return "completed"
