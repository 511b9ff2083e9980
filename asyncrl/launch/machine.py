"""Checks of the machine, without a model or data. What lies on other machines, on Ray, is not looked at."""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from itertools import chain, combinations, product
from pathlib import Path

import psutil

import asyncrl
from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError, one_line, recorded
from asyncrl.isolation.child import FILES, HARD_FILES, ROLE_FILES, describe_exit
from asyncrl.launch.data import Inputs, Note, ok, warning
from asyncrl.launch.estimates import sized
from asyncrl.launch.nodes import is_loopback
from asyncrl.launch.placement import ENGINE, TRAINER, dealt
from asyncrl.launch.run_directory import creatable, run_directory
from asyncrl.observe.machine import gpu_driver, list_gpus
from asyncrl.runtime.imports import quick_imports
from asyncrl.weights.model_files import weight_bytes
from asyncrl.wire.listening import SPARE
from asyncrl.wire.sockets import choose_endpoints

CRASHES = (3, 12, 0), (3, 12, 2)  # freeing a BytesIO crashes from the first of these, up to the second
LITTLE_DISK = 1e9  # bytes; a checkpoint of 0.1B parameters takes more
INTERFACES = "NCCL_SOCKET_IFNAME"
UNSET = "^docker,lo"  # what NCCL takes where that is not set
LITTLE_SHARED = 1e9  # bytes; NCCL's documentation asks for them, and containers have 64 MiB
KERNELS = ("sgl_kernel", "flashinfer")  # SGLang imports the first on every GPU, and does without the second
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
VERSION_SECONDS = 60.0  # on a busy machine, from a cold disk


def check_python(inputs: Inputs) -> Iterator[Note]:
    text = f"{platform.python_version()} ({sys.executable}), asyncrl {asyncrl.__version__}"
    if CRASHES[0] <= sys.version_info[:3] < CRASHES[1]:
        yield warning(f"{text}: it crashes after some failed writes (docs/install.md); take a newer 3.12")
    else:
        yield ok(text)


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


def check_gpus(inputs: Inputs) -> Iterator[Note]:
    """Compare the GPUs that torch sees with those that the driver lists."""
    from torch import cuda, version

    try:
        count = cuda.device_count() if cuda.is_available() else 0
        names = [cuda.get_device_properties(index) for index in range(count)]
    except RuntimeError as error:
        raise ConfigError(f"torch cannot use the GPUs: {one_line(error)}; nvidia-smi may say more") from None
    if names:
        yield ok(f"CUDA {version.cuda}: " + ", ".join(f"{p.name}, {sized(p.total_memory)}" for p in names))
        if inputs.config.launch.kind == "local":  # Ray deals GPUs itself
            yield from _check_peers(inputs.config, count)
    elif listed := list_gpus():
        text = f"nvidia-smi lists {len(listed)} GPUs, but torch can use none: {_why_unusable()}"
        own = _servers_here(inputs.config) and not inputs.config.engine.server_command  # this Python's
        if own or inputs.config.model.device == "cuda":
            raise ConfigError(text)
        yield warning(text)
    else:
        yield ok("none; the trainer runs on the CPU")


def _why_unusable() -> str:
    """Why torch uses none of the GPUs that the driver lists, and what to do about it."""
    from torch import cuda, version

    driver, newest = gpu_driver()
    major, built = newest.partition(".")[0], version.cuda
    fitting = f"a torch that is built for CUDA {major or 'of the driver'}"
    if not built:
        return f"it is built without CUDA; install {fitting}"
    both = f"it is built for CUDA {built}"
    both += f", and the driver ({driver}) runs CUDA {newest} at most" * bool(newest)
    if major and int(major) < int(built.partition(".")[0]):
        return f"{both}; install a driver for CUDA {built}, or {fitting}"
    with recorded() as failure:
        cuda.init()  # type: ignore[no-untyped-call]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
    return f"{both} ({failure.line}); CUDA_VISIBLE_DEVICES is {visible!r}"


def _servers_here(config: RunConfig) -> bool:
    return config.engine.remote and not config.engine.urls and config.launch.kind == "local"


def _grouped(config: RunConfig) -> bool:
    """Whether processes on GPUs of this machine use NCCL: ranks, parts of a server, or both together."""
    from torch.cuda import is_available

    tp = config.engine.tp if _servers_here(config) else 1
    return is_available() and (max(config.trainer.ranks, tp) > 1 or config.weights.transport != "disk")


def _check_peers(config: RunConfig, count: int) -> Iterator[Note]:
    """Check that GPUs which exchange tensors can read each other's memory."""
    from torch.cuda import can_device_access_peer

    used = dealt(config, count)
    ranks = sorted({gpu for name in used if name.startswith(TRAINER) for gpu in used[name]})
    servers = [used[name] for name in used if name.startswith(ENGINE)]
    across = {*product(ranks, chain(*servers))} if config.weights.transport != "disk" else set()
    within = {pair for group in (ranks, *servers) for pair in combinations(group, 2)}
    apart = {pair for pair in across | within if pair[0] != pair[1] and not can_device_access_peer(*pair)}
    text = f"GPUs {', '.join(f'{a}-{b}' for a, b in sorted(apart))} cannot read each other's memory"
    if config.weights.transport == "ipc" and apart.intersection(across):
        raise ConfigError(
            f"{text}, as weights.transport=ipc needs between ranks and servers; set it to collective or disk"
        )
    if apart:
        yield warning(
            f"{text} (nvidia-smi topo -p2p r): NCCL goes through /dev/shm, which is slower; if a run hangs "
            "in its first collective, export NCCL_P2P_DISABLE=1"
        )


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


def check_network(inputs: Inputs) -> Iterator[Note]:
    """Check the interfaces over which processes on GPUs would talk to each other. On Ray, if NCCL's
    variable is not set, they use the one that has the machine's address (`launch.ray.use_interface_of`)."""
    config, named, stats = inputs.config, os.environ.get(INTERFACES, ""), psutil.net_if_stats()
    ray, far = bool(config.launch.ray_address), config.engine.urls and not is_loopback(config.launch.host)
    others = {name: its for name, its in stats.items() if "loopback" not in its.flags}
    seen = ", ".join(f"{name}{' (down)' * (not its.isup)}" for name, its in others.items()) or "loopback only"
    usable = [name for name, its in stats.items() if its.isup and _means(named or UNSET, name)]
    problem = ""
    if named and not usable:
        problem = f"{INTERFACES}={named} matches none that is up of {seen}; correct it, or unset it"
    elif (ray or far) and all("loopback" in stats[name].flags for name in usable):
        problem = f"only loopback is left of {seen}: other machines cannot be reached; see {INTERFACES}"
    elif far and not named and len(usable) > 1:
        problem = f"NCCL may take any of {seen}; export {INTERFACES}=NAME here and for the servers"
    if not problem or not (ray or _grouped(config)):
        yield ok(seen)
    elif named and not (usable or ray):
        raise ConfigError(problem)
    else:
        yield warning(problem)


def _means(named: str, interface: str) -> bool:
    """Whether NCCL would use it: by prefixes, `eth,ib`; by name, `=eth0`; all but these, `^docker,lo`."""
    names = named.removeprefix("^").removeprefix("=").split(",")
    whole = named.removeprefix("^").startswith("=")
    found = interface in names if whole else interface.startswith(tuple(names))
    return found != named.startswith("^")


def check_sglang(inputs: Inputs) -> Iterator[Note]:
    """Check the version of the servers that the run would start, and with GPUs their kernels. Whether their
    program exists is left to `check_servers`."""
    engine = inputs.config.engine
    program = engine.server_command[0] if engine.server_command else sys.executable
    if not engine.remote:
        yield ok(f"not used: engine.name is {engine.name}")
    elif not _servers_here(inputs.config):
        yield ok("on other machines, or started already: not looked at here")
    elif not Path(program).name.startswith("python"):
        yield ok(f"{program} is not Python: its version is seen when the server starts")
    else:
        on_gpu = engine.server_args.get("device", "cuda") == "cuda" and bool(list_gpus())
        yield from _sglang_of(program, on_gpu)


def _sglang_of(program: str, on_gpu: bool) -> Iterator[Note]:
    from asyncrl.engines.sglang.versions import DIALECTS

    command = [program, "-c", ASK_SGLANG, *KERNELS * on_gpu]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=VERSION_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        yield warning(f"{program}: no version of sglang could be read ({_said(error)}); install it there")
        return
    found, *lines = done.stdout.strip().splitlines() or ["none"]
    known, advice = ", ".join(DIALECTS), f"{program} -m pip install sglang=={found}"
    if found not in DIALECTS:
        raise ConfigError(f"{program} has sglang {found}; install one of {known} there")
    for line in (line for line in lines if BROKEN in line):
        if line.startswith(KERNELS[0]):
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
    """Check that /dev/shm has room for NCCL, and for the weights if they go there."""
    from asyncrl.weights.disk import SHARED_MEMORY, bytes_needed

    if not SHARED_MEMORY.is_dir():
        yield warning(f"{SHARED_MEMORY} is missing: weights go through the run directory, which is slower")
        return
    config, weights = inputs.config, inputs.config.weights
    usage = shutil.disk_usage(SHARED_MEMORY)
    needed = bytes_needed(weight_bytes(config.model.path), weights.full_every > 1, config.engine.keepers)
    here = weights.transport == "disk" and weights.directory in ("auto", "shm")
    little, text = usage.total < LITTLE_SHARED, f"{sized(usage.free)} of {sized(usage.total)} free"
    lacking, nccl = here and (needed > usage.free or (little and not needed)), little and _grouped(config)
    text += f", and the versions of the weights take {sized(needed) if needed else 'more'}" * lacking
    text += ", and NCCL wants 1 GB" * nccl
    if little and (lacking or nccl):
        elsewhere = "; or weights.directory=run, or a path on a fast disk" * lacking
        yield warning(f"{text}; in a container: docker run --shm-size=16g, or --ipc=host{elsewhere}")
    else:
        yield ok(text)


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
