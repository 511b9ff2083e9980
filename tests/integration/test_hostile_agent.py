"""A real run whose agents send hostile requests: it goes on, and their keys are in none of its logs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.hostile import HOSTILE, KEYS
from tests.integration.runs import Run

MOST_LOGGED = 50_000  # bytes of all logs; before, that many requests wrote megabytes


@pytest.mark.full
def test_hostile_requests_leave_nothing_in_the_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEYS, str(tmp_path / "keys"))
    overrides = ("rollout.agent=tests.fakes.hostile:agent", "rollout.tools=[]", "rollout.max_tokens=1024",
                 "rollout.max_turns=200", "rollout.max_rows=200", "total_steps=2")  # fmt: skip
    with Run(tmp_path, *overrides) as run:
        assert run.wait() == 0, run.text()
        keys = (tmp_path / "keys").read_text().split()
        paths = [run.out, *(run.path / "logs").iterdir()]
        logs = {path: path.read_bytes() for path in paths}
    assert len(keys) >= 32 and len(HOSTILE) > 40
    for path, text in logs.items():
        assert not [key for key in keys if key.encode() in text], path
    assert sum(map(len, logs.values())) < MOST_LOGGED
    assert any(b"requests from agents that failed or could not be read: " in text for text in logs.values())
