"""Checks the machine, without a model or data. On Ray, other machines are not checked."""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import psutil

import asyncrl
from asyncrl.errors import ConfigError, one_line, recorded
from asyncrl.gateway import Command
from asyncrl.isolation.child import FILE_LIMIT, HARD_FILE_LIMIT, ROLE_FILE_LIMIT, describe_exit
from asyncrl.launch.estimates import format_bytes
from asyncrl.launch.gpus import starts_local_servers, uses_nccl
from asyncrl.launch.inputs import Inputs
from asyncrl.launch.notes import Note, ok, preflight_check, warning
from asyncrl.launch.run_directory import check_creatable, run_directory
from asyncrl.observe.machine import list_gpus
from asyncrl.runtime.process import quick_imports
from asyncrl.weights.model_files import read_json
from asyncrl.weights.trained_tensors import published_bytes
from asyncrl.wire.addresses import EVERY_ADDRESS, SPARE_DESCRIPTORS, own_address, reserve_ports

# Freeing a BytesIO crashes in Python versions from the first, up to but without the second.
CRASHING_PYTHONS = (
    (3, 12, 0),
    (3, 12, 2),
)
LOW_DISK_BYTES = 1e9  # A checkpoint of 0.1B parameters takes more.
LOW_SHARED_BYTES = 1e9  # NCCL's documentation asks for this much; containers have 64 MiB.
# SGLang imports the first module on every GPU, and can do without the second.
SGLANG_KERNELS = (
    "sgl_kernel",
    "flashinfer",
)
MEMORY_SAVER = "torch_memory_saver"  # Module that SGLang needs for --enable-memory-saver.
IMPORT_FAILURE = "cannot be imported:"
# Program that prints SGLang's version, and, on a GPU, which of the named modules cannot be imported.
MISSING_CLASS = "has no file with the class"  # in a line of the script about SGLang's models
SGLANG_PROBE = f"""
import sys
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
print(metadata.version("sglang"), flush=True)
model_class = sys.argv.pop(1)
package = find_spec("sglang")
sources = list(Path(package.origin).parent.glob("srt/models/**/*.py")) if package and package.origin else []
if model_class and sources and not any(f"class {{model_class}}(" in file.read_text() for file in sources):
    print({MISSING_CLASS!r}, model_class)
if sys.argv[1:] and import_module("torch").cuda.is_available():
    for name in sys.argv[1:]:
        try:
            import_module(name)
        except Exception as error:
            print(name, {IMPORT_FAILURE!r}, *str(error).split()[:40])
"""
DIAL_TIMEOUT = 5.0  # seconds for a connection from this machine to itself
VERSION_TIMEOUT = 60.0  # seconds; enough for a busy machine with a cold disk


@preflight_check("Python")
def check_python(inputs: Inputs) -> Iterator[Note]:
    text = f"{platform.python_version()} ({sys.executable}), asyncrl {asyncrl.__version__}"
    if CRASHING_PYTHONS[0] <= sys.version_info[:3] < CRASHING_PYTHONS[1]:
        yield warning(
            f"{text}: this version crashes after some failed writes (see docs/start/install.md); "
            "use a newer release of Python 3.12"
        )
    else:
        yield ok(text)


@preflight_check("libraries")
def check_libraries(inputs: Inputs) -> Iterator[Note]:
    """Check that torch and transformers can be imported; a broken installation raises any exception. A start
    defers torch, so a broken torch is found by the roles."""
    with recorded() as failure, quick_imports():
        import torch  # noqa: F401
        import transformers

        torch_version = version("torch")
        import asyncrl.episodes.parts  # noqa: F401 (now, without garbage collection)

    if failure:
        raise ConfigError(f"torch and transformers cannot be imported ({failure.line}); reinstall asyncrl")
    yield ok(f"torch {torch_version}, transformers {transformers.__version__}")


@preflight_check("SGLang")
def check_sglang(inputs: Inputs) -> Iterator[Note]:
    """Check the version of SGLang that the run would start, and on GPUs its kernels. `check_servers` checks
    whether the program exists."""
    from asyncrl.engines.sglang.version_check import TESTED_VERSION

    config = inputs.config
    engine = config.engine
    program = engine.server_command[0] if engine.server_command else sys.executable
    if not (engine.remote or config.scorers):
        yield ok(f"not used: engine.name is {engine.name}")
        return
    if not starts_local_servers(config):
        yield ok("not checked: the servers run on other machines or are already running")
        return
    if not Path(program).name.startswith("python"):
        yield ok(
            f"{program} is not a Python interpreter; the SGLang version is checked when the server starts"
        )
        return

    needed_modules: list[str] = []
    if engine.server_args.get("device", "cuda") == "cuda" and list_gpus():
        needed_modules += SGLANG_KERNELS
        if config.shifts and engine.remote:  # engines sleep
            needed_modules.append(MEMORY_SAVER)

    settings_file = Path(config.model.path) / "config.json"
    settings = read_json(settings_file) if engine.remote and settings_file.is_file() else {}
    model_class = str((settings.get("architectures") or [""])[0])
    command = [program, "-c", SGLANG_PROBE, model_class, *needed_modules]
    try:
        completed = subprocess.run(
            command, capture_output=True, text=True, timeout=VERSION_TIMEOUT, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        # The texts of subprocess's exceptions would quote the whole command.
        reason = one_line(error)
        if isinstance(error, subprocess.TimeoutExpired):
            reason = f"the interpreter did not answer within {error.timeout:g} s"
        elif isinstance(error, subprocess.CalledProcessError):
            reason = (
                error.stderr.strip().splitlines() or [f"the interpreter {describe_exit(error.returncode)}"]
            )[-1]
        yield warning(
            f"{program}: cannot read sglang's version ({reason}); install sglang for this interpreter"
        )
        return

    if not completed.stdout.strip():
        raise ConfigError(
            f"{program}: sglang is not installed; run {program} -m pip install sglang=={TESTED_VERSION}"
        )

    sglang_version, *module_lines = completed.stdout.strip().splitlines()
    advice = f"run {program} -m pip install sglang=={sglang_version}"
    if sglang_version != TESTED_VERSION:
        yield warning(
            f"{program} has sglang {sglang_version}, but the tested version is {TESTED_VERSION}; each server "
            "is checked when it starts, and rejected if it lacks a feature that the run needs"
        )

    if any(line.startswith(MISSING_CLASS) for line in module_lines):
        yield warning(
            f"sglang {sglang_version} lacks the model class {model_class} (model.path), so a server may not "
            "start, or may run the model through transformers; install a version of sglang with this class"
        )

    for line in (line for line in module_lines if IMPORT_FAILURE in line):
        if line.startswith((SGLANG_KERNELS[0], MEMORY_SAVER)):
            raise ConfigError(f"sglang {sglang_version} cannot start on a GPU: {line}; {advice}")
        yield warning(f"sglang {sglang_version} is slower than it could be: {line}; {advice}")

    yield ok(f"{sglang_version} ({program})")


@preflight_check("ports")
def check_ports(inputs: Inputs) -> Iterator[Note]:
    launch = inputs.config.launch
    for reserved_socket in reserve_ports(launch.host, launch.port, 3):
        reserved_socket.close()
    ports_text = f"{launch.port} to {launch.port + 2}" if launch.port else "free ports (launch.port=0)"
    yield ok(f"{ports_text} on {launch.host} are available")


@preflight_check("loopback")
def check_loopback(inputs: Inputs) -> Iterator[Note]:
    """Check that this machine reaches its own address, which the processes of a run dial. If the loopback
    interface is missing or down, as in some sandboxes, a port can be bound but nobody can connect."""
    host = inputs.config.launch.host
    address = own_address() if host == EVERY_ADDRESS else host
    text = f"launch.host: this machine cannot reach itself at {address}"
    advice = "bring its loopback interface up: ip link set lo up"

    (reserved_socket,) = reserve_ports(address, 0, 1)
    with (
        reserved_socket,
        ConfigError.instead_of(OSError, text=text, advice=advice),
        socket.create_server(reserved_socket.getsockname()),
        socket.create_connection(reserved_socket.getsockname(), timeout=DIAL_TIMEOUT),
    ):
        yield ok(f"this machine reaches itself at {address}")


@preflight_check("open files")
def check_open_files(inputs: Inputs) -> Iterator[Note]:
    """Check the limit of open files. Each process has at most three connections to the coordinator."""
    config = inputs.config
    supervisor_count = config.engine.server_count + len(config.scorer_places)
    wanted_connections = 3 * (config.rollout.workers + supervisor_count + config.trainer.ranks)
    free_files = ROLE_FILE_LIMIT - 2 * SPARE_DESCRIPTORS

    text = f"{ROLE_FILE_LIMIT} per process of a run (ulimit -n: {FILE_LIMIT}, hard limit: {HARD_FILE_LIMIT})"
    shortage_text = (
        f"{text}, too few for {wanted_connections} connections to the coordinator; raise the hard limit"
    )
    yield ok(text) if wanted_connections <= free_files else warning(shortage_text)


@preflight_check("/dev/shm")
def check_shared_memory(inputs: Inputs) -> Iterator[Note]:
    """Check that /dev/shm has room for NCCL, and for the weights if they are published there."""
    from asyncrl.weights.disk import SHARED_MEMORY, space_needed

    if not SHARED_MEMORY.is_dir():
        yield warning(f"{SHARED_MEMORY} is missing, so weights go through the run directory, which is slower")
        return

    config = inputs.config
    weights = inputs.config.weights
    usage = shutil.disk_usage(SHARED_MEMORY)
    needed_bytes = space_needed(config, published_bytes(config))
    uses_shared_memory = weights.transport == "disk" and weights.directory in ("auto", "shm")
    is_small = usage.total < LOW_SHARED_BYTES

    text = f"{format_bytes(usage.free)} of {format_bytes(usage.total)} free"
    lacks_room = uses_shared_memory and (needed_bytes > usage.free or (is_small and not needed_bytes))
    nccl_lacks_room = is_small and uses_nccl(config)
    if lacks_room:
        size_text = format_bytes(needed_bytes) if needed_bytes else "more"
        text += f", but the weight versions take {size_text}"
    if nccl_lacks_room:
        text += ", and NCCL needs 1 GB" if lacks_room else ", but NCCL needs 1 GB"

    if is_small and (lacks_room or nccl_lacks_room):
        advice = ", or set weights.directory=run or a path on a fast disk" if lacks_room else ""
        yield warning(f"{text}; in a container, use docker run --shm-size=16g or --ipc=host{advice}")
    else:
        yield ok(text)


@preflight_check("file locks")
def check_locks(inputs: Inputs) -> Iterator[Note]:
    """Check that a locked file cannot be locked again: such a lock keeps two launchers out of one run
    directory."""
    directory = check_creatable(run_directory(inputs.config), "run_dir")
    with (
        tempfile.NamedTemporaryFile(dir=directory, prefix=".asyncrl-") as locked_file,
        open(locked_file.name) as second_handle,
    ):
        try:
            fcntl.flock(locked_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"{directory}: files cannot be locked ({error.strerror}); set run_dir to a directory on a "
                "local disk"
            ) from None

        try:
            fcntl.flock(second_handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield ok(f"work in {directory}")
            return

    raise ConfigError(
        f"{directory}: a locked file can be locked a second time; set run_dir to a directory on a local disk"
    )


@preflight_check("disk")
def check_disk(inputs: Inputs) -> Iterator[Note]:
    directory = check_creatable(run_directory(inputs.config), "run_dir")
    free_bytes = shutil.disk_usage(directory).free
    text = f"{format_bytes(free_bytes)} free in {directory}"
    yield ok(text) if free_bytes >= LOW_DISK_BYTES else warning(f"{text}; free some space, or set run_dir=…")


@preflight_check("agent", requires=("tasks",))
def check_agent(inputs: Inputs) -> Iterator[Note]:
    """Check that a program that leads episodes runs as episodes run it, that its version was tested, and that
    the memory suffices for all that run at once."""
    agent = inputs.parts.agent
    rollout = inputs.config.rollout
    if not isinstance(agent, Command):
        return

    harness = agent.harness
    agent_version = inputs.agent_versions.get(agent.harness.name, "")
    agent_key = f"rollout.agent.{harness.name}"

    if harness.tested not in ("", agent_version):
        yield warning(
            f"{agent_key}: version {agent_version or 'unknown'} is untested; the tested version is "
            f"{harness.tested}"
        )
    if agent.sandbox == "none":
        yield warning(
            f"{agent_key}: with `sandbox: none`, the model can read and write everything that you can (such "
            f"as files in {os.path.expanduser('~')}) and use the network"
        )

    slot_count = rollout.workers * rollout.slots
    needed_bytes = slot_count * harness.resident_mb * 2**20
    memory_bytes = psutil.virtual_memory().total
    if needed_bytes > memory_bytes and inputs.config.launch.kind == "local":
        yield warning(
            f"{slot_count} slots (rollout.workers * rollout.slots) of {harness.name} need "
            f"{format_bytes(needed_bytes)} ({harness.resident_mb} MB each), but this machine has "
            f"{format_bytes(memory_bytes)}; lower rollout.slots"
        )

    isolation_text = "in a sandbox" if agent.sandbox == "jail" else "without a sandbox"
    yield ok(" ".join(filter(None, (harness.name, agent_version, isolation_text))))


@preflight_check("sandbox")
def check_sandbox(inputs: Inputs) -> Iterator[Note]:
    """Check the isolation of sandboxes. Only code that a model has written needs a sandbox; a tool or reward
    that requires one checks that itself (`require`)."""
    from asyncrl.isolation.sandbox.base import SandboxError
    from asyncrl.isolation.sandbox.detection import detect_isolation

    try:
        isolation = detect_isolation()
    except SandboxError as error:
        yield warning(f"does not start: {error}; tools and rewards that run code will not work")
        return

    if isolation.missing:
        missing_text = ", ".join(isolation.missing)
        yield warning(
            f"cannot isolate {missing_text} ({isolation.notes}); allow namespaces (docs/guides/tasks.md)"
        )
    else:
        yield ok("isolates " + ", ".join(sorted(isolation.enforced)))


@preflight_check("images")
def check_images(inputs: Inputs) -> Iterator[Note]:
    """Check that sandboxes can start from images. Tasks, and tools with an image, check their own images."""
    from asyncrl.isolation.images import images_directory, list_images
    from asyncrl.isolation.sandbox.detection import detect_images

    images_text = f"{len(list_images())} in {images_directory()}"
    if obstacle := detect_images():
        yield warning(
            f"{images_text}; {obstacle}; images need namespaces and Linux 6.6 or later (this is "
            f"{os.uname().release})"
        )
    else:
        yield ok(f"{images_text}; sandboxes can use them")
