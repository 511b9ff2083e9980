"""Checks that need a machine we do not have: file systems, extras."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from asyncrl.config import RunConfig, parse
from asyncrl.errors import ConfigError
from asyncrl.launch import preflight, run_directory, servers
from asyncrl.launch.data import Inputs, RunData
from asyncrl.launch.notes import ok
from asyncrl.types import Message, Sample
from asyncrl.weights import disk

Mounts = Callable[..., None]
MOUNTS = {"/": "ext4", "/home": "nfs4", "/home/local": "ext4", "/mnt/my share": "cifs"}


@pytest.fixture
def mounted(monkeypatch: pytest.MonkeyPatch) -> Mounts:
    """Sets what psutil finds: directories and types of file systems, in the order of their mounting."""

    def mount(*mounts: tuple[str, str]) -> None:
        found = [SimpleNamespace(mountpoint=point, fstype=kind) for point, kind in mounts]
        monkeypatch.setattr(run_directory.psutil, "disk_partitions", lambda all: found)

    return mount


def config(run_dir: Path, **keys: Any) -> RunConfig:
    least = {"name": "x", "run_dir": str(run_dir), "model": {"path": "m"}, "data": {"train": "t"}}
    return parse(least | keys)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/tmp/x", "ext4"),
        ("/home", "nfs4"),
        ("/home/me/runs", "nfs4"),
        ("/homework", "ext4"),
        ("/home/local/runs", "ext4"),
        ("/mnt/my share/runs", "cifs"),
    ],
)
def test_the_nearest_mount_decides(mounted: Mounts, path: str, kind: str) -> None:
    mounted(*MOUNTS.items())
    assert run_directory.file_system(Path(path)) == kind


def test_a_later_mount_hides_an_earlier_one(mounted: Mounts) -> None:
    mounted(*MOUNTS.items(), ("/home", "xfs"))
    assert run_directory.file_system(Path("/home")) == "xfs"
    mounted()
    assert run_directory.file_system(Path("/home")) == ""


def test_a_run_store_on_a_network_file_system_is_refused_with_the_reason(
    tmp_path: Path, mounted: Mounts
) -> None:
    mounted(("/", "ext4"), (str(tmp_path.resolve()), "nfs"))
    with pytest.raises(ConfigError, match=r"network file system \(nfs\).*write-ahead log.*local disk"):
        run_directory.check_run_directory(config(tmp_path / "runs"))
    mounted(("/", "nfs"), (str(tmp_path.resolve()), "ext4"))
    run_directory.check_run_directory(config(tmp_path / "runs"))


def test_resume_decides_about_an_existing_run(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    run_directory.check_run_directory(config(tmp_path))  # an empty directory is no run
    (tmp_path / "x" / "run.db").touch()
    with pytest.raises(ConfigError, match="resume=auto"):
        run_directory.check_run_directory(config(tmp_path))
    run_directory.check_run_directory(config(tmp_path, resume="auto"))
    run_directory.check_run_directory(config(tmp_path, resume="must"))
    with pytest.raises(ConfigError, match="no run to continue"):
        run_directory.check_run_directory(config(tmp_path / "else", resume="must"))


def test_ray_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"which is not installed; pip install 'asyncrl\[ray\]'"):
        list(preflight.check_launch(Inputs(config(tmp_path, launch={"kind": "ray"}))))


@pytest.mark.parametrize("gpus", [1.5, 0.00001])
def test_gpus_that_ray_cannot_reserve_are_refused(tmp_path: Path, gpus: float) -> None:
    with pytest.raises(ConfigError, match=r"launch.gpus: Ray reserves no .* \(engine\); give a whole number"):
        list(
            preflight.check_launch(Inputs(config(tmp_path, launch={"kind": "ray", "gpus": {"engine": gpus}})))
        )


def begun(tmp_path: Path) -> None:
    """A run in tmp_path / "x" with the least configuration."""
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "config.yaml").write_bytes(msgspec.yaml.encode(config(tmp_path)))


@pytest.mark.parametrize(
    ("key", "old", "new"),
    [
        ("data.train", "t", "other"),
        ("data.shuffle", True, False),
        ("seed", 0, 1),
        ("model.path", "m", "other"),
        ("buffer.groups_per_batch", 32, 8),
        ("buffer.episodes_per_group", 8, 4),
        ("algorithm.steps_per_batch", 1, 2),
        ("model.lora_rank", 0, 8),
        ("model.lora_alpha", 16.0, 32.0),
        ("critic.backbone", "own", "shared"),
    ],
)
def test_a_resumed_run_keeps_what_its_store_is_made_of(tmp_path: Path, key: str, old: Any, new: Any) -> None:
    begun(tmp_path)
    changed = msgspec.to_builtins(config(tmp_path, resume="auto"))
    *parents, last = key.split(".")
    section = changed
    for name in parents:
        section = section[name]
    section[last] = new
    with pytest.raises(ConfigError) as refusal:
        run_directory.check_resumed(msgspec.convert(changed, RunConfig))
    text = str(refusal.value)
    assert f"{key}: " in text and f"with {old!r}" in text and f"with {new!r}" in text


def test_a_resumed_run_may_change_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun(tmp_path)
    monkeypatch.chdir(tmp_path)
    moved = {"path": str(tmp_path / "m")}  # the same directory, spelled otherwise
    run_directory.check_resumed(
        config(tmp_path, resume="must", model=moved, total_steps=7, trainer={"lr": 1.0})
    )
    run_directory.check_resumed(config(tmp_path, seed=1))  # not resumed: refused for another reason
    (tmp_path / "x" / "config.yaml").write_text("name: x\nretired_key: 1\n")
    run_directory.check_resumed(config(tmp_path, resume="auto", seed=1))  # of a version that knew no seed
    (tmp_path / "x" / "config.yaml").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.yaml: not readable"):
        run_directory.check_resumed(config(tmp_path, resume="auto"))


def test_groups_do_not_change_size_within_a_run(tmp_path: Path) -> None:
    begun(tmp_path)

    def resumed(advantage: str) -> RunConfig:
        return config(tmp_path, resume="auto", algorithm={"advantage": advantage})

    run_directory.check_resumed(resumed("rloo"))
    with pytest.raises(ConfigError, match=r"algorithm\.advantage: .* 'dr_grpo' .* 'remax', .* greedy"):
        run_directory.check_resumed(resumed("remax"))


def test_a_gpu_that_is_asked_for_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = {"path": "m", "device": "cuda"}
    wanting = config(tmp_path, model=model)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"model\.device is cuda"):
        list(preflight.check_device(Inputs(wanting)))
    list(preflight.check_device(Inputs(config(tmp_path, model=model, launch={"kind": "ray"}))))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    list(preflight.check_device(Inputs(wanting)))


def warnings(config: RunConfig) -> list[str]:
    data = RunData([Sample(0, "sums", (Message("user", "1+1?"),), "2")], None, [])
    found = list(preflight.check_settings(Inputs(config, data=data)))
    assert all(note.level == "warning" for note in found)
    return [note.text for note in found]


def test_slots_that_stay_empty_are_worth_a_warning(tmp_path: Path) -> None:
    batch = {"groups_per_batch": 4, "episodes_per_group": 4}
    assert not warnings(config(tmp_path, buffer=batch, rollout={"slots": 80}))
    (line,) = warnings(config(tmp_path, buffer=batch, rollout={"slots": 27, "workers": 3}))
    assert "at most 80 episodes run at once, (1 + max_staleness)" in line and "1 of 81 slots" in line
    batch["target_staleness"] = 1
    (line,) = warnings(config(tmp_path, buffer=batch, rollout={"slots": 11, "workers": 3}))
    assert "at most 32 episodes run at once, (1 + target_staleness)" in line and "1 of 33 slots" in line


def test_no_checkpoint_but_the_last_is_worth_a_warning_where_there_are_many_steps(tmp_path: Path) -> None:
    rare: dict[str, Any] = {"checkpoint": {"every": 0}, "rollout": {"slots": 1}}
    assert not warnings(config(tmp_path, total_steps=50, **rare))
    (line,) = warnings(config(tmp_path, total_steps=51, **rare))
    assert "checkpoint.every=0" in line and "all turns stay on the disk" in line


def test_episodes_of_many_rows_are_worth_a_warning(tmp_path: Path) -> None:
    rollout = {"slots": 1, "max_tokens": 1024, "history": "fork", "max_rows": 8}
    assert not warnings(config(tmp_path, rollout=rollout))
    (line,) = warnings(config(tmp_path, rollout=rollout | {"max_rows": 9}))
    assert "an episode may have 9216 tokens" in line and "micro_batch_tokens (8192)" in line


def test_where_sglang_is_missing_the_way_on_a_cpu_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"on a CPU, make sglang-cpu in a checkout, then engine=sglang_cpu"):
        servers.check_servers(config(tmp_path, engine={"name": "sglang"}))


def test_servers_for_gpus_where_there_are_none_are_worth_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (line,) = warnings(config(tmp_path, engine={"name": "sglang"}))
    assert "engine=sglang starts servers on GPUs" in line and "then engine=sglang_cpu" in line
    for own in ({"urls": ["http://127.0.0.1:1"]}, {"server_command": ["launch"]}):
        assert not warnings(config(tmp_path, engine={"name": "sglang", **own}))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation: True)
    assert not warnings(config(tmp_path, engine={"name": "sglang"}))


def test_a_parser_that_does_not_fit_the_template_is_worth_a_warning(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ '[TOOL_CALLS]' }}")
    model = {"path": str(tmp_path)}
    calling: dict[str, Any] = {"slots": 1, "tools": ["calculator"]}
    (line,) = warnings(config(tmp_path, model=model, rollout=calling))
    assert "rollout.parser is hermes" in line and "set rollout.parser=mistral" in line
    assert not warnings(config(tmp_path, model=model, rollout=calling | {"parser": "mistral"}))
    assert not warnings(config(tmp_path, model=model, rollout={"slots": 1}))


@pytest.mark.parametrize("template", ["{{ messages }}", "{% set ns = ']<]minimax[>[' %}{{ ns }}<tool_call>"])
def test_a_template_that_shows_no_calls_is_worth_a_warning_where_there_are_tools(
    tmp_path: Path, template: str
) -> None:
    (tmp_path / "chat_template.jinja").write_text(template)
    model, calling = {"path": str(tmp_path)}, {"slots": 1, "tools": ["calculator"]}
    (line,) = warnings(config(tmp_path, model=model, rollout=calling))
    assert "rollout.parser is hermes" in line and "gemma4, glm, harmony, hermes, kimi" in line
    assert not warnings(config(tmp_path, model=model, rollout={"slots": 1}))
    no_data = Inputs(config(tmp_path, model=model, rollout=calling))  # of which another check says why
    assert not list(preflight.check_settings(no_data))
    own = warnings(config(tmp_path, model=model, rollout=calling | {"parser": "my.py:read"}))
    assert own == []


def test_what_a_killed_launcher_left_on_shared_memory_counts_as_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shm"
    shared.mkdir()
    monkeypatch.setattr(disk, "SHARED_MEMORY", shared)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: SimpleNamespace(free=40))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(bytes(10))
    insisting = config(tmp_path, model={"path": str(tmp_path / "model")}, weights={"directory": "shm"})
    with pytest.raises(ConfigError, match="40 bytes free and the weights need 50"):
        list(preflight.check_weights_directory(Inputs(insisting)))
    version = preflight.outside_weights(insisting)[0] / "e0001-v00000001"
    version.mkdir(parents=True)
    (version / "model.safetensors").write_bytes(bytes(10))
    list(preflight.check_weights_directory(Inputs(insisting)))


def test_versions_are_written_and_removed_where_nodes_share_a_path(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    model = {"path": str(tmp_path)}

    def at(directory: str) -> RunConfig:
        return config(tmp_path, model=model, weights={"directory": directory})

    shared = at(str(tmp_path / "shared"))
    list(preflight.check_weights_directory(Inputs(shared)))
    assert not (tmp_path / "shared").exists()
    memory, path = sorted(preflight.outside_weights(shared), key=lambda each: each.is_relative_to(tmp_path))
    assert memory.parent == disk.SHARED_MEMORY and path.parent == tmp_path / "shared"
    for directory, says in {
        f"{tmp_path}/file/weights": "file is not a writable directory; set weights.directory",
        "shared": "'shared' is none of auto, shm, run, an absolute path",
    }.items():
        with pytest.raises(ConfigError, match=says):
            list(preflight.check_weights_directory(Inputs(at(directory))))


@pytest.mark.parametrize(
    ("host", "url", "reached"),
    [
        ("127.0.0.1", "http://127.0.0.1:30000", True),
        ("127.0.0.1", "http://localhost:30000", True),
        ("localhost", "http://[::1]:30000", True),
        ("127.0.0.1", "http://10.0.0.5:30000", False),
        ("localhost", "http://gpu-7:30000", False),
        ("10.0.0.4", "http://10.0.0.5:30000", True),
    ],
)
def test_servers_elsewhere_are_not_told_to_join_themselves(
    tmp_path: Path, host: str, url: str, reached: bool
) -> None:
    def with_weights(**weights: str) -> RunConfig:
        engine = {"name": "sglang", "urls": ["http://127.0.0.1:1", url]}
        return config(tmp_path, engine=engine, launch={"host": host}, weights=weights)

    servers.check_group_address(with_weights(transport="disk"))
    if reached:
        servers.check_group_address(with_weights(transport="collective"))
        return
    with pytest.raises(ConfigError, match=rf"launch.host: {host} cannot be reached by {url}"):
        servers.check_group_address(with_weights(transport="collective"))


TOOLS = """
from asyncrl.tools import tool

@tool
def weather(city: str, days: int, kind: Literal["rain", "wind"], more: bool = False) -> str:
    return f"{kind} in {city} for {days}"

@tool
def broken() -> str:
    raise OSError("no network")
"""
REWARD = "def score(data_source, solution_str, ground_truth, extra_info):\n    return 1 / len(solution_str)\n"


def test_arguments_are_made_up_for_what_servers_say_of_their_tools() -> None:
    """MCP's schemas come as they are: a type may be a list, and what is required need not be described."""
    properties = {"a": {"type": ["string", "null"]}, "b": {"enum": ["x"]}, "c": {"type": "boolean"}}
    given = {"parameters": {"properties": properties, "required": ["a", "b", "c"]}}
    assert preflight._arguments(given) == {"a": 1, "b": "x", "c": True}
    assert preflight._arguments({"parameters": {"required": ["q"]}}) == {"q": 1}
    assert preflight._arguments({}) == {}


def test_a_sample_goes_through_each_tool_and_the_reward(tmp_path: Path) -> None:
    """With arguments made from the schema; answered by its ground truth, and by nothing."""
    (tmp_path / "mine.py").write_text(f"from typing import Literal\n{TOOLS}")
    (tmp_path / "own.py").write_text(REWARD)
    rollout = {"tools": [str(tmp_path / "mine.py")], "reward": f"{tmp_path / 'own.py'}:score"}
    asked = config(tmp_path, rollout=rollout)
    sample = Sample(0, "d", (Message("user", "?"),), '"four"')
    inputs = Inputs(asked)
    assert len(list(preflight.check_plugins(inputs))) == 1
    found = asyncio.run(preflight.try_sample(inputs.parts, sample))
    broken, weather, right, nothing = found
    without = Inputs(config(tmp_path, rollout=rollout | {"tools": []})).parts
    unknown = asyncio.run(preflight.try_sample(without, msgspec.structs.replace(sample, ground_truth="null")))
    assert unknown == [nothing], "without a ground truth there is one answer"
    call = '{"city":"1","days":1,"kind":"rain"}'
    assert weather == ok(f"weather({call}) replies 'rain in 1 for 1'")
    assert broken.level == "warning" and "OSError: no network" in broken.text
    assert right == ok("its ground truth as the answer scores 0.25")
    assert nothing.level == "warning" and "division by zero" in nothing.text and "own.py:2" in nothing.text
