"""Simulates machines: a program in the place of nvidia-smi, torch's answers about GPUs, interfaces, the size
of /dev/shm. The check that is responsible says what is wrong with them."""

from __future__ import annotations

import ctypes
import multiprocessing
import shutil
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from asyncrl.config import parse
from asyncrl.errors import ConfigError
from asyncrl.gateway.harnesses import CLAUDE_CODE
from asyncrl.launch import gpus as gpu_checks
from asyncrl.launch import machine
from asyncrl.launch.inputs import Inputs
from asyncrl.launch.notes import ok
from tests.fakes.checked import (
    Given,
    Keys,
    Spoil,
    assert_found,
    gpus,
    patched,
    sglang_in,
    write_header,
)
from tests.unit.test_config import with_keys

TABLE = "| NVIDIA-SMI {driver}     Driver Version: {driver}     CUDA {name}: {cuda}     |"
MIB = 1 << 20
ON_GPUS: Keys = {"model.device": "cuda"}
RANKS: Keys = {"trainer.ranks": 2}
RAY: Keys = {"launch.kind": "ray", "launch.ray_address": "auto"}
SERVERS: Keys = {"engine.name": "sglang", "engine.servers": 2}
TP: Keys = {"engine.name": "sglang", "engine.tp": 2}
COLOCATED: Keys = {"engine.servers": 1, "engine.colocated": 1}
OWN_TORCH: Keys = {"engine.name": "sglang", "engine.server_command": ["python"]}
BROADCAST: Keys = SERVERS | {"weights.transport": "collective"}
ATTACHED: Keys = {
    "engine.name": "sglang",
    "engine.urls": ["http://10.0.0.5:30000"],
    "weights.transport": "collective",
    "launch.host": "10.0.0.1",
}
ON_DISK: Keys = {"weights.directory": "run"}
APART = [(0, 1), (0, 2)]
SEES_NONE = "class cuda:\n    is_available = bool"


def nvidia_smi(driver: str, cuda: str, name: str = "Version") -> Spoil:
    """It lists two GPUs where it is asked for their names, and draws its table otherwise."""
    table = TABLE.format(driver=driver, cuda=cuda, name=name) if driver else ""
    listed = "NVIDIA L4, 23034 MiB\\nNVIDIA L4, 23034 MiB"
    script = f"[ $# = 0 ] && echo '{table}' || printf '{listed}\\n'"

    def spoil(given: Given) -> None:
        given.patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        given.program("nvidia-smi", script)

    return spoil


def invisible(given: Given) -> None:
    given.patch.setenv("CUDA_VISIBLE_DEVICES", "-1")


def sglang(version: str = "0.5.23", **modules: str) -> Spoil:
    def spoil(given: Given) -> Keys:
        command = sglang_in(given, version, **modules)
        return {"engine.name": "sglang", "engine.server_command": command}

    return spoil


def python(script: str, seconds: float = 20.0) -> Spoil:
    """In the place of the servers' Python."""

    def spoil(given: Given) -> Keys:
        given.patch.setattr(machine, "VERSION_TIMEOUT", seconds)
        return {
            "engine.name": "sglang",
            "engine.server_command": [given.program("python", script), "-m", "x"],
        }

    return spoil


def claude(script: str, seconds: float = 20.0, **options: str) -> Spoil:
    """In the place of Claude Code."""

    def spoil(given: Given) -> Keys:
        given.patch.setattr("asyncrl.gateway.programs.VERSION_SECONDS", seconds)
        given.program("claude", script)
        return {"rollout.agent": {"claude_code": options}}

    return spoil


def shared_memory(total: int, model: int) -> Spoil:
    """/dev/shm of this size, all free, and a model of so many bytes in float32, or none."""

    def spoil(given: Given) -> Keys:
        given.patch.setattr("asyncrl.weights.disk.SHARED_MEMORY", given.folder)
        given.patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=total, total=total))
        write_header(given.model / "model.safetensors", weight=[model // 4])
        return {} if model else {"model.path": "none"}

    return spoil


def interfaces(named: str, *names: str, gpus_there: int = 4) -> list[Spoil]:
    """What NCCL_SOCKET_IFNAME names, and what is there beside loopback; -NAME is down."""

    def spoil(given: Given) -> None:
        given.patch.setenv("NCCL_SOCKET_IFNAME", named)
        up = {"lo": True} | {name.removeprefix("-"): not name.startswith("-") for name in names}
        flags = {name: "up,loopback" if name == "lo" else "up,running" for name in up}
        stats = {name: SimpleNamespace(isup=its, flags=flags[name]) for name, its in up.items()}
        given.patch.setattr(psutil, "net_if_stats", lambda: stats)

    return [gpus(gpus_there), spoil]


def one(named: str = "") -> list[Spoil]:
    return interfaces(named, "eth0", "docker0")


def two(named: str = "") -> list[Spoil]:
    return interfaces(named, "eth0", "ib0", "-eth1")


OLD = nvidia_smi("550.54", "12.4")
ENOUGH = nvidia_smi("580.65", "13.0")
SMALL = 64 * MIB
CUDA13, CUDA12, CUDA_NONE = (patched("torch.version.cuda", each) for each in ("13.0", "12.8", None))
PYTHONS = [
    patched("asyncrl.launch.machine.sys.version_info", (*each, "final", 0))
    for each in ((3, 11, 7), (3, 12, 1), (3, 12, 2))
]
FILES: list[Spoil] = [
    patched(f"asyncrl.launch.machine.{name}", value)
    for name, value in {"FILE_LIMIT": 256, "ROLE_FILE_LIMIT": 1024, "HARD_FILE_LIMIT": 1024}.items()
]

# By level and check: what the machine is like, and a pattern of what is said.
FOUND: dict[str, list[tuple[Spoil | list[Spoil], str]]] = {
    "warning: GPUs": [
        (
            [OLD, CUDA13],
            r"lists \(2\): .*driver \(550.54\) supports .* 12.4; .*for CUDA 13.0, or a build of torch .* 12$",
        ),
        ([OLD, CUDA_NONE], "torch lacks CUDA; install a build of torch for CUDA 12"),
        ([OLD, CUDA12, invisible], "Error: .*CUDA_VISIBLE_DEVICES is '-1'"),
        (
            [OLD, CUDA12],
            r"built for CUDA 12.8, and the driver \(550.54\) supports at most CUDA 12.4 .*'not set'",
        ),
        ([OLD, CUDA12, OWN_TORCH], "built for CUDA 12.8"),
        (
            [nvidia_smi("600.1", "12.9", "UMD Version"), CUDA13],
            r"driver \(600.1\) supports at most CUDA 12.9",
        ),
        (
            [nvidia_smi("", ""), CUDA12],
            r"built for CUDA 12.8 \([^)]*\); CUDA_VISIBLE_DEVICES",
        ),  # no "at most"
        ([gpus(4, APART), RANKS], "GPUs 0-1 cannot read.*/dev/shm.*NCCL_P2P_DISABLE=1"),
        ([gpus(4, [(1, 2)]), TP], "GPUs 1-2 .*NCCL_P2P_DISABLE"),
        ([gpus(4, APART), BROADCAST], "GPUs 0-1, 0-2 "),
    ],
    "error: GPUs": [
        ([OLD, CUDA12, ON_GPUS], r"nvidia-smi lists \(2\): .*built for CUDA 12.8"),
        ([OLD, CUDA12, SERVERS], r"nvidia-smi lists \(2\): .*built for CUDA 12.8"),
    ],
    "ok: GPUs": [
        (gpus(1), "CUDA"),
        (gpus(4, APART), "CUDA"),  # one rank, engines in the workers
        ([gpus(4, APART), SERVERS], "CUDA"),  # weights are files
        ([gpus(4, [(2, 3)]), RANKS], "CUDA"),
        ([gpus(4, APART), RANKS, RAY], "CUDA"),  # Ray deals them
    ],
    "error: SGLang": [
        (
            [ENOUGH, sglang(flashinfer="")],
            "cannot start on a GPU: sgl_kernel .* No module .*install sglang==0.5.23",
        ),
        (
            [ENOUGH, sglang(flashinfer="", sgl_kernel="raise ImportError('libcudart.so:\\n no such file')")],
            "sgl_kernel cannot be imported: libcudart.so: no such file; ",
        ),
        (
            [ENOUGH, sglang(sgl_kernel="", flashinfer=""), COLOCATED],
            "cannot start on a GPU: torch_memory_saver .* No module .*install sglang==0.5.23",
        ),
        (python(""), r"sglang is not installed; run .* -m pip install sglang==0\.5\.23"),
    ],
    "warning: SGLang": [
        (sglang("0.6.0"), r"has sglang 0\.6\.0, but the tested version is 0\.5\.23; each server is checked"),
        ([ENOUGH, sglang(sgl_kernel="")], "slower.*flashinfer.*pip install sglang==0.5.23"),
        (python("kill -SEGV $$"), r"\(the interpreter was killed by SIGSEGV\)"),
        (python("echo no module >&2; exit 1"), r"\(no module\)"),
        (python("exec sleep 100", 0.1), r"\(the interpreter did not answer within 0.1 s\)"),
    ],
    "ok: SGLang": [
        ([ENOUGH, sglang(sgl_kernel="", flashinfer="")], "0.5.23"),
        ([ENOUGH, sglang(sgl_kernel="", flashinfer="", torch_memory_saver=""), COLOCATED], "0.5.23"),
        ([ENOUGH, sglang(), {"engine.server_args": {"device": "cpu"}}], "0.5.23"),
        ([ENOUGH, sglang(torch=SEES_NONE)], "0.5.23"),  # it starts on a CPU
        (sglang(torch="raise OSError"), "0.5.23"),  # without GPUs nobody asks for kernels
    ],
    "warning: /dev/shm": [
        (
            shared_memory(SMALL, 0),
            "67.1 MB of 67.1 MB free.*--shm-size=16g or --ipc=host, or set weights.directory",
        ),
        (
            [gpus(1), shared_memory(SMALL, 100 * MIB)],
            "weight versions take 524.3 MB; .*directory=run",
        ),
        ([gpus(2), shared_memory(SMALL, MIB), RANKS], "free, but NCCL needs 1 GB; .*--ipc=host"),
        ([gpus(2), shared_memory(SMALL, 100 * MIB), RANKS], "524.3 MB, and NCCL needs 1 GB;.*directory=run"),
        ([gpus(2), shared_memory(SMALL, MIB), TP], "NCCL needs"),
    ],
    "ok: /dev/shm": [
        ([gpus(0), shared_memory(SMALL, MIB)], "67.1 MB"),  # the demo
        ([gpus(1), shared_memory(SMALL, 100 * MIB), ON_DISK], "67.1 MB"),
        ([gpus(0), shared_memory(SMALL, MIB), RANKS], "67.1 MB"),  # ranks on a CPU
        (
            [gpus(8), shared_memory(64 << 30, 20 << 30), RANKS],
            "68.7 GB free, but the weight versions .*take 107.4 GB",
        ),
    ],
    "error: network": [
        ([*two("eth9"), RANKS], r"NCCL_SOCKET_IFNAME=eth9 .* \(eth0, ib0, eth1 \(down\)\); correct"),
        ([*two("=eth"), RANKS], "NCCL_SOCKET_IFNAME==eth "),
        ([*two("eth1"), RANKS], "NCCL_SOCKET_IFNAME=eth1 does not match any active interface"),
        ([*two("^lo,eth,ib"), RANKS], "does not match any active interface"),
        ([*two("eth9"), TP], "NCCL_SOCKET_IFNAME=eth9"),
    ],
    "warning: network": [
        (
            [*two(), ATTACHED],
            r"wrong interface \(eth0, ib0, .*; export NCCL_SOCKET_IFNAME=NAME .*for the servers",
        ),
        ([*two("eth9"), RAY], "NCCL_SOCKET_IFNAME=eth9 does not match any"),
        ([*two("lo"), RAY], "only the loopback interface is usable .* check NCCL_SOCKET_IFNAME"),
        ([*interfaces("", "-eth0"), RAY], r"only the loopback interface .*\(eth0 \(down\)\)"),
    ],
    "ok: network": [
        (two("eth9"), r"eth0, ib0, eth1 \(down\)"),  # one rank
        ([*two(), RANKS], "eth0"),  # on one machine any will do
        ([*two("eth"), RANKS], "eth0"),  # a beginning of a name
        ([*two("=eth0,ib7"), RANKS], "eth0"),
        ([*two("^lo,eth"), RANKS], "ib0"),
        ([*two("ib0"), ATTACHED], "ib0"),
        ([*one(), ATTACHED], "eth0"),  # NCCL leaves Docker's out
        ([*two(), RAY], "ib0"),  # each process takes that of its machine's address
        ([*interfaces(""), RANKS], "loopback only"),
        ([*interfaces("eth9", "eth0", gpus_there=0), RANKS], "eth0"),  # no NCCL
    ],
    "ok: open files": [
        (
            [*FILES, {"rollout.workers": 100}],
            r"1024 per process of a run \(ulimit -n: 256, hard limit: 1024\)",
        )
    ],
    "warning: open files": [
        (
            [*FILES, {"rollout.workers": 300}],
            ": 256, .* too few for 903 connections to the coordinator; raise the hard",
        )
    ],
    "ok: agent": [
        (
            claude(f"echo '{CLAUDE_CODE.tested} (Claude Code)'"),
            f"claude_code {CLAUDE_CODE.tested} in a sandbox",
        ),
    ],
    "ok: estimate": [
        (
            {"rollout.agent": {"command": {"line": "cat"}}},
            "agent: the model is trained on all requests .* unless rollout.untrained_agents lists them",
        ),
    ],
    "warning: agent": [
        (
            claude("echo 1.0"),
            f"rollout.agent.claude_code: version 1.0 is untested; the tested version is {CLAUDE_CODE.tested}",
        ),
        (
            claude(f"echo {CLAUDE_CODE.tested}", sandbox="none"),
            "can read and write everything that you can .* and use the network",
        ),
        (
            [claude(f"echo {CLAUDE_CODE.tested}"), {"rollout.slots": 10**6}],
            r"1000000 slots .* need 314572.8 GB \(300 MB",
        ),
    ],
    "error: agent": [
        ({"rollout.agent": {"codex": {"program": "/no/codex"}}}, "no such program: '/no/codex'; install"),
        (
            claude("echo no loader >&2; exit 1"),
            "in the sandbox: claude exited with code 1: no loader; set `program` to its path",
        ),
        (claude("exec sleep 100", 0.2), "cannot run in the sandbox: the program did not answer in time"),
        (
            claude("exit 3", sandbox="none"),
            "here: claude exited with code 3: no .* set `program` to its path$",
        ),
    ],
    "error: plug-ins": [
        (
            [claude("exit 0"), {"rollout.reward": "agent"}],
            "rollout.reward is agent, but rollout.agent claude_code returns no score; set another",
        ),
    ],
    "ok: Python": [(PYTHONS[0], "asyncrl"), (PYTHONS[2], "asyncrl")],
    "warning: Python": [(PYTHONS[1], "crashes after some failed writes")],
}


@pytest.mark.parametrize(
    ("expected", "spoils", "text"),
    [(key, *case) for key, cases in FOUND.items() for case in cases],
    ids=[f"{key}: {text}" for key, cases in FOUND.items() for _, text in cases],
)
def test_what_the_machine_lacks_is_said(given: Given, expected: str, spoils: Any, text: str) -> None:
    assert_found(given, expected, spoils, text)


def test_a_driver_that_does_not_answer_has_no_version(given: Given) -> None:
    given.program("nvidia-smi", "exit 9")
    assert gpu_checks.gpu_driver() == ("", "")


CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000


def look_in_a_network_of_its_own(found: Any) -> None:
    """In it the loopback interface is down: a port can be bound, and nobody dials it."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUSER | CLONE_NEWNET):
        found.send("no namespaces here")
        return
    try:
        found.send("".join(note.text for note in machine.check_loopback(Inputs(parse(with_keys())))))
    except ConfigError as error:
        found.send(str(error))


def test_a_machine_that_does_not_reach_itself_is_named() -> None:
    (reached,) = machine.check_loopback(Inputs(parse(with_keys())))
    assert reached == ok("this machine reaches itself at 127.0.0.1")
    forked = multiprocessing.get_context("fork")  # of one thread, as a namespace of users needs
    receiving, sending = forked.Pipe(duplex=False)
    process = forked.Process(target=look_in_a_network_of_its_own, args=(sending,))
    process.start()
    said = receiving.recv()
    process.join()
    if said == "no namespaces here":
        pytest.skip(said)
    assert said == (
        "launch.host: this machine cannot reach itself at 127.0.0.1 (OSError: [Errno 101] Network is "
        "unreachable); bring its loopback interface up: ip link set lo up"
    )
