"""The process plan: pure, and the same for a dry run and a launch."""

from __future__ import annotations

from pathlib import Path

from asyncrl.config import RunConfig, parse
from asyncrl.launch.placement import describe, environment, plan


def config(**keys: dict) -> RunConfig:
    return parse({"name": "x", "model": {"path": "m"}, "data": {"train": "t"}} | keys)


def test_workers_stand_alone_and_ranks_stand_together() -> None:
    units = plan(config(rollout={"workers": 3}, trainer={"ranks": 2}, launch={"threads": 2}))
    assert [unit.name for unit in units] == [
        *("coordinator-0", "rollout-0", "rollout-1", "rollout-2", "trainer (all ranks)")
    ]
    assert [place.name for place in units[-1].places] == ["trainer-0", "trainer-1"]
    assert {place.threads for unit in units[1:4] for place in unit.places} == {2}


def test_the_description_adds_up() -> None:
    settings = config(rollout={"workers": 3}, trainer={"ranks": 2}, launch={"threads": 2})
    total = describe(settings, plan(settings), None)[-1].split()
    assert total[:3] == ["total", "6", "11"]  # 1 + 3 * 2 + 2 * 2 threads


def test_threads_are_set_before_anything_numeric_is_imported() -> None:
    (place,) = plan(config(launch={"threads": 2}))[1].places
    assert environment(place)["OMP_NUM_THREADS"] == "2"


def test_every_target_exists() -> None:
    root = Path(__file__).resolve().parents[3]
    for unit in plan(config()):
        module, _, function = unit.places[0].target.partition(":")
        assert f"def {function}(" in (root / f"{module.replace('.', '/')}.py").read_text()
