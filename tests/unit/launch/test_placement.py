"""The process plan: pure, and the same for a dry run and a launch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.config import RunConfig, parse
from asyncrl.engines.sglang.process import server_command
from asyncrl.errors import ConfigError
from asyncrl.launch.inputs import Inputs
from asyncrl.launch.placement import assign_gpus, describe_plan, plan_units, process_environment
from asyncrl.launch.preflight import check_device
from asyncrl.rollout import samplers
from asyncrl.rollout.samplers import engine_factory
from asyncrl.trainer import world

TWO_SERVERS = {"name": "sglang", "servers": 2}


def config(**keys: dict) -> RunConfig:
    return parse({"name": "x", "model": {"path": "m"}, "data": {"train": "t"}} | keys)


def test_workers_stand_alone_and_ranks_stand_together() -> None:
    units = plan_units(config(rollout={"workers": 3}, trainer={"ranks": 2}, launch={"threads": 2}))
    assert [unit.name for unit in units] == [
        *("coordinator-0", "rollout-0", "rollout-1", "rollout-2", "trainer (all ranks)")
    ]
    assert [process.name for process in units[-1].processes] == ["trainer-0", "trainer-1"]
    assert {process.threads for unit in units[1:4] for process in unit.processes} == {2}


def test_the_description_adds_up() -> None:
    settings = config(rollout={"workers": 3}, trainer={"ranks": 2}, launch={"threads": 2})
    total = describe_plan(settings, plan_units(settings), None)[-1].split()
    assert total[:3] == ["total", "6", "11"]  # 1 + 3 * 2 + 2 * 2 threads


def test_a_scorer_has_a_process_for_each_of_its_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus(monkeypatch, 6)
    settings = config(scorers={"reference": {"path": "r", "servers": 2, "tp": 2}, "reward": {"urls": ["u"]}})
    units = plan_units(settings)
    assert [unit.name for unit in units[1:-2]] == ["scorer-0", "scorer-1", "scorer-2"]
    assert [unit.processes[0].gpus for unit in units[1:-2]] == [2, 2, 0]
    servers = {"trainer-0": [0], "scorer-0": [1, 2], "scorer-1": [3, 4]}
    assert assign_gpus(settings, 6) == servers | {"rollout-0": [5]}
    rows = [line for line in describe_plan(settings, units, True, 6) if line.startswith("scorer")]
    assert rows == ["scorer           3        1  reference: r; reward: u (GPUs 1, 2, 3, 4)"]


def test_threads_are_set_before_anything_numeric_is_imported() -> None:
    (process,) = plan_units(config(launch={"threads": 2}))[1].processes
    assert process_environment(process)["OMP_NUM_THREADS"] == "2"


def test_every_target_exists() -> None:
    root = Path(__file__).resolve().parents[3]
    for unit in plan_units(config()):
        module, _, function = unit.processes[0].target.partition(":")
        assert f"def {function}(" in (root / f"{module.replace('.', '/')}.py").read_text()


def on_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)


@pytest.mark.parametrize(
    ("count", "ranks", "engine", "trainer", "servers"),
    [
        (8, 4, {"servers": 4}, [0, 1, 2, 3], [[4], [5], [6], [7]]),
        (8, 4, {"servers": 2, "tp": 2}, [0, 1, 2, 3], [[4, 5], [6, 7]]),
        (8, 1, {"servers": 7}, [0], [[1], [2], [3], [4], [5], [6], [7]]),
        (1, 1, {}, [0], [[0]]),
        (2, 1, {"server_command": ["my", "sglang.launch_server"]}, [0], [[1]]),
        (2, 1, {"server_command": ["python", "my_sglang.py"]}, [0], [[1]]),
        (1, 1, {"server_args": {"device": "cpu"}}, [0], []),
        (2, 1, {"urls": ["http://h:1"]}, [0], []),
    ],
)
def test_each_process_has_gpus_of_its_own_and_the_plan_says_which(
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    ranks: int,
    engine: dict[str, Any],
    trainer: list[int],
    servers: list[list[int]],
) -> None:
    on_gpus(monkeypatch, count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    settings = config(trainer={"ranks": ranks}, engine={"name": "sglang", **engine})
    used = assign_gpus(settings, count)
    assert used == {
        **{f"trainer-{rank}": [gpu] for rank, gpu in enumerate(trainer)},
        **{f"engine-{index}": gpus for index, gpus in enumerate(servers)},
    }
    together = [gpu for gpus in used.values() for gpu in gpus]
    assert count == 1 or len(set(together)) == len(together)
    assert [world._device("auto", rank).index for rank in range(ranks)] == trainer
    for index, gpus in enumerate(servers):
        command = server_command(settings, index, "h", 1, count)
        assert command[command.index("--base-gpu-id") + 1] == str(gpus[0])
    units = plan_units(settings)
    for process in (process for unit in units for process in unit.processes):
        assert "CUDA_VISIBLE_DEVICES" not in process_environment(process)  # each picks among all
    rows = {line.split()[0]: line for line in describe_plan(settings, units, True, count)}
    assert rows["trainer"].endswith(f"on cuda (GPUs {', '.join(map(str, trainer))})")
    if servers:
        assert rows["engine"].endswith(f" (GPUs {', '.join(str(gpu) for gpus in servers for gpu in gpus)})")


@pytest.mark.parametrize(
    ("count", "keys", "workers"),
    [
        (1, {}, [0, 0, 0]),
        (2, {}, [1, 1, 1]),
        (4, {}, [1, 2, 3]),
        (3, {"trainer": {"ranks": 2}}, [2, 2, 2]),
        (2, {"trainer": {"ranks": 2}}, [0, 1, 0]),
        (4, {"scorers": {"reference": {"path": "r", "tp": 2}}}, [3, 3, 3]),
        (3, {"scorers": {"reference": {"path": "r", "tp": 2}}}, [1, 2, 1]),
        (4, {"trainer": {"ranks": 3}, "engine": {"name": "torch", "colocated": 3}}, [0, 1, 2]),
        (4, {"launch": {"kind": "ray"}}, [0, 0, 0]),  # which shows each worker its own
        (4, {"total_steps": 0}, [0, 1, 2]),
    ],
)
def test_embedded_engines_have_gpus_that_no_trainer_rank_uses(
    monkeypatch: pytest.MonkeyPatch, count: int, keys: dict[str, Any], workers: list[int]
) -> None:
    """Beside a rank only if there is no other."""
    on_gpus(monkeypatch, count)
    settings = config(rollout={"workers": 3}, **keys)
    devices: list[str] = []
    monkeypatch.setattr(samplers.engines, "load", lambda name: lambda **made: devices.append(made["device"]))
    monkeypatch.setattr("asyncrl.engines.torch.check.check_served", lambda path: None)
    for index in range(3):
        engine_factory(settings, index)()
    assert devices == [f"cuda:{gpu}" for gpu in workers]
    used = assign_gpus(settings, count)
    assert [used[f"rollout-{index}"] for index in range(3)] == [[gpu] for gpu in workers]


@pytest.mark.parametrize(
    ("keys", "used"),
    [
        ({"total_steps": 0, "engine": TWO_SERVERS}, {"engine-0": [0], "engine-1": [1]}),
        (
            {"model": {"path": "m", "device": "cpu"}, "engine": TWO_SERVERS},
            {"engine-0": [0], "engine-1": [1]},
        ),
        (
            {"total_steps": 0, "scorers": {"reward": {"path": "r"}}, "rollout": {"workers": 2}},
            {"scorer-0": [0], "rollout-0": [1], "rollout-1": [1]},
        ),
    ],
)
def test_without_ranks_on_gpus_servers_and_engines_use_them_all(
    keys: dict[str, Any], used: dict[str, list[int]]
) -> None:
    assert assign_gpus(config(**keys), 2) == used


@pytest.mark.parametrize(
    ("count", "ranks", "engine", "said"),
    [
        (8, 4, {"servers": 4}, ""),
        (1, 1, {"server_args": {"mem-fraction-static": 0.4}}, ""),
        (1, 1, {"name": "torch"}, ""),
        (0, 4, {"servers": 4}, ""),  # ranks on a CPU
        (1, 4, {"servers": 4}, "trainer.ranks=4: each rank needs its own GPU, but torch sees 1"),
        (1, 1, {}, "servers share GPUs 0 with other processes"),
        (4, 4, {"servers": 4}, "servers share GPUs 0, 1, 2, 3 with other processes"),
        (
            3,
            1,
            {"servers": 3},
            "share GPUs 2 with other processes, but each server would take 85%",
        ),
    ],
)
def test_more_processes_than_gpus(
    monkeypatch: pytest.MonkeyPatch, count: int, ranks: int, engine: dict[str, Any], said: str
) -> None:
    on_gpus(monkeypatch, count)
    settings = config(trainer={"ranks": ranks}, engine={"name": "sglang", **engine})
    try:
        texts = [note.text for note in check_device(Inputs(settings)) if note.level == "warning"]
    except ConfigError as error:
        texts = [str(error)]
    assert len(texts) == bool(said) and said in "".join(texts)
