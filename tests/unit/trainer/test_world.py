from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import ProtocolError
from asyncrl.trainer import world as ranks
from asyncrl.trainer.tally import Tally
from asyncrl.trainer.world import World
from tests.fakes.ranks import run_ranks


def test_a_tally_survives_the_journey(world: World) -> None:
    tally = Tally()
    tally.ratio("a", 0.1, 3)
    tally.total("n", 2)
    tally.summary("x", [float("inf"), 1])
    assert world.gather(tally, Tally) == [tally]


def test_what_is_not_of_the_kind_is_refused(world: World) -> None:
    wrong: Any = "three"
    with pytest.raises(ProtocolError, match="trainer rank"):
        world.gather(wrong, int)


def test_a_value_over_the_bound_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "MAX_BYTES", 8)
    with pytest.raises(ProtocolError, match="at most 8"):
        world.gather("x" * 8, str)


def exchange(world: World, folder: Path) -> list[list[str]]:
    return world.gather([f"{world.rank}"] * world.rank, list[str])


def test_values_of_different_length_come_in_rank_order(tmp_path: Path) -> None:
    assert run_ranks(3, exchange, tmp_path) == [[], ["1"], ["2", "2"]]
