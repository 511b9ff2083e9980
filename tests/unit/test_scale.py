"""The arithmetic of tools/scale.py: what a run of many GPUs asks of its coordinator."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tools import scale
from tools.scale import MEASURED_LOADS, MODELS, Assumptions, CoordinatorCost, fit_cost, weight_ways

DENSE = MODELS["8B"]
SMALL = Assumptions(turns=2, sampled=64, context=64, slots=8, worker_slots=24, tool_s=0.1)


def test_fitted_costs_give_back_each_measured_load() -> None:
    cost = fit_cost(MEASURED_LOADS, [load.loop_s for load in MEASURED_LOADS])

    for load in MEASURED_LOADS:
        half = load.tokens // 2
        payload_bytes = load.turns * scale.turn_bytes(half, half)
        assert 1000 * cost.seconds(2 * load.turns, payload_bytes) == pytest.approx(load.loop_s)


def test_the_default_episode_is_that_of_the_measured_load() -> None:
    largest_load = MEASURED_LOADS[0]
    assert Assumptions().tokens == largest_load.turns * largest_load.tokens
    assert scale.capacity(Assumptions()) == pytest.approx(1000 / largest_load.loop_s)


def test_seconds_of_an_episode_are_the_sum_of_three_terms() -> None:
    assert CoordinatorCost(1.0, 0.5, 0.25).seconds(records=4, payload_bytes=8) == 1.0 + 2.0 + 2.0


def test_weights_take_a_servers_load_times_the_servers_only_where_they_take_turns() -> None:
    """8 GB: a server loads a version in 4 s, the chain sends it in 32 s."""
    model = replace(DENSE, parameters=4e9)
    assumptions = Assumptions(load_rate=2e9, chain_rate=250e6, machine_rate=64e9, delta=80)
    few = weight_ways(assumptions, model, engines=8, ranks=8)
    many = weight_ways(assumptions, model, engines=800, ranks=800)

    assert (few.rolling, many.rolling) == (4 + 8 * 4, 4 + 800 * 4)
    assert few.files == many.files == 8
    assert few.chain == 4 + 32 + 4
    assert many.chain == pytest.approx(few.chain + 99 * scale.PIECE_BYTES / 250e6)
    assert few.chain_delta == pytest.approx(4 + 32 / 80 + 2 * 4)
    assert (
        few.broadcast == many.broadcast == 4
    )  # 8 senders send 16 GB each over 64 GB/s in 2 s: loading decides
    assert many.shared_rate == 100 * few.shared_rate
    assert (few.sender_threads, many.sender_threads) == (7, 799)


def test_a_sender_serves_its_servers_one_after_another() -> None:
    twice = weight_ways(Assumptions(), DENSE, engines=16, ranks=8)
    assert twice.broadcast == 2 * weight_ways(Assumptions(), DENSE, engines=8, ranks=8).broadcast


@pytest.fixture(scope="module")
def run() -> scale.Run:
    return scale.predict_run(SMALL, DENSE, gpus=8)


def test_rates_of_a_predicted_run_follow_from_its_episodes(run: scale.Run) -> None:
    assert run.engines + run.ranks == 8
    assert run.episodes_per_s == pytest.approx(8 * SMALL.batch / run.forecast.step_s)
    assert run.records_per_s == pytest.approx(4 * run.episodes_per_s)
    assert run.bytes_per_s == pytest.approx(run.episodes_per_s * SMALL.payload_bytes)
    assert run.in_flight == run.engines * SMALL.slots
    assert run == scale.predict_run(SMALL, DENSE, gpus=8), "the simulation has a seed"


def test_a_run_of_cells_has_the_episodes_of_all_cells(
    monkeypatch: pytest.MonkeyPatch, run: scale.Run
) -> None:
    monkeypatch.setattr(scale, "CELL_GPUS", 8)
    ten_cells = scale.predict_run(SMALL, DENSE, gpus=80)

    assert ten_cells.engines == 10 * run.engines
    assert ten_cells.episodes_per_s == pytest.approx(10 * run.episodes_per_s, rel=0.02)
    assert ten_cells.heartbeat_cores == pytest.approx(100 * run.heartbeat_cores)


def test_at_the_limit_the_loop_takes_one_core(run: scale.Run) -> None:
    gpus = scale.limit_gpus(run)
    factor = gpus / run.gpus
    assert run.loop_cores * factor + run.heartbeat_cores * factor**2 == pytest.approx(1)


def test_every_assumption_is_an_option() -> None:
    _, assumptions = scale.arguments(["--turns", "30", "--chain-rate", "1e9"])
    assert assumptions == Assumptions(turns=30, chain_rate=1e9)


def test_the_cost_of_a_heartbeat_can_be_measured() -> None:
    assert 0 < scale.measure_listed_server(servers=8, repeats=2) < 1e-3
