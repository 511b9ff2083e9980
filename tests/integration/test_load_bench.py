"""The coordinator's own process, with many peers that are simulated: what it assigns comes back, once."""

from __future__ import annotations

from pathlib import Path

import pytest

BENCHES = Path(__file__).resolve().parents[2] / "tools/bench"


def test_every_episode_is_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHES))
    import load

    size = ["--workers=32", "--servers=8", "--slots=4", "--episodes=512", "--life=0.1", "--turns=2"]
    figures = load.measure(load.arguments([*size, f"--run-dir={tmp_path}", "--deadline=120"]))
    assert figures["conserved"] and figures["rate"] > 0 and figures["wall"] == sorted(figures["wall"])
