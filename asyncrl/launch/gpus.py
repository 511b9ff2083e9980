"""Checks of the GPUs of this machine, and of the ways between them: peers, NCCL, network interfaces."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import chain, combinations, product

import psutil

from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError, one_line, recorded
from asyncrl.launch.data import Inputs, Note, check, ok, warning
from asyncrl.launch.estimates import sized
from asyncrl.launch.nodes import is_loopback
from asyncrl.launch.placement import ENGINE, SCORER, TRAINER, dealt
from asyncrl.observe.machine import gpu_driver, list_gpus

INTERFACES = "NCCL_SOCKET_IFNAME"
UNSET = "^docker,lo"  # what NCCL takes where that is not set


@check("GPUs", needs=("libraries",))
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
        own = servers_here(inputs.config) and not inputs.config.engine.server_command  # this Python's
        if own or inputs.config.model.device == "cuda":
            raise ConfigError(text)
        yield warning(text)
    else:
        yield ok("none; the trainer runs on the CPU")


def _why_unusable() -> str:
    """Tells why torch uses none of the GPUs that the driver lists, and what to do about it."""
    from torch import cuda, version

    driver, newest = gpu_driver()
    major = newest.partition(".")[0]
    built = version.cuda
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


def servers_here(config: RunConfig) -> bool:
    engines = config.engine.remote and not config.engine.urls
    started = engines or any(not config.scorers[name].urls for name in config.scorers_used)
    return started and config.launch.kind == "local"


def grouped(config: RunConfig) -> bool:
    """Tell whether processes on GPUs of this machine use NCCL: ranks, parts of a server, or both together."""
    from torch.cuda import is_available

    sizes = [config.engine.tp, *(one.tp for one in config.scorers.values())]
    tp = max(sizes) if servers_here(config) else 1
    return is_available() and (max(config.trainer.ranks, tp) > 1 or config.weights.transport != "disk")


def _check_peers(config: RunConfig, count: int) -> Iterator[Note]:
    """Check that GPUs which exchange tensors can read each other's memory."""
    from torch.cuda import can_device_access_peer

    used = dealt(config, count)
    ranks = sorted({gpu for name in used if name.startswith(TRAINER) for gpu in used[name]})
    servers = [used[name] for name in used if name.startswith((ENGINE, SCORER))]

    across = {*product(ranks, chain(*servers))} if config.weights.transport != "disk" else set()
    within = {pair for group in (ranks, *servers) for pair in combinations(group, 2)}
    apart = {pair for pair in across | within if pair[0] != pair[1] and not can_device_access_peer(*pair)}
    text = f"GPUs {', '.join(f'{a}-{b}' for a, b in sorted(apart))} cannot read each other's memory"

    if apart:
        yield warning(
            f"{text} (nvidia-smi topo -p2p r): NCCL goes through /dev/shm, which is slower; if a run hangs "
            "in its first collective, export NCCL_P2P_DISABLE=1"
        )


@check("NCCL", needs=("libraries",))
def check_nccl(inputs: Inputs) -> Iterator[Note]:
    """Ranks on GPUs, and weights that are broadcast between GPUs, speak NCCL."""
    import torch
    from torch import distributed

    from asyncrl.weights.group import loaded_nccl_version

    if not torch.cuda.is_available():
        yield ok("not needed without GPUs")
    elif distributed.is_available() and distributed.is_nccl_available():
        yield ok(loaded_nccl_version())
    elif inputs.config.trainer.ranks > 1 or inputs.config.weights.transport != "disk":
        raise ConfigError(
            "this torch has no NCCL, which several ranks on GPUs need; install a torch that has it"
        )
    else:
        yield ok("none; one rank, and weights through files, do without")


@check("network", needs=("libraries",))
def check_network(inputs: Inputs) -> Iterator[Note]:
    """Check the interfaces over which processes on GPUs would talk to each other. On Ray, if NCCL's
    variable is not set, they use the one that has the machine's address (`launch.ray.use_interface_of`)."""
    config = inputs.config
    named = os.environ.get(INTERFACES, "")
    stats = psutil.net_if_stats()
    ray = bool(config.launch.ray_address)
    far = config.engine.urls and not is_loopback(config.launch.host)

    others = {name: its for name, its in stats.items() if "loopback" not in its.flags}
    seen = ", ".join(f"{name}{' (down)' * (not its.isup)}" for name, its in others.items()) or "loopback only"
    usable = [name for name, its in stats.items() if its.isup and _means(named or UNSET, name)]

    problem = ""
    if named and not usable:
        problem = f"{INTERFACES}={named} matches none that is up ({seen}); correct it, or unset it"
    elif (ray or far) and all("loopback" in stats[name].flags for name in usable):
        problem = f"only loopback is left ({seen}): other machines cannot be reached; see {INTERFACES}"
    elif far and not named and len(usable) > 1:
        problem = f"NCCL may take any of {seen}; export {INTERFACES}=NAME here and for the servers"

    if not problem or not (ray or grouped(config)):
        yield ok(seen)
    elif named and not (usable or ray):
        raise ConfigError(problem)
    else:
        yield warning(problem)


def _means(named: str, interface: str) -> bool:
    """Tell whether NCCL would use it: by prefix, `eth,ib`; by name, `=eth0`; all but these, `^docker,lo`."""
    names = named.removeprefix("^").removeprefix("=").split(",")
    whole = named.removeprefix("^").startswith("=")
    found = interface in names if whole else interface.startswith(tuple(names))
    return found != named.startswith("^")
