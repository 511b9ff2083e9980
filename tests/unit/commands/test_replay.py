"""With which configuration `asyncrl replay` trains a step; that it comes out the same is shown by
tests/integration/test_train.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from asyncrl import cli
from asyncrl.commands import replay
from asyncrl.config import RunConfig, parse
from asyncrl.store.launches import LAUNCHES_KEY, with_launch
from asyncrl.store.runstore import RunStore


def test_a_step_is_replayed_with_the_keys_of_its_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what else differs from those that the steps before it were trained with is named."""
    config = parse({"name": "x", "model": {"path": "m"}, "data": {"train": "d"}, "trainer": {"lr": 0.5}})
    later = msgspec.structs.replace(config, seed=3)
    store = RunStore(tmp_path / "x")
    launches = msgspec.json.encode(with_launch(with_launch([], 0, config), 6, later))
    store.put_meta(LAUNCHES_KEY, launches.decode())
    store.commit()
    store.close()
    (tmp_path / "x" / "config.yaml").write_bytes(msgspec.yaml.encode(later))
    seen: list[RunConfig] = []

    def replayed(
        config: RunConfig, run_dir: Path, step: int, budget: int
    ) -> Iterator[tuple[int, dict[str, float]]]:
        seen.append(config)
        return ((number, {}) for number in range(step - 1, step + 1))

    monkeypatch.setattr(replay, "_replay_steps", replayed)
    for given, named in (
        (["--step", "6"], []),
        (["--step", "7"], ["after 0 were trained with different settings: seed: 0 → 3"]),
        (["--step", "8"], []),
        (
            ["--step", "3", "trainer.lr=0.1"],
            ["after 0 were trained with different settings: trainer.lr: 0.5 → 0.1"],
        ),
    ):
        assert cli.main(["replay", str(tmp_path / "x"), *given]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.removeprefix("steps ") for line in lines if "different settings" in line] == named
    assert [one.seed for one in seen] == [0, 3, 3, 0] and seen[0] == config and seen[1] == later
