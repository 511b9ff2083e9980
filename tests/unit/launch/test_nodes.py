"""Several machines of one run: what is refused, what travels, what is fetched."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config.composition import compose
from asyncrl.errors import ConfigError
from asyncrl.launch.nodes import FETCH_BYTES, FetchedFiles, Node, WrittenFiles, check_nodes, named_secrets
from asyncrl.launch.placement import plan

HERE, THERE = Node("a", "10.0.0.1", 0), Node("b", "10.0.0.2", 0)
REACHED = ("launch.host=10.0.0.1", "weights.directory=/shared")


def checked(*overrides: str, nodes: tuple[Node, ...] = (HERE, THERE)) -> None:
    config = compose(["experiment=calculator", "launch=ray", *overrides])
    check_nodes(config, plan(config), nodes, nodes[0])


def with_gpus(*counts: int) -> tuple[Node, ...]:
    return tuple(Node(str(at), f"10.0.0.{at}", count) for at, count in enumerate(counts, 1))


@pytest.mark.parametrize(
    ("overrides", "nodes", "said"),
    [
        ((), (HERE, THERE), r"launch.host: 127.0.0.1 is another machine .* set launch.host=10.0.0.1"),
        (("launch.host=localhost",), (HERE, THERE), r"launch.host: localhost"),
        (REACHED[:1], (HERE, THERE), r"weights.directory: 'auto' is on one machine, and the cluster has 2"),
        (
            (*REACHED, "trainer.ranks=9", "model.device=cuda"),
            with_gpus(8, 0),
            r"needs 10 GPUs \(rollout 1, trainer 9\), and the cluster has 8",
        ),
        (
            (*REACHED, "engine=sglang", "engine.tp=4"),
            with_gpus(3, 3),
            r"engine.tp: a server needs 4 GPUs of one machine, which has 3",
        ),
    ],
)
def test_what_cannot_work_is_refused(overrides: tuple[str, ...], nodes: tuple[Node, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        checked(*overrides, nodes=nodes)


def test_what_works_is_not_refused() -> None:
    checked(nodes=(HERE,))
    checked(*REACHED)
    checked("launch.host=0.0.0.0", "weights.directory=/shared")
    checked(*REACHED, "trainer.ranks=7", "model.device=cuda", nodes=with_gpus(4, 4))


def test_keys_travel_that_the_configuration_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_KEY", "one")
    monkeypatch.setenv("JUDGE_KEY", "two")
    monkeypatch.setenv("OTHER_KEY", "three")
    config = compose(
        [
            *("experiment=calculator", "engine=sglang", "engine.api_key_env=SERVER_KEY"),
            "rollout.reward={llm_judge: {api_key_env: JUDGE_KEY}}",
        ]
    )
    assert named_secrets(config) == {"SERVER_KEY": "one", "JUDGE_KEY": "two"}


def test_files_of_another_machine_are_appended_once(tmp_path: Path) -> None:
    there, here = WrittenFiles(tmp_path / "there"), FetchedFiles(tmp_path / "here", "10.0.0.2")
    for name in ("there/logs", "there/timeline", "here"):
        (tmp_path / name).mkdir(parents=True)
    long = b"x" * (FETCH_BYTES + 5)
    (tmp_path / "there/logs/rollout-1.log").write_bytes(long)
    (tmp_path / "there/timeline/rollout-1.jsonl").write_bytes(b"{}\n")
    (tmp_path / "there/run.db").write_bytes(b"not fetched")
    while found := there.after(here.read):
        here.add(found)
    with (tmp_path / "there/logs/rollout-1.log").open("ab") as file:
        file.write(b"more")
    here = FetchedFiles(tmp_path / "here", "10.0.0.2")  # of the next launch
    here.add(there.after(here.read))
    assert (tmp_path / "here/logs/rollout-1.log").read_bytes() == long + b"more"
    assert (tmp_path / "here/timeline/rollout-1.jsonl").read_bytes() == b"{}\n"
    assert not there.after(here.read) and not (tmp_path / "here/run.db").exists()


def test_nothing_is_fetched_from_a_directory_that_is_shared(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/rollout-1.log").write_bytes(b"x")
    (tmp_path / "started").touch()
    assert WrittenFiles(tmp_path).after({}) == {}


@pytest.mark.parametrize(
    "name", ["../logs/a.log", "/logs/a.log", "run.db", "logs/../../a.log", "logs/a/b.log"]
)
def test_names_that_are_no_files_of_roles_are_left_out(name: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    FetchedFiles(tmp_path / "run", "10.0.0.2").add({name: b"x"})
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["10.0.0.2.json"]
