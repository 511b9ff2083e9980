from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import RunConfig, parse
from asyncrl.errors import ConfigError
from asyncrl.store.launches import (
    LaunchRecord,
    config_tree,
    describe_differences,
    launch_at,
    launches_of,
    with_launch,
)


def config(lr: float, **keys: Any) -> RunConfig:
    return parse({"name": "t", "model": {"path": "m"}, "data": {"train": "d"}, "trainer": {"lr": lr}, **keys})


@pytest.mark.parametrize(
    ("lr_since", "lr_of_step"),
    [
        ([(0, 0.1)], {0: 0.1, 1: 0.1, 99: 0.1}),
        ([(0, 0.1), (0, 0.2)], {0: 0.2, 1: 0.2}),
        ([(0, 0.1), (20, 0.2)], {20: 0.1, 21: 0.2, 0: 0.2}),
        ([(0, 0.1), (20, 0.2), (10, 0.3)], {10: 0.1, 11: 0.3, 25: 0.3, 0: 0.3}),
        ([(0, 0.1), (20, 0.2), (10, 0.2)], {10: 0.1, 11: 0.2}),  # the same launch, from an older checkpoint
        ([(7, 0.1)], {0: 0.1, 8: 0.1}),  # begun by a version that recorded none
    ],
)
def test_a_step_has_the_configuration_that_trained_it_last(
    lr_since: list[tuple[int, float]], lr_of_step: dict[int, float]
) -> None:
    launches: list[LaunchRecord] = []
    for step, lr in lr_since:
        launches = with_launch(launches, step, config(lr))
    assert {step: launch_at(launches, step).config["trainer"]["lr"] for step in lr_of_step} == lr_of_step


def test_what_does_not_change_a_run_makes_no_launch_of_its_own() -> None:
    first = with_launch([], 0, config(0.1))
    assert with_launch(first, 5, config(0.1, resume="auto", run_dir="elsewhere")) == first
    assert (
        describe_differences(config_tree(config(0.1)), config_tree(config(0.5, seed=3)))
        == "seed: 0 → 3, trainer.lr: 0.1 → 0.5"
    )


def test_of_an_older_version_there_is_the_file(tmp_path: Path) -> None:
    assert launches_of(tmp_path) == []
    (tmp_path / "config.yaml").write_text("seed: 1")
    assert launches_of(tmp_path) == [LaunchRecord(0, {"seed": 1})]
    for damaged in ("", "{", "\0"):
        (tmp_path / "config.yaml").write_text(damaged)
        with pytest.raises(ConfigError, match=r"config\.yaml: not readable .* start a new run with another"):
            launches_of(tmp_path)


def test_a_run_without_any_record_says_so() -> None:
    with pytest.raises(ConfigError, match="no record of its configuration"):
        launch_at([], 0)
