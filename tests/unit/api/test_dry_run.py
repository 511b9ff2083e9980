"""`asyncrl.dry_run`: its errors are shown, and it leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

import asyncrl


@pytest.mark.slow
def test_errors_are_shown_and_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines: list[str] = []
    with pytest.raises(asyncrl.ConfigError, match=r"^rollout\.reward: reward 'no_such_module"):
        asyncrl.dry_run(
            "experiment=calculator",
            reward="no_such_module:score",
            show=lines.append,
        )
    assert not any("no_such_module" in line for line in lines), "it is in the exception"
    assert list(tmp_path.iterdir()) == []
