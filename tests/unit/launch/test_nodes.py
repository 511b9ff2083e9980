"""Several machines of one run: who goes where, what is refused, which secrets travel."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any

import msgspec
import pytest
import yaml

from asyncrl.config import RunConfig, parse
from asyncrl.config.composition import compose
from asyncrl.errors import ConfigError
from asyncrl.launch.nodes import Node, NodeAssignment, check_shared_resources, named_secrets
from asyncrl.launch.placement import plan_units

CUDA = ("model.device=cuda", "trainer.ranks=3", "checkpoint.directory=/shared")
SERVERS = ("engine=sglang", "engine.servers=2", "engine.tp=2")
REACHED = ("launch.host=10.0.0.1", "weights.directory=/shared")


def machines(*gpus: float, resources: frozenset[str] = frozenset()) -> list[Node]:
    """All free; the first one is the launcher's."""
    return [Node(str(at), f"10.0.0.{at}", count, count, resources) for at, count in enumerate(gpus, 1)]


@cache
def composed(*groups: str) -> dict[str, Any]:
    return msgspec.to_builtins(compose(["experiment=calculator", *groups]))


def configured(*overrides: str) -> RunConfig:
    """As Hydra composes it, which takes a tenth of a second and is asked once for each choice of files."""
    given = [override.partition("=")[::2] for override in overrides]
    tree = deepcopy(composed(*(f"{key}={value}" for key, value in given if "." not in key)))
    for key, value in given:
        section, _, name = key.partition(".")
        if name:
            tree[section][name] = yaml.safe_load(value)
    return parse(tree)


def placing(nodes: list[Node], *overrides: str) -> NodeAssignment:
    config = configured("launch=ray", *overrides)
    return NodeAssignment(config, plan_units(config), nodes, nodes[0].id)


def placed(nodes: list[Node], *overrides: str) -> list[str]:
    """The processes of each machine."""
    node_lines = placing(nodes, *overrides).describe_nodes(nodes)
    return [line.rpartition(": ")[2] for line in node_lines]


@pytest.mark.parametrize(
    ("gpus", "overrides", "there"),
    [
        ((0, 0), ("rollout.workers=3",), ["coordinator-0, rollout-1, trainer-0", "rollout-0, rollout-2"]),
        ((0, 0), ("trainer.ranks=2",), ["coordinator-0, trainer-0, trainer-1", "rollout-0"]),
        (  # more ranks than the launcher's machine has GPUs, on as few others as possible
            (1, 4, 4),
            ("model.device=cuda", "trainer.ranks=4"),
            ["coordinator-0, trainer-0", "trainer-1, trainer-2, trainer-3", "rollout-0"],
        ),
        (  # rank 0 has its GPU before servers and workers choose
            (1, 4),
            ("trainer.ranks=1", *SERVERS),
            ["coordinator-0, trainer-0", "engine-0, engine-1, rollout-0"],
        ),
        (  # those of scorers, too
            (1, 2, 2),
            ("scorers.reference={path: m, servers: 2, tp: 2}", "scorers.reward={urls: [u]}"),
            ["coordinator-0, scorer-2, trainer-0", "scorer-0, rollout-0", "scorer-1"],
        ),
        (  # servers are spread; workers are where they are
            (1, 2, 2, 0),
            (*SERVERS, "rollout.workers=4"),
            [
                "coordinator-0, trainer-0",
                "engine-0, rollout-0, rollout-2",
                "engine-1, rollout-1, rollout-3",
                "nothing",
            ],
        ),
        (
            (1,),
            ("rollout.workers=5", "launch.gpus={rollout: 0.2, trainer: 0}"),
            ["coordinator-0, rollout-0, rollout-1, rollout-2, rollout-3, rollout-4, trainer-0"],
        ),
        (  # fractions
            (1, 1),
            ("model.device=cuda", "rollout.workers=3", "launch.gpus={rollout: 0.5, trainer: 0.5}"),
            ["coordinator-0, rollout-2, trainer-0", "rollout-0, rollout-1"],
        ),
    ],
)
def test_who_goes_where(gpus: tuple[float, ...], overrides: tuple[str, ...], there: list[str]) -> None:
    assert placed(machines(*gpus), *overrides) == there


def test_a_pool_is_used_by_its_role_alone() -> None:
    nodes = [*machines(0, 0), Node("3", "10.0.0.3", resources=frozenset(["big"]))]
    there = placed(nodes, "rollout.workers=2", "launch.pools={rollout: big}")
    assert there == ["coordinator-0, trainer-0", "nothing", "rollout-0, rollout-1"]


@pytest.mark.parametrize(
    ("gpus", "overrides", "complaint"),
    [
        (
            (2, 0),
            CUDA,
            r"trainer-2 needs 1 GPU on one machine, "
            r"but too few are left: 10.0.0.1 0 of 2, 10.0.0.2 0 of 0 "
            r"\(the run needs 4: trainer 3, rollout 1\); change trainer.ranks",
        ),
        (
            (3, 3),
            ("engine=sglang", "engine.tp=4"),
            r"engine-0 needs 4 GPUs on one machine, .* 10.0.0.1 2 of 3, 10.0.0.2 3 of 3",
        ),
        (
            (0, 4),
            CUDA,
            r"trainer-0 needs 1 GPU on the launcher's machine, .* 10.0.0.1 0 of 0 .* start asyncrl on",
        ),
        ((0, 0), CUDA, r"trainer-0 needs 1 GPU on the launcher's machine"),
        (
            (0, 0),
            ("launch.pools={rollout: big}",),
            r"launch.pools: rollout-0 needs 'big' on one machine; .*--resources='\{\"big\": 1\}'",
        ),
    ],
)
def test_machines_that_cannot_have_all_are_refused(
    gpus: tuple[float, ...], overrides: tuple[str, ...], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        placing(machines(*gpus), *overrides)


def test_what_a_pool_has_left_is_named() -> None:
    nodes = [*machines(4), Node("2", "10.0.0.2", 1, 1, frozenset(["big"]))]
    keys = ("launch.pools={rollout: big}", "launch.gpus={rollout: 1}", "rollout.workers=2")
    complaint = r"rollout-1 needs 1 GPU on one machine with 'big', but too few are left: 10.0.0.2 0 of 1 \("
    with pytest.raises(ConfigError, match=complaint):
        placing(nodes, *keys)


def test_a_process_returns_to_its_machine_and_leaves_one_that_is_gone() -> None:
    first, second, third = machines(1, 1, 1)
    assignment = placing([first, second, third], "trainer.ranks=1", "rollout.workers=2", "model.device=cuda")
    worker = next(
        process
        for unit in plan_units(assignment._config)
        for process in unit.processes
        if process.name == "rollout-0"
    )
    assert assignment.choose_node(worker, [first, second, third]) == second
    assert assignment.choose_node(worker, [first, third]) is None, "the others' GPUs are taken"
    back = Node("4", second.address, 1, 1)
    assert assignment.choose_node(worker, [first, third, back]) == back


def test_a_process_does_not_wait_for_what_ray_gave_to_another() -> None:
    first, second, third = machines(1, 1, 1)
    assignment = placing([first, second, third], "trainer.ranks=1", "rollout.workers=2", "model.device=cuda")
    processes = {
        process.name: process for unit in plan_units(assignment._config) for process in unit.processes
    }
    assert assignment.choose_node(processes["rollout-0"], [first, third]) is None  # its machine is gone
    assignment.record_node(processes["rollout-0"], third.id)  # where rollout-1 has just died
    assert assignment.choose_node(processes["rollout-1"], [first, third]) is None
    back = Node("4", second.address, 1, 1)
    assert assignment.choose_node(processes["rollout-1"], [first, third, back]) == back
    assignment.record_node(
        processes["rollout-0"], first.id
    )  # where rank 0 has just died, which cannot go elsewhere
    assert assignment.choose_node(processes["trainer-0"], [first, third, back]) == first


@pytest.mark.parametrize(
    ("overrides", "dialled", "complaint"),
    [
        (
            (),
            "127.0.0.1",
            r"launch.host: 127.0.0.1 refers to a different machine .* set launch.host=10.0.0.1",
        ),
        (("launch.host=0.0.0.0",), "127.0.0.1", r"launch.host: 127.0.0.1"),
        (
            (*REACHED, "trainer.ranks=2", "launch.gpus={trainer: 1}"),
            "10.0.0.1",
            r"checkpoint.directory: trainer ranks run on several machines",
        ),
    ],
)
def test_what_machines_must_share(overrides: tuple[str, ...], dialled: str, complaint: str) -> None:
    nodes = machines(1, 1)
    config = configured("launch=ray", *overrides)
    with pytest.raises(ConfigError, match=complaint):
        check_shared_resources(config, nodes, "1", dialled, placing(nodes, *overrides))
    works = (*REACHED, "checkpoint.directory=/shared", *overrides)
    check_shared_resources(configured(*works), nodes, "1", "10.0.0.1", placing(nodes, *overrides))
    check_shared_resources(config, nodes[:1], "1", dialled, placing(nodes, *overrides))


def test_secrets_travel_that_the_configuration_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SERVER_KEY", "JUDGE_KEY", "OTHER_KEY", "MCP_TOKEN", "SEEN_BY_SERVER"):
        monkeypatch.setenv(name, name.lower())
    config = compose(
        [
            *("experiment=calculator", "engine=sglang", "engine.api_key_env=SERVER_KEY"),
            "rollout.reward={llm_judge: {api_key_env: JUDGE_KEY, headers: 'X-Token: $MCP_TOKEN', "
            "env: 'SEEN_BY_SERVER, ABSENT'}}",
        ]
    )
    assert named_secrets(config) == {
        name: name.lower() for name in ("JUDGE_KEY", "MCP_TOKEN", "SEEN_BY_SERVER", "SERVER_KEY")
    }
