"""Checks of a resumed run and of directories for weights; a sample that is tried. More: test_checks.py."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from asyncrl import cli
from asyncrl.errors import ConfigError
from asyncrl.launch import preflight, run_directory
from asyncrl.launch.inputs import Inputs
from asyncrl.launch.notes import ok
from asyncrl.launch.run_directory import check_resumed
from asyncrl.types import Message, Sample
from asyncrl.weights import disk
from tests.fakes.checked import Given, with_an_earlier_run, write_header

MOUNTS = [("/", "ext4"), ("/home", "nfs4"), ("/home/local", "ext4"), ("/mnt/my share", "cifs")]


@pytest.mark.parametrize(
    ("path", "mounts", "kind"),
    [
        ("/tmp/x", MOUNTS, "ext4"),
        ("/home", MOUNTS, "nfs4"),
        ("/home/me/runs", MOUNTS, "nfs4"),
        ("/homework", MOUNTS, "ext4"),
        ("/home/local/runs", MOUNTS, "ext4"),
        ("/mnt/my share/runs", MOUNTS, "cifs"),
        ("/home", [*MOUNTS, ("/home", "xfs")], "xfs"),  # a later mount hides an earlier one
        ("/home", [], ""),
    ],
)
def test_the_nearest_mount_decides(
    monkeypatch: pytest.MonkeyPatch, path: str, mounts: list[tuple[str, str]], kind: str
) -> None:
    mount_points = [SimpleNamespace(mountpoint=point, fstype=each) for point, each in mounts]
    monkeypatch.setattr(run_directory.psutil, "disk_partitions", lambda all: mount_points)
    assert run_directory.file_system_of(Path(path)) == kind


def test_a_resumed_run_may_change_the_rest(given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    with_an_earlier_run(given)
    monkeypatch.chdir(given.folder)
    given.keys |= {
        "model.path": "model",
        "total_steps": 7,
        "trainer.lr": 1.0,
    }  # the same one, spelled otherwise
    check_resumed(given.config(resume="must"))
    check_resumed(given.config(seed=1))  # not resumed: refused for another reason
    (given.runs / "x" / "config.yaml").write_text("name: x\nretired_key: 1\n")
    check_resumed(given.config(resume="auto", seed=1))  # of a version that knew no seed


def test_a_resumed_run_keeps_its_sources_and_their_weights(
    given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resumed(train: Any, **data: Any) -> None:
        check_resumed(given.config(data={"train": train} | data, resume="auto"))

    monkeypatch.chdir(given.folder)
    with_an_earlier_run(given)
    (given.runs / "x" / "config.yaml").write_text(
        "data: {train: [{path: t.jsonl, weight: 1}, {path: u.jsonl, weight: 2.0}], order: ''}\n"
    )
    same = [{"path": str(given.folder / "t.jsonl"), "weight": 1}, {"path": "u.jsonl", "weight": 2}]
    resumed(same)
    for other in ([same[0], same[1] | {"weight": 3}], same[::-1], "t.jsonl", ["t.jsonl", "u.jsonl"]):
        with pytest.raises(ConfigError, match=r"data.train: .* was started with"):
            resumed(other)
    with pytest.raises(ConfigError, match=r"data.order: .* was started with ''"):
        resumed(same, order="a.py:f")


def test_what_a_killed_launcher_left_on_shared_memory_counts_as_room(
    given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = given.folder / "shm"
    shared.mkdir()
    monkeypatch.setattr(disk, "SHARED_MEMORY", shared)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: SimpleNamespace(free=30))
    write_header(given.model / "model.safetensors", weight=[2])  # 8 bytes of float32
    insisting = given.config(weights={"directory": "shm"})
    with pytest.raises(ConfigError, match="30 bytes free, but the weights need 40"):
        list(preflight.check_weights_directory(Inputs(insisting)))
    version = preflight.outside_weights(insisting)[0] / "e0001-v00000001"
    version.mkdir(parents=True)
    (version / "model.safetensors").write_bytes(bytes(10))
    list(preflight.check_weights_directory(Inputs(insisting)))


def test_versions_are_written_and_removed_where_nodes_share_a_path(given: Given) -> None:
    path = given.folder / "shared"
    config = given.config(weights={"directory": str(path)})
    list(preflight.check_weights_directory(Inputs(config)))
    assert not path.exists()
    memory, elsewhere = sorted(preflight.outside_weights(config), key=lambda each: each.parent == path)
    assert memory.parent == disk.SHARED_MEMORY and elsewhere.parent == path


TOOLS = """
from typing import Literal
from asyncrl.tools import tool

@tool
def weather(city: str, days: int, kind: Literal["rain", "wind"], more: bool = False) -> str:
    return f"{kind} in {city} for {days}"

@tool
def broken() -> str:
    raise OSError("no network")
"""
REWARD = "def score(data_source, solution_str, ground_truth, extra_info):\n    return 1 / len(solution_str)\n"


@pytest.mark.parametrize(
    ("schema", "made"),
    [
        (
            {
                "properties": {
                    "a": {"type": ["string", "null"]},
                    "b": {"enum": ["x"]},
                    "c": {"type": "boolean"},
                },
                "required": ["a", "b", "c"],
            },
            {"a": 1, "b": "x", "c": True},
        ),
        ({"required": ["q"]}, {"q": 1}),
        ({}, {}),
    ],
)
def test_arguments_are_made_up_for_what_servers_say_of_their_tools(
    schema: dict[str, Any], made: dict[str, Any]
) -> None:
    """MCP's schemas come as they are: a type may be a list, and what is required need not be described."""
    assert preflight._placeholder_arguments({"parameters": schema}) == made


def test_a_sample_goes_through_each_tool_and_the_reward(given: Given) -> None:
    """With arguments made from the schema; answered by its ground truth, and by nothing."""
    (given.folder / "mine.py").write_text(TOOLS)
    (given.folder / "own.py").write_text(REWARD)
    given.keys |= {"rollout.reward": f"{given.folder / 'own.py'}:score"}
    sample = Sample(0, "d", (Message("user", "?"),), '"four"')
    without = Inputs(given.config()).parts
    given.keys |= {"rollout.tools": [str(given.folder / "mine.py")]}
    parts = Inputs(given.config()).parts
    broken, weather, right, nothing = asyncio.run(preflight.try_sample(parts, sample))
    unknown = asyncio.run(
        preflight.try_sample(without, msgspec.structs.replace(sample, ground_truth_json="null"))
    )
    assert unknown == [nothing], "without a ground truth there is one answer"
    task = msgspec.structs.replace(sample, extra_info_json='{"task": {"name": "t", "image": "debian"}}')
    (judged,) = asyncio.run(preflight.try_sample(without, task))
    assert judged == ok("the reward is not tested here; asyncrl tasks check runs the tasks' tests"), (
        "no answer is judged"
    )
    call = '{"city":"1","days":1,"kind":"rain"}'
    assert weather == ok(f"weather({call}) returns 'rain in 1 for 1'")
    assert broken.level == "warning" and "OSError: no network" in broken.text
    assert right == ok("as an answer, the ground truth scores 0.25")
    assert nothing.level == "warning" and "division by zero" in nothing.text and "own.py:2" in nothing.text


GAME = """
class Game:
    def reset(self, secret):
        self.reward = 0.25

    def guess(self, number: int) -> str:
        self.reward = 1.0
        return "right"

def score(environments, **kwargs):
    return [environment.reward for environment in environments]
"""


RESET_WITHOUT_SELF = "@staticmethod\n    def reset():\n        pass"


def test_a_reward_that_reads_the_object_of_tools_is_tried(given: Given) -> None:
    (file := given.folder / "game.py").write_text(GAME)
    given.keys |= {"rollout.tools": [f"{file}:Game"], "rollout.reward": f"{file}:score"}
    parts = Inputs(given.config()).parts
    sample = Sample(0, "d", (Message("user", "?"),), "null", extra_info_json='{"secret": 7}')
    assert asyncio.run(preflight.try_sample(parts, sample)) == [
        ok("""guess({"number":1}) returns 'right'"""),
        ok("as an answer, an empty text scores 0.25"),
    ]
    without_secret = msgspec.structs.replace(sample, extra_info_json="{}")
    guess, score = asyncio.run(preflight.try_sample(Inputs(given.config()).parts, without_secret))
    assert guess.level == score.level == "warning"
    assert "needs 'secret'" in guess.text and "no attribute 'reward'" in score.text


def test_a_column_that_reset_needs_is_missed_before_the_start(
    given: Given, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := given.folder / "game.py").write_text(GAME)
    given.keys |= {"rollout.tools": [f"{file}:Game"], "rollout.reward": f"{file}:score"}
    assert cli.main(["train", *given.overrides]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("asyncrl: rollout.tools: reset (game.py:") and "needs 'secret'" in line
    assert line.endswith("or map its column: 'data.columns={extra_info.secret: secret}'")
    assert not given.runs.exists()


def test_a_reset_without_self_needs_no_column(given: Given) -> None:
    static_reset = GAME.replace("def reset(self, secret):\n        self.reward = 0.25", RESET_WITHOUT_SELF)
    (file := given.folder / "game.py").write_text(static_reset)
    given.keys |= {"rollout.tools": [f"{file}:Game"], "rollout.reward": f"{file}:score"}
    (note,) = preflight.check_reset(Inputs(given.config()))
    assert note.level == "ok"


def test_two_objects_that_both_leave_a_reward_are_warned_of(given: Given) -> None:
    (file := given.folder / "game.py").write_text(GAME)
    (other := given.folder / "other.py").write_text(GAME.replace("def guess", "def ask"))
    given.keys |= {"rollout.tools": [f"{file}:Game", f"{other}:Game"], "rollout.reward": "final_number"}
    sample = Sample(0, "d", (Message("user", "?"),), "null", extra_info_json='{"secret": 7}')
    notes = asyncio.run(preflight.try_sample(Inputs(given.config()).parts, sample))
    assert [note.text for note in notes if note.level == "warning"] == [
        "the tools fail to return a result for the reward: ToolError: two tools return 'reward' as their "
        "result; use only one of them"
    ]


def test_each_data_source_has_a_teacher_or_the_run_is_refused(given: Given) -> None:
    given.keys |= {"scorers.teacher": {"urls": ["http://t"], "sources": ["elsewhere"]}, "kl.where": "loss"}
    with pytest.raises(ConfigError, match=r"no teacher lists the data source \S+ in its sources") as caught:
        list(preflight.load_data(Inputs(given.config())))
    source = str(caught.value).split("data source ")[1].split()[0]
    given.keys["scorers.teacher"]["sources"].append(source)
    assert list(preflight.load_data(Inputs(given.config())))
