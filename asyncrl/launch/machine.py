"""Checks of the machine, without a model or data. What lies on other machines, on Ray, is not looked at."""

from __future__ import annotations

import fcntl
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import asyncrl
from asyncrl.errors import ConfigError, one_line, recorded
from asyncrl.isolation.child import FILES, HARD_FILES, ROLE_FILES
from asyncrl.launch.data import Inputs, Note, ok, warning
from asyncrl.launch.estimates import sized
from asyncrl.launch.run_directory import creatable, run_directory
from asyncrl.observe.machine import list_gpus
from asyncrl.runtime.imports import quick_imports
from asyncrl.wire.listening import SPARE
from asyncrl.wire.sockets import choose_endpoints

LITTLE_DISK = 1e9  # bytes; a checkpoint of 0.1B parameters takes more
SGLANG_VERSION = "from importlib.metadata import version; print(version('sglang'))"
VERSION_SECONDS = 60.0  # on a busy machine, from a cold disk


def check_python(inputs: Inputs) -> Iterator[Note]:
    yield ok(f"{platform.python_version()} ({sys.executable}), asyncrl {asyncrl.__version__}")


def check_libraries(inputs: Inputs) -> Iterator[Note]:
    """torch and transformers can be imported; a broken installation raises whatever it likes."""
    with recorded() as failure, quick_imports():
        import torch
        import transformers

        import asyncrl.rollout.components  # noqa: F401 (now, without garbage collection)
    if failure:
        raise ConfigError(
            f"torch and transformers cannot be imported ({failure.line}); install asyncrl again"
        )
    yield ok(f"torch {torch.__version__}, transformers {transformers.__version__}")


def check_gpus(inputs: Inputs) -> Iterator[Note]:
    """What torch sees, beside what the driver lists."""
    from torch import cuda, version

    try:
        count = cuda.device_count() if cuda.is_available() else 0
        names = [cuda.get_device_properties(index) for index in range(count)]
    except RuntimeError as error:
        raise ConfigError(f"torch cannot use the GPUs: {one_line(error)}; nvidia-smi may say more") from None
    if names:
        yield ok(f"CUDA {version.cuda}: " + ", ".join(f"{p.name}, {sized(p.total_memory)}" for p in names))
    elif listed := list_gpus():
        built = f"is built for CUDA {version.cuda}" if version.cuda else "is built without CUDA"
        yield warning(
            f"nvidia-smi lists {len(listed)}, and torch, which {built}, can use none; install "
            "a torch that fits the driver"
        )
    else:
        yield ok("none; the trainer runs on the CPU")


def check_nccl(inputs: Inputs) -> Iterator[Note]:
    """Ranks on GPUs, and weights that are broadcast between GPUs, speak NCCL."""
    import torch
    from torch import distributed

    if not torch.cuda.is_available():
        yield ok("not needed without GPUs")
    elif distributed.is_available() and distributed.is_nccl_available():
        yield ok(".".join(map(str, torch.cuda.nccl.version())))  # type: ignore[no-untyped-call]
    elif inputs.config.trainer.ranks > 1 or inputs.config.weights.transport != "disk":
        raise ConfigError(
            "this torch has no NCCL, which several ranks on GPUs need; install a torch that has it"
        )
    else:
        yield ok("none; one rank, and weights through files, do without")


def check_sglang(inputs: Inputs) -> Iterator[Note]:
    """The version of the servers that the run would start; `check_servers` sees that there is a program."""
    engine = inputs.config.engine
    program = engine.server_command[0] if engine.server_command else sys.executable
    if not engine.remote:
        yield ok(f"not used: engine.name is {engine.name}")
    elif engine.urls or inputs.config.launch.kind == "ray":
        yield ok("on other machines, or started already: not looked at here")
    elif not Path(program).name.startswith("python"):
        yield ok(f"{program} is not Python: its version is seen when the server starts")
    else:
        yield _sglang_of(program)


def _sglang_of(program: str) -> Note:
    from asyncrl.engines.sglang.versions import DIALECTS

    command = [program, "-c", SGLANG_VERSION]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=VERSION_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        printed = getattr(error, "stderr", None)  # bytes, or none, at a timeout
        lines = printed.strip().splitlines() if isinstance(printed, str) else []
        said = lines[-1] if lines else one_line(error)
        return warning(f"{program} does not tell its version of sglang ({said}); install it there")
    found, known = done.stdout.strip(), ", ".join(DIALECTS)
    if found not in DIALECTS:
        raise ConfigError(f"{program} has sglang {found}; install one of {known} there")
    return ok(f"{found} ({program})")


def check_ports(inputs: Inputs) -> Iterator[Note]:
    launch = inputs.config.launch
    choose_endpoints(launch.host, launch.port)
    ports = f"{launch.port} to {launch.port + 2}" if launch.port else "free ones (launch.port=0)"
    yield ok(f"{ports} on {launch.host} can be bound")


def check_files(inputs: Inputs) -> Iterator[Note]:
    """Each process has three connections to the coordinator, at most."""
    config = inputs.config
    wanted = 3 * (config.rollout.workers + config.engine.keepers + config.trainer.ranks)
    room = ROLE_FILES - 2 * SPARE
    text = f"{ROLE_FILES} per process of a run (ulimit -n: {FILES}, at most {HARD_FILES})"
    more = f"{text}: {wanted} connections to the coordinator have no room; raise the hard limit"
    yield ok(text) if wanted <= room else warning(more)


def check_shared_memory(inputs: Inputs) -> Iterator[Note]:
    from asyncrl.weights.disk import SHARED_MEMORY

    if SHARED_MEMORY.is_dir():
        usage = shutil.disk_usage(SHARED_MEMORY)
        yield ok(f"{sized(usage.free)} of {sized(usage.total)} free")
    else:
        yield warning(f"{SHARED_MEMORY} is missing: weights go through the run directory, which is slower")


def check_locks(inputs: Inputs) -> Iterator[Note]:
    """A file that is locked cannot be locked again: what keeps two launchers out of one run directory."""
    where = creatable(run_directory(inputs.config), "run_dir")
    with tempfile.NamedTemporaryFile(dir=where, prefix=".asyncrl-") as first, open(first.name) as second:
        try:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"{where}: files cannot be locked ({error.strerror}); set run_dir=… to a local disk"
            ) from None
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield ok(f"hold in {where}")
            return
    raise ConfigError(f"{where}: a locked file can be locked again; set run_dir=… to a local disk")


def check_disk(inputs: Inputs) -> Iterator[Note]:
    where = creatable(run_directory(inputs.config), "run_dir")
    free = shutil.disk_usage(where).free
    text = f"{sized(free)} free in {where}"
    yield ok(text) if free >= LITTLE_DISK else warning(f"{text}; free some, or set run_dir=…")


def check_sandbox(inputs: Inputs) -> Iterator[Note]:
    """Only code that a model has written needs it, and says so itself (`require`, of a tool or reward)."""
    from asyncrl.isolation.sandbox.backends import detect_isolation
    from asyncrl.isolation.sandbox.base import SandboxError

    try:
        found = detect_isolation()
    except SandboxError as error:
        yield warning(f"does not start: {error}; tools and rewards that run code will not work")
        return
    if found.missing:
        lacking = ", ".join(found.missing)
        yield warning(f"cannot isolate {lacking} ({found.notes}); allow namespaces (docs/sandbox.md)")
    else:
        yield ok("isolates " + ", ".join(sorted(found.holds)))
