"""Episodes that are kept as text: which ones, by a fixed rule, and their files.

`transcripts/<validation|training>/step-<N>.jsonl`: of a validation the same questions each time; of training
the first episodes of one group for each batch, in the file of the step that was under way when they landed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.coordinator.state import log
from asyncrl.types import EpisodeResult, Sample

QUESTIONS = 8  # of a validation, each with its sampled and its greedy episode


def kept_questions(count: int) -> frozenset[int]:
    """Of `count` held-out samples, evenly spread: files are often sorted by source or difficulty."""
    kept = min(QUESTIONS, count)
    return frozenset(index * count // kept for index in range(kept))


def entry(uid: str, sample: Sample, **more: Any) -> dict[str, Any]:
    """What is asked, and `more`: what came of it."""
    truth = json.loads(sample.ground_truth)
    asked = {"sample": sample.row, "data_source": sample.data_source, "ground_truth": truth}
    return {"uid": uid} | asked | more


def earned(result: EpisodeResult) -> dict[str, Any]:
    """The numbers of an entry. `reward`: with what shaping adds."""
    numbers = {"score": result.score, "components": result.components, "end": result.end}
    agents = {name: part.score for name, part in result.parts.items()}
    some = {"agents": agents} if agents else {}
    return numbers | some | ({"reward": result.reward} if result.shaping else {})


def save(run_dir: Path, kind: str, step: int, entries: Iterable[dict[str, Any]], anew: bool = False) -> None:
    """Append them to the file of a step, or write it `anew`. A full disk costs no more than them."""
    path = run_dir / "transcripts" / kind / f"step-{step}.jsonl"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb" if anew else "ab") as file:
            file.writelines(msgspec.json.encode(entry) + b"\n" for entry in entries)
    except OSError as error:
        log.error("%s: no transcripts (%s)", path, error)
