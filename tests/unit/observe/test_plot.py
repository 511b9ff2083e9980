"""run.png from metrics.jsonl."""

from __future__ import annotations

import json
from pathlib import Path

from asyncrl.observe.plot import draw


def test_it_draws_what_there_is_and_forgives_a_cut_line(tmp_path: Path) -> None:
    rows = [
        {"time_s": 0.0, "val-core/all/sampled/success": 0.2},
        {"time_s": 1.0, "rollout/score/mean": 0.5, "staleness/lag/max": 2.0},
    ]
    text = "\n".join(json.dumps(row) for row in rows) + '\n{"time_s": 2.0, "cri'
    (tmp_path / "metrics.jsonl").write_text(text)
    path = draw(tmp_path)
    assert path is not None and path.read_bytes().startswith(b"\x89PNG")


def test_nothing_to_draw(tmp_path: Path) -> None:
    assert draw(tmp_path) is None
