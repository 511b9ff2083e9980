"""What `asyncrl doctor` says of GPUs, NCCL, SGLang's kernels and shared memory. The machine is simulated: a
program in the place of nvidia-smi, torch's answers about GPUs, interfaces, the size of /dev/shm."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from asyncrl.config import RunConfig, parse
from asyncrl.errors import ConfigError
from asyncrl.launch import gpus, machine
from asyncrl.launch.data import Inputs
from asyncrl.launch.notes import Note

TABLE = "| NVIDIA-SMI {driver}     Driver Version: {driver}     CUDA {name}: {cuda}     |"
Check = Callable[[Inputs], Iterable[Note]]


def config(**keys: dict[str, Any]) -> RunConfig:
    return parse({"name": "x", "model": {"path": "m"} | keys.pop("model", {}), "data": {"train": "t"}} | keys)


def found(check: Check, settings: RunConfig) -> dict[str, str]:
    """Texts by their levels; an error is one of them."""
    notes = dict[str, str]()
    try:
        for note in check(Inputs(settings)):
            notes[note.level] = note.text
    except ConfigError as error:
        notes["error"] = str(error)
    return notes


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of programs that are found first."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def nvidia_smi(at: Path, driver: str, cuda: str, name: str = "Version") -> None:
    """It lists two GPUs where it is asked for their names, and draws its table otherwise."""
    table = TABLE.format(driver=driver, cuda=cuda, name=name)
    listed = "NVIDIA L4, 23034 MiB\\nNVIDIA L4, 23034 MiB"
    (at / "nvidia-smi").write_text(f"#!/bin/sh\n[ $# = 0 ] && echo '{table}' || printf '{listed}\\n'\n")
    (at / "nvidia-smi").chmod(0o755)


def gpus_of_torch(monkeypatch: pytest.MonkeyPatch, count: int, apart: Iterable[tuple[int, int]] = ()) -> None:
    """torch sees so many; those `apart` cannot read each other's memory."""
    strangers = {frozenset(pair) for pair in apart}
    properties = SimpleNamespace(name="NVIDIA L4", total_memory=24 << 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *pair: frozenset(pair) not in strangers)


@pytest.mark.parametrize(
    ("built", "newest", "visible", "words"),
    [
        (
            "13.0",
            "12.4",
            None,
            ["CUDA 13.0", "driver (550.54) runs CUDA 12.4", "a driver for CUDA 13.0, or a"],
        ),
        ("13.0", "12.4", None, ["a torch that is built for CUDA 12"]),
        (None, "12.4", None, ["built without CUDA; install a torch that is built for CUDA 12"]),
        ("12.8", "12.4", "-1", ["Error: ", "CUDA_VISIBLE_DEVICES is '-1'"]),
        ("12.8", "12.4", None, ["built for CUDA 12.8, and the driver (550.54) runs CUDA 12.4", "'not set'"]),
    ],
)
def test_why_torch_cannot_use_the_gpus_of_the_driver(
    programs: Path,
    monkeypatch: pytest.MonkeyPatch,
    built: str | None,
    newest: str,
    visible: str | None,
    words: list[str],
) -> None:
    nvidia_smi(programs, "550.54", newest)
    monkeypatch.setattr(torch.version, "cuda", built)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    text = found(gpus.check_gpus, config())["warning"]
    assert "nvidia-smi lists 2 GPUs" in text and all(word in text for word in words), text
    needing = (config(model={"device": "cuda"}), config(engine={"name": "sglang"}))
    assert [found(gpus.check_gpus, one) for one in needing] == [{"error": text}] * 2
    elsewhere = config(engine={"name": "sglang", "server_command": ["python"]})  # has a torch of its own
    assert found(gpus.check_gpus, elsewhere) == {"warning": text}


def test_newer_drivers_call_the_version_otherwise(programs: Path) -> None:
    nvidia_smi(programs, "600.1", "13.2", name="UMD Version")
    assert gpus.gpu_driver() == ("600.1", "13.2")
    (programs / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    assert gpus.gpu_driver() == ("", "")


def test_a_driver_that_does_not_tell_its_version_is_not_quoted(
    programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (programs / "nvidia-smi").write_text("#!/bin/sh\n[ $# = 0 ] || echo NVIDIA L4\n")
    (programs / "nvidia-smi").chmod(0o755)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    text = found(gpus.check_gpus, config())["warning"]
    assert "built for CUDA 12.8 (" in text and "at most" not in text


SERVERS = {"name": "sglang", "servers": 2}
APART = [(0, 1), (0, 2)]


@pytest.mark.parametrize(
    ("count", "apart", "keys", "level", "words"),
    [
        (1, [], {}, "ok", "CUDA"),
        (4, APART, {}, "ok", "CUDA"),  # one rank, engines in the workers
        (4, APART, {"engine": SERVERS}, "ok", "CUDA"),  # weights are files
        (4, [(2, 3)], {"trainer": {"ranks": 2}}, "ok", "CUDA"),
        (
            4,
            APART,
            {"trainer": {"ranks": 2}},
            "warning",
            "GPUs 0-1 cannot read.*/dev/shm.*NCCL_P2P_DISABLE=1",
        ),
        (4, [(1, 2)], {"engine": {"name": "sglang", "tp": 2}}, "warning", "GPUs 1-2 .*NCCL_P2P_DISABLE"),
        (4, APART, {"engine": SERVERS, "weights": {"transport": "collective"}}, "warning", "GPUs 0-1, 0-2 "),
        (
            4,
            APART,
            {"engine": SERVERS, "weights": {"transport": "ipc"}},
            "error",
            "0-1, 0-2 .*ipc.*set it to collective or disk",
        ),
        (1, APART, {"engine": SERVERS, "weights": {"transport": "ipc"}}, "ok", "CUDA"),  # one GPU for all
        (4, APART, {"trainer": {"ranks": 2}, "launch": {"kind": "ray"}}, "ok", "CUDA"),  # Ray deals them
    ],
)
def test_gpus_without_access_to_each_other(
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    apart: list[tuple[int, int]],
    keys: dict[str, Any],
    level: str,
    words: str,
) -> None:
    gpus_of_torch(monkeypatch, count, apart)
    notes = found(gpus.check_gpus, config(**keys))
    assert list(notes) == list(dict.fromkeys(["ok", level]))
    assert re.search(words, notes[level]), notes


def sglang_in(at: Path, version: str, **modules: str) -> list[str]:
    """A Python with an SGLang, a torch that sees a GPU, and modules of this text."""
    info = at / "site" / f"sglang-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
    sees = "class cuda:\n    is_available = staticmethod(lambda: True)\n"
    for name, text in {"torch": sees, **modules}.items():
        (at / "site" / f"{name}.py").write_text(text)
    program = at / "python"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={at / "site"} exec {sys.executable} "$@"\n')
    program.chmod(0o755)
    return [str(program), "-m", "sglang.launch_server"]


@pytest.mark.parametrize(
    ("modules", "keys", "level", "words"),
    [
        ({"sgl_kernel": "", "flashinfer": ""}, {}, "ok", "0.5.23"),
        (
            {"flashinfer": ""},
            {},
            "error",
            "cannot start on a GPU: sgl_kernel .* No module named .*python -m pip install sglang==0.5.23",
        ),
        (
            {"sgl_kernel": "raise ImportError('libcudart.so.13:\\n no such file')", "flashinfer": ""},
            {},
            "error",
            "sgl_kernel cannot be imported: libcudart.so.13: no such file; ",
        ),
        ({"sgl_kernel": ""}, {}, "warning", "slower.*flashinfer.*pip install sglang==0.5.23"),
        ({}, {"server_args": {"device": "cpu"}}, "ok", "0.5.23"),
        ({"torch": "class cuda:\n    is_available = bool"}, {}, "ok", "0.5.23"),  # it starts on a CPU
    ],
)
def test_kernels_of_sglang(
    programs: Path, modules: dict[str, str], keys: dict[str, Any], level: str, words: str
) -> None:
    nvidia_smi(programs, "580.65", "13.0")
    command = sglang_in(programs, "0.5.23", **modules)
    notes = found(machine.check_sglang, config(engine={"name": "sglang", "server_command": command, **keys}))
    assert re.search(words, notes[level]), notes
    assert level == "ok" or notes.keys() <= {level, "ok"}


@pytest.mark.parametrize(
    ("script", "level", "words"),
    [
        ("kill -SEGV $$", "warning", r"\(it was killed by SIGSEGV\)"),
        ("echo no module >&2; exit 1", "warning", r"\(no module\)"),
        ("exec sleep 100", "warning", r"\(no answer within 0.1 s\)"),
        ("", "error", "has sglang none; install one of"),
    ],
)
def test_a_python_that_does_not_tell_its_sglang(
    programs: Path, monkeypatch: pytest.MonkeyPatch, script: str, level: str, words: str
) -> None:
    monkeypatch.setattr(machine, "VERSION_SECONDS", 0.1 if "sleep" in script else 20.0)
    program = programs / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    command = [str(program), "-m", "sglang.launch_server"]
    notes = found(machine.check_sglang, config(engine={"name": "sglang", "server_command": command}))
    assert list(notes) == [level] and re.search(words, notes[level]), notes


def test_without_gpus_nobody_asks_for_kernels(programs: Path) -> None:
    command = sglang_in(programs, "0.5.23", torch="raise OSError")
    notes = found(machine.check_sglang, config(engine={"name": "sglang", "server_command": command}))
    assert list(notes) == ["ok"]


MIB = 1 << 20
RANKS = {"trainer": {"ranks": 2}}


@pytest.mark.parametrize(
    ("total", "gpus_there", "model_bytes", "keys", "level", "words"),
    [
        (
            64 * MIB,
            0,
            0,
            {},
            "warning",
            "67.1 MB of 67.1 MB free.*--shm-size=16g, or --ipc=host; or weights.directory",
        ),
        (64 * MIB, 0, MIB, {}, "ok", "67.1 MB"),  # the demo
        (
            64 * MIB,
            1,
            100 * MIB,
            {},
            "warning",
            "versions of the weights take 524.3 MB; .*weights.directory=run",
        ),
        (64 * MIB, 1, 100 * MIB, {"weights": {"directory": "run"}}, "ok", "67.1 MB"),
        (64 * MIB, 2, MIB, RANKS, "warning", "free, and NCCL wants 1 GB; .*--ipc=host"),
        (
            64 * MIB,
            2,
            100 * MIB,
            RANKS,
            "warning",
            "take 524.3 MB, and NCCL wants 1 GB;.*weights.directory=run",
        ),
        (64 * MIB, 0, MIB, RANKS, "ok", "67.1 MB"),  # ranks on a CPU
        (64 * MIB, 2, MIB, {"engine": {"name": "sglang", "tp": 2}}, "warning", "NCCL wants"),
        (64 << 30, 8, 20 << 30, RANKS, "ok", "68.7 GB free, and the versions of the weights take 107.4 GB"),
    ],
)
def test_the_shared_memory_of_a_container(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    total: int,
    gpus_there: int,
    model_bytes: int,
    keys: dict[str, Any],
    level: str,
    words: str,
) -> None:
    gpus_of_torch(monkeypatch, gpus_there)
    monkeypatch.setattr("asyncrl.weights.disk.SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=total, total=total))
    if model_bytes:
        with (tmp_path / "model.safetensors").open("wb") as file:
            file.truncate(model_bytes)
    notes = found(machine.check_shared_memory, config(model={"path": str(tmp_path)}, **keys))
    assert list(notes) == [level] and re.search(words, notes[level]), notes


ONE, TWO = {"lo": True, "eth0": True, "docker0": True}, {"lo": True, "eth0": True, "ib0": True, "eth1": False}
ATTACHED = {
    "engine": {"name": "sglang", "urls": ["http://10.0.0.5:30000"]},
    "weights": {"transport": "collective"},
    "launch": {"host": "10.0.0.1"},
}
RAY = {"launch": {"kind": "ray", "ray_address": "auto"}}


@pytest.mark.parametrize(
    ("interfaces", "named", "keys", "level", "words"),
    [
        (TWO, "eth9", {}, "ok", r"eth0, ib0, eth1 \(down\)"),  # one rank
        (TWO, "", RANKS, "ok", "eth0"),  # on one machine any will do
        (TWO, "eth", RANKS, "ok", "eth0"),  # a beginning of a name
        (TWO, "eth9", RANKS, "error", r"NCCL_SOCKET_IFNAME=eth9 .* \(eth0, ib0, eth1 \(down\)\); correct"),
        (TWO, "=eth", RANKS, "error", "NCCL_SOCKET_IFNAME==eth "),
        (TWO, "=eth0,ib7", RANKS, "ok", "eth0"),
        (TWO, "eth1", RANKS, "error", "NCCL_SOCKET_IFNAME=eth1 matches none that is up"),
        (TWO, "^lo,eth", RANKS, "ok", "ib0"),
        (TWO, "^lo,eth,ib", RANKS, "error", "matches none that is up"),
        (TWO, "eth9", {"engine": {"name": "sglang", "tp": 2}}, "error", "NCCL_SOCKET_IFNAME=eth9"),
        (
            TWO,
            "",
            ATTACHED,
            "warning",
            "any of eth0, ib0, .*; export NCCL_SOCKET_IFNAME=NAME .*for the servers",
        ),
        (TWO, "ib0", ATTACHED, "ok", "ib0"),
        (ONE, "", ATTACHED, "ok", "eth0"),  # NCCL leaves Docker's out
        (TWO, "", RAY, "ok", "ib0"),  # each process takes that of its machine's address
        (TWO, "eth9", RAY, "warning", "NCCL_SOCKET_IFNAME=eth9 matches none"),
        (TWO, "lo", RAY, "warning", "only loopback is left .* see NCCL_SOCKET_IFNAME"),
        ({"lo": True, "eth0": False}, "", RAY, "warning", r"only loopback .*\(eth0 \(down\)\)"),
        ({"lo": True}, "", RANKS, "ok", "loopback only"),
    ],
)
def test_the_network_interface_of_groups(
    monkeypatch: pytest.MonkeyPatch,
    interfaces: dict[str, bool],
    named: str,
    keys: dict[str, Any],
    level: str,
    words: str,
) -> None:
    gpus_of_torch(monkeypatch, 4)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", named)
    stats = {
        name: SimpleNamespace(isup=up, flags="up,loopback" if name == "lo" else "up,running")
        for name, up in interfaces.items()
    }
    monkeypatch.setattr(psutil, "net_if_stats", lambda: stats)
    notes = found(gpus.check_network, config(**keys))
    assert list(notes) == [level] and re.search(words, notes[level]), notes


@pytest.mark.parametrize(("workers", "level"), [(100, "ok"), (300, "warning")])
def test_the_limit_of_open_files(monkeypatch: pytest.MonkeyPatch, workers: int, level: str) -> None:
    monkeypatch.setattr(machine, "FILES", 256)
    monkeypatch.setattr(machine, "ROLE_FILES", 1024)
    monkeypatch.setattr(machine, "HARD_FILES", 1024)
    notes = found(machine.check_files, config(rollout={"workers": workers}))
    assert (
        list(notes) == [level] and "1024 per process of a run (ulimit -n: 256, at most 1024)" in notes[level]
    )
    assert level == "ok" or "903 connections to the coordinator have no room; raise the hard" in notes[level]


def test_without_gpus_nccl_has_no_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus_of_torch(monkeypatch, 0)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth9")
    assert list(found(gpus.check_network, config(**RANKS))) == ["ok"]


@pytest.mark.parametrize(
    ("version", "level"), [((3, 11, 7), "ok"), ((3, 12, 1), "warning"), ((3, 12, 2), "ok")]
)
def test_a_python_that_crashes(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, int, int], level: str
) -> None:
    monkeypatch.setattr(machine.sys, "version_info", (*version, "final", 0))
    assert list(found(machine.check_python, config())) == [level]
