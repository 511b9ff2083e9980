"""Checks of the machine, without a model or data. What lies on other machines, on Ray, is not looked at."""

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
from asyncrl.isolation.child import FILES, HARD_FILES, ROLE_FILES, describe_exit
from asyncrl.launch.data import Inputs, Note, check, ok, warning
from asyncrl.launch.estimates import sized
from asyncrl.launch.gpus import grouped, servers_here
from asyncrl.launch.run_directory import creatable, run_directory
from asyncrl.observe.machine import list_gpus
from asyncrl.runtime.process import quick_imports
from asyncrl.weights.model_files import published_bytes
from asyncrl.wire.addresses import EVERY_ADDRESS, SPARE, free_ports, own_address
from asyncrl.wire.sockets import choose_endpoints

CRASHES = (3, 12, 0), (3, 12, 2)  # freeing a BytesIO crashes from the first of these, up to the second
LITTLE_DISK = 1e9  # bytes; a checkpoint of 0.1B parameters takes more
LITTLE_SHARED = 1e9  # bytes; NCCL's documentation asks for them, and containers have 64 MiB
KERNELS = ("sgl_kernel", "flashinfer")  # SGLang imports the first on every GPU, and does without the second
SAVER = "torch_memory_saver"  # SGLang needs this, too, for --enable-memory-saver
# Prints the version, and, if torch can use a GPU, which of the named modules cannot be imported.
BROKEN = "cannot be imported:"
ASK_SGLANG = f"""
import sys
from importlib import import_module, metadata
print(metadata.version("sglang"), flush=True)
if sys.argv[1:] and import_module("torch").cuda.is_available():
    for name in sys.argv[1:]:
        try:
            import_module(name)
        except Exception as error:
            print(name, {BROKEN!r}, *str(error).split()[:40])
"""
DIAL_SECONDS = 5.0  # from this machine to itself
VERSION_SECONDS = 60.0  # on a busy machine, from a cold disk


@check("Python")
def check_python(inputs: Inputs) -> Iterator[Note]:
    text = f"{platform.python_version()} ({sys.executable}), asyncrl {asyncrl.__version__}"
    if CRASHES[0] <= sys.version_info[:3] < CRASHES[1]:
        yield warning(f"{text}: it crashes after some failed writes (docs/install.md); take a newer 3.12")
    else:
        yield ok(text)


@check("libraries")
def check_libraries(inputs: Inputs) -> Iterator[Note]:
    """torch and transformers can be imported; a broken installation raises whatever it likes. A start defers
    torch, and leaves a broken one to the roles."""
    with recorded() as failure, quick_imports():
        import torch  # noqa: F401
        import transformers

        torch_version = version("torch")
        import asyncrl.episodes.parts  # noqa: F401 (now, without garbage collection)

    if failure:
        raise ConfigError(
            f"torch and transformers cannot be imported ({failure.line}); install asyncrl again"
        )
    yield ok(f"torch {torch_version}, transformers {transformers.__version__}")


@check("SGLang")
def check_sglang(inputs: Inputs) -> Iterator[Note]:
    """Check the version of the servers that the run would start, and with GPUs their kernels. Whether their
    program exists is left to `check_servers`."""
    engine = inputs.config.engine
    program = engine.server_command[0] if engine.server_command else sys.executable
    if not (engine.remote or inputs.config.scorers):
        yield ok(f"not used: engine.name is {engine.name}")
    elif not servers_here(inputs.config):
        yield ok("on other machines, or started already: not looked at here")
    elif not Path(program).name.startswith("python"):
        yield ok(f"{program} is not Python: its version is seen when the server starts")
    else:
        on_gpu = engine.server_args.get("device", "cuda") == "cuda" and bool(list_gpus())
        sleeps = inputs.config.shifts and engine.remote
        yield from _sglang_of(program, [*KERNELS, *[SAVER] * sleeps] if on_gpu else [])


def _sglang_of(program: str, needed: list[str]) -> Iterator[Note]:
    from asyncrl.engines.sglang.http import PROTOCOLS

    command = [program, "-c", ASK_SGLANG, *needed]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=VERSION_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        yield warning(f"{program}: no version of sglang could be read ({_said(error)}); install it there")
        return

    found, *lines = done.stdout.strip().splitlines() or ["none"]
    known = ", ".join(PROTOCOLS)
    advice = f"{program} -m pip install sglang=={found}"
    if found not in PROTOCOLS:
        raise ConfigError(f"{program} has sglang {found}; install one of {known} there")

    for line in (line for line in lines if BROKEN in line):
        if line.startswith((KERNELS[0], SAVER)):
            raise ConfigError(f"sglang {found} cannot start on a GPU: {line}; {advice}")
        yield warning(f"sglang {found} is slower than it could be: {line}; {advice}")

    yield ok(f"{found} ({program})")


def _said(error: Exception) -> str:
    """Returns what a program said at last, or how it ended: its error would quote the whole command."""
    if isinstance(error, subprocess.TimeoutExpired):
        return f"no answer within {error.timeout:g} s"
    if isinstance(error, subprocess.CalledProcessError):
        return (error.stderr.strip().splitlines() or [f"it {describe_exit(error.returncode)}"])[-1]
    return one_line(error)


@check("ports")
def check_ports(inputs: Inputs) -> Iterator[Note]:
    launch = inputs.config.launch
    choose_endpoints(launch.host, launch.port)
    ports = f"{launch.port} to {launch.port + 2}" if launch.port else "free ones (launch.port=0)"
    yield ok(f"{ports} on {launch.host} can be bound")


@check("loopback")
def check_loopback(inputs: Inputs) -> Iterator[Note]:
    """The processes of a run dial this machine by its own address. Where its loopback interface is missing or
    down, as in some sandboxes, a port can be bound and nobody reaches it."""
    host = inputs.config.launch.host
    address = own_address() if host == EVERY_ADDRESS else host
    text = f"launch.host: this machine does not reach itself at {address}"
    advice = "bring its loopback interface up: ip link set lo up"

    (port,) = free_ports(address, 0, 1)
    with (
        ConfigError.instead_of(OSError, text=text, advice=advice),
        socket.create_server((address, port)),
        socket.create_connection((address, port), timeout=DIAL_SECONDS),
    ):
        yield ok(f"this machine reaches itself at {address}")


@check("open files")
def check_files(inputs: Inputs) -> Iterator[Note]:
    """Each process has three connections to the coordinator, at most."""
    config = inputs.config
    keepers = config.engine.keepers + len(config.scorer_places)
    wanted = 3 * (config.rollout.workers + keepers + config.trainer.ranks)
    room = ROLE_FILES - 2 * SPARE

    text = f"{ROLE_FILES} per process of a run (ulimit -n: {FILES}, at most {HARD_FILES})"
    more = f"{text}: {wanted} connections to the coordinator have no room; raise the hard limit"
    yield ok(text) if wanted <= room else warning(more)


@check("/dev/shm")
def check_shared_memory(inputs: Inputs) -> Iterator[Note]:
    """Check that /dev/shm has room for NCCL, and for the weights if they go there."""
    from asyncrl.weights.disk import SHARED_MEMORY, space_needed

    if not SHARED_MEMORY.is_dir():
        yield warning(f"{SHARED_MEMORY} is missing: weights go through the run directory, which is slower")
        return

    config = inputs.config
    weights = inputs.config.weights
    usage = shutil.disk_usage(SHARED_MEMORY)
    needed = space_needed(config, published_bytes(config))
    here = weights.transport == "disk" and weights.directory in ("auto", "shm")
    little = usage.total < LITTLE_SHARED

    text = f"{sized(usage.free)} of {sized(usage.total)} free"
    lacking = here and (needed > usage.free or (little and not needed))
    nccl = little and grouped(config)
    text += f", and the versions of the weights take {sized(needed) if needed else 'more'}" * lacking
    text += ", and NCCL wants 1 GB" * nccl

    if little and (lacking or nccl):
        elsewhere = "; or weights.directory=run, or a path on a fast disk" * lacking
        yield warning(f"{text}; in a container: docker run --shm-size=16g, or --ipc=host{elsewhere}")
    else:
        yield ok(text)


@check("file locks")
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


@check("disk")
def check_disk(inputs: Inputs) -> Iterator[Note]:
    where = creatable(run_directory(inputs.config), "run_dir")
    free = shutil.disk_usage(where).free
    text = f"{sized(free)} free in {where}"
    yield ok(text) if free >= LITTLE_DISK else warning(f"{text}; free some, or set run_dir=…")


@check("agent", needs=("tasks",))
def check_agent(inputs: Inputs) -> Iterator[Note]:
    """Check that a program that leads episodes can be run as they run it, that its version was tested, and
    that there is memory for as many as run at once."""
    agent = inputs.parts.agent
    rollout = inputs.config.rollout
    if not isinstance(agent, Command):
        return

    harness = agent.harness
    found = inputs.agent_version.get(agent.harness.name, "")
    where = f"rollout.agent.{harness.name}"

    if harness.tested not in ("", found):
        yield warning(f"{where}: version {found or 'unknown'} was not tried; {harness.tested} was")
    if agent.sandbox == "none":
        yield warning(
            f"{where}: with sandbox: none the model can read and write all that you can, such as files in "
            f"{os.path.expanduser('~')}, and use the network"
        )

    slots = rollout.workers * rollout.slots
    needed = slots * harness.resident_mb * 2**20
    memory = psutil.virtual_memory().total
    if needed > memory and inputs.config.launch.kind == "local":
        yield warning(
            f"{slots} slots (rollout.workers * rollout.slots) of {harness.name} take {sized(needed)}, "
            f"{harness.resident_mb} MB each, and this machine has {sized(memory)}; lower rollout.slots"
        )

    inside = "in a sandbox" if agent.sandbox == "jail" else "without a sandbox"
    yield ok(" ".join(filter(None, (harness.name, found, inside))))


@check("sandbox")
def check_sandbox(inputs: Inputs) -> Iterator[Note]:
    """Only code that a model has written needs it, and says so itself (`require`, of a tool or reward)."""
    from asyncrl.isolation.sandbox.base import SandboxError
    from asyncrl.isolation.sandbox.detection import detect_isolation

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


@check("images")
def check_images(inputs: Inputs) -> Iterator[Note]:
    """Only tasks, and tools with an image, need them, and say so themselves."""
    from asyncrl.isolation.images import images_directory, list_images
    from asyncrl.isolation.sandbox.detection import detect_images

    there = f"{len(list_images())} in {images_directory()}"
    if why := detect_images():
        release = os.uname().release
        yield warning(f"{there}; {why}; needed: namespaces and Linux 6.6 (this is {release})")
    else:
        yield ok(f"{there}; sandboxes can have one")
