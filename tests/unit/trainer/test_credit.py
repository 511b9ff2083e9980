from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from asyncrl.algorithms.aggregation import aggregations
from asyncrl.trainer import world as ranks
from asyncrl.trainer.barrier import _view
from asyncrl.trainer.batch import Example, example
from asyncrl.trainer.credit import Packed, penalised, share, share_traces
from asyncrl.trainer.world import World
from asyncrl.types import EpisodeResult, StopReason, Turn, VersionSpan
from asyncrl.wire.messages.trainer import PlannedTrajectory
from tests.fakes.ranks import run_ranks

THIRD = 1 / 3  # no float32


def one(number: int) -> Example:
    """An episode of number + 2 tokens."""
    n = number + 2
    own = EpisodeResult(THIRD, n)
    row = PlannedTrajectory(f"u{number}", f"g{number // 2}", 1, own, (own,), number, 1.0, n + 1)
    turn = Turn(0, (1,), (2,) * n, (-THIRD,) * n, (VersionSpan(0, n, 0, 0),), StopReason.STOP)
    made = example(row, [turn], 0, 4, aggregations.get("token_mean"))
    return replace(made, prox=-np.arange(n) / 3, collision=np.full(n, THIRD))


def told(e: Example) -> dict[str, np.ndarray]:
    return {"prox": np.asarray(e.prox), "fresh": np.arange(e.tokens) % 2 == 0}


def of(packed: Packed) -> tuple[str, str, int, list[float], list[bool]]:
    return (
        packed.uid,
        packed.group,
        packed.place,
        packed.array("prox").tolist(),
        packed.array("fresh").tolist(),
    )


def exchange(world: World, folder: Path) -> tuple[object, object]:
    """Five episodes dealt to the ranks, exchanged in parts."""
    ranks.PART_BYTES = 64
    mine = [one(number) for number in range(world.rank, 5, world.size)]
    traces = share_traces(world, mine, [told(e) | {"rewards": e.rewards} for e in mine])
    plain = [
        (t.uid, t.group, t.own.tokens - 2, t.rewards.tolist(), t.prox.tolist(), t.fresh.tolist())
        for t in traces
    ]
    return [of(packed) for packed in share(world, mine, [told(e) for e in mine])], plain


def test_all_ranks_see_all_episodes_exactly_as_one_rank_does(world: World, tmp_path: Path) -> None:
    alone, together = exchange(world, tmp_path), run_ranks(2, exchange, tmp_path / "two")
    assert alone == together
    episodes = [
        (f"u{i}", f"g{i // 2}", i, [-j / 3 for j in range(i + 2)], [j % 2 == 0 for j in range(i + 2)])
        for i in range(5)
    ]
    assert alone[0] == episodes


def test_a_token_that_the_reference_cannot_score_changes_nothing_else() -> None:
    """No penalty for it, and it is not fresh for a loss that looks at the whole batch."""
    plain = replace(one(2), advantage=np.ones(4), reference=np.full(4, -1.0))
    broken = replace(plain, reference=np.array([-1.0, -np.inf, -1.0, np.nan]))
    found, by_turn = penalised(broken, 0.5, "k1")
    assert by_turn == [-0.5 * 2 * (1 - THIRD)]
    assert found.planned.own.reward == THIRD + by_turn[0] and found.rewards[1] == 0
    view = _view(broken)
    assert view["fresh"].tolist() == [True, False, True, False]
    assert view["reference"].tolist() == [-1, 0, -1, 0] and view["prox"][1] == 0
