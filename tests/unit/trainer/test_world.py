from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncrl.errors import ProtocolError
from asyncrl.trainer import world as ranks
from asyncrl.trainer.metric_sums import MetricSums
from asyncrl.trainer.world import World
from tests.fakes.ranks import run_ranks


def test_a_rank_alone_exchanges_nothing(world: World) -> None:
    value = object()  # could not be encoded
    assert world.gather(value, object) == [value]


def tally(rank: int) -> MetricSums:
    told = MetricSums()
    told.ratio("a", 0.1, 3)
    told.total("n", rank)
    told.summary("x", [float("inf"), 1])
    return told


def refusal(world: World, value: Any, kind: type[Any]) -> str:
    try:
        world.gather(value, kind)
    except ProtocolError as error:
        return str(error)
    return ""


def exchange(world: World, folder: Path) -> dict[str, Any]:
    """Values of other lengths on every rank, in parts of 5 bytes."""
    ranks.PART_BYTES = 5
    found: dict[str, Any] = {
        "lists": world.gather([f"{world.rank}"] * world.rank, list[str]),
        # Encoded: 1 + 9n bytes, so one part, two full ones, and more with a rest.
        "lengths": world.gather("abcdefghi" * world.rank, str),
        "bytes": world.gather(bytes(range(100 * world.rank)), bytes),
        "tallies": world.gather(tally(world.rank), MetricSums),
        "kind": refusal(world, "three" if world.rank else 3, int),
    }
    ranks.MAX_BYTES = 8
    found["bound"] = refusal(world, "x" * world.rank * 4, str)  # only the last rank is over it
    found["after"] = world.gather(world.rank, int)
    return found


def test_values_of_all_ranks_come_in_rank_order_in_parts(tmp_path: Path) -> None:
    found = run_ranks(3, exchange, tmp_path)
    assert found["lists"] == [[], ["1"], ["2", "2"]]
    assert found["lengths"] == ["", "abcdefghi", "abcdefghiabcdefghi"]
    assert found["bytes"] == [bytes(range(100 * rank)) for rank in range(3)]
    assert found["tallies"] == [tally(rank) for rank in range(3)]
    assert "a trainer rank sent what is no <class 'int'>" in found["kind"]
    assert "[1, 5, 9] bytes, at most 8 each" in found["bound"]
    assert found["after"] == [0, 1, 2]
