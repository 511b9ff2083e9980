"""Checks the GPUs of this machine, and the connections between them: peers, NCCL, network interfaces."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import chain, combinations, product

import psutil

from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError, one_line, recorded
from asyncrl.launch.estimates import format_bytes
from asyncrl.launch.inputs import Inputs
from asyncrl.launch.nodes import is_loopback
from asyncrl.launch.notes import Note, ok, preflight_check, warning
from asyncrl.launch.placement import ENGINE, SCORER, TRAINER, assign_gpus
from asyncrl.observe.machine import gpu_driver, list_gpus

INTERFACE_VARIABLE = "NCCL_SOCKET_IFNAME"
DEFAULT_INTERFACES = "^docker,lo"  # NCCL's own default.


@preflight_check("GPUs", requires=("libraries",))
def check_gpus(inputs: Inputs) -> Iterator[Note]:
    """Compare the GPUs that torch sees with the GPUs that the driver lists."""
    from torch import cuda, version

    try:
        gpu_count = cuda.device_count() if cuda.is_available() else 0
        gpu_properties = [cuda.get_device_properties(index) for index in range(gpu_count)]
    except RuntimeError as error:
        raise ConfigError(
            f"torch cannot use the GPUs: {one_line(error)}; see the output of nvidia-smi"
        ) from None

    if gpu_properties:
        yield ok(
            f"CUDA {version.cuda}: "
            + ", ".join(f"{gpu.name}, {format_bytes(gpu.total_memory)}" for gpu in gpu_properties)
        )
        if inputs.config.launch.kind == "local":  # Ray assigns GPUs itself
            yield from _check_peers(inputs.config, gpu_count)
    elif driver_gpus := list_gpus():
        unusable_text = (
            f"torch cannot use any of the GPUs that nvidia-smi lists ({len(driver_gpus)}): "
            f"{_explain_unusable_gpus()}"
        )
        # Servers without server_command use the torch of this Python.
        needs_gpu = starts_local_servers(inputs.config) and not inputs.config.engine.server_command
        if needs_gpu or inputs.config.model.device == "cuda":
            raise ConfigError(unusable_text)
        yield warning(unusable_text)
    else:
        yield ok("none; the trainer runs on the CPU")


def _explain_unusable_gpus() -> str:
    """Explain why torch uses none of the GPUs that the driver lists, and how to correct this."""
    from torch import cuda, version

    driver, newest_cuda = gpu_driver()
    newest_major = newest_cuda.partition(".")[0]
    built_cuda = version.cuda
    cuda_text = f"CUDA {newest_major}" if newest_major else "the driver's CUDA version"
    fitting_torch = f"a build of torch for {cuda_text}"

    if not built_cuda:
        return f"this build of torch lacks CUDA; install {fitting_torch}"

    versions_text = f"torch was built for CUDA {built_cuda}"
    if newest_cuda:
        versions_text += f", and the driver ({driver}) supports at most CUDA {newest_cuda}"
    if newest_major and int(newest_major) < int(built_cuda.partition(".")[0]):
        return f"{versions_text}; install a driver for CUDA {built_cuda}, or {fitting_torch}"

    with recorded() as failure:
        cuda.init()  # type: ignore[no-untyped-call]
    visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
    return f"{versions_text} ({failure.line}); CUDA_VISIBLE_DEVICES is {visible_devices!r}"


def starts_local_servers(config: RunConfig) -> bool:
    starts_engines = config.engine.remote and not config.engine.urls
    starts_servers = starts_engines or any(not config.scorers[name].urls for name in config.scorers_used)
    return starts_servers and config.launch.kind == "local"


def uses_nccl(config: RunConfig) -> bool:
    """Return whether processes on GPUs of this machine use NCCL: ranks, parts of a server, or ranks with
    servers."""
    from torch.cuda import is_available

    server_sizes = [config.engine.tp, *(scorer.tp for scorer in config.scorers.values())]
    largest_server = max(server_sizes) if starts_local_servers(config) else 1
    return is_available() and (
        max(config.trainer.ranks, largest_server) > 1 or config.weights.transport != "disk"
    )


def _check_peers(config: RunConfig, gpu_count: int) -> Iterator[Note]:
    """Check that GPUs which exchange tensors can read each other's memory."""
    from torch.cuda import can_device_access_peer

    assigned_gpus = assign_gpus(config, gpu_count)
    rank_gpus = sorted(
        {gpu for name in assigned_gpus if name.startswith(TRAINER) for gpu in assigned_gpus[name]}
    )
    server_gpus = [assigned_gpus[name] for name in assigned_gpus if name.startswith((ENGINE, SCORER))]

    exchange_pairs = (
        {*product(rank_gpus, chain(*server_gpus))} if config.weights.transport != "disk" else set()
    )
    group_pairs = {pair for group in (rank_gpus, *server_gpus) for pair in combinations(group, 2)}
    unreachable_pairs = {
        pair
        for pair in exchange_pairs | group_pairs
        if pair[0] != pair[1] and not can_device_access_peer(*pair)
    }

    if unreachable_pairs:
        pairs_text = ", ".join(f"{first}-{second}" for first, second in sorted(unreachable_pairs))
        yield warning(
            f"GPUs {pairs_text} cannot read each other's memory (nvidia-smi topo -p2p r), so NCCL uses "
            "/dev/shm, which is slower; if a run hangs in its first collective operation, export "
            "NCCL_P2P_DISABLE=1"
        )


@preflight_check("NCCL", requires=("libraries",))
def check_nccl(inputs: Inputs) -> Iterator[Note]:
    """Check for NCCL, over which ranks on GPUs communicate and weights are broadcast between GPUs."""
    import torch
    from torch import distributed

    from asyncrl.weights.group import loaded_nccl_version

    if not torch.cuda.is_available():
        yield ok("not needed without GPUs")
    elif distributed.is_available() and distributed.is_nccl_available():
        yield ok(loaded_nccl_version())
    elif inputs.config.trainer.ranks > 1 or inputs.config.weights.transport != "disk":
        raise ConfigError(
            "this build of torch lacks NCCL, which trainer ranks on GPUs need; install a build with NCCL"
        )
    else:
        yield ok("not available, and not needed for one rank that publishes weights as files")


@preflight_check("network", requires=("libraries",))
def check_network(inputs: Inputs) -> Iterator[Note]:
    """Check the interfaces over which processes on GPUs would communicate. On Ray, if NCCL's variable is not
    set, processes use the interface that has the machine's address (`launch.ray.use_interface_of`)."""
    config = inputs.config
    interface_setting = os.environ.get(INTERFACE_VARIABLE, "")
    stats = psutil.net_if_stats()
    is_on_ray = bool(config.launch.ray_address)
    has_remote_servers = config.engine.urls and not is_loopback(config.launch.host)

    network_interfaces = {name: its for name, its in stats.items() if "loopback" not in its.flags}
    seen_text = (
        ", ".join(f"{name}{' (down)' * (not its.isup)}" for name, its in network_interfaces.items())
        or "loopback only"
    )
    usable_names = [
        name
        for name, its in stats.items()
        if its.isup and _matches_setting(interface_setting or DEFAULT_INTERFACES, name)
    ]

    problem = ""
    if interface_setting and not usable_names:
        problem = (
            f"{INTERFACE_VARIABLE}={interface_setting} does not match any active interface ({seen_text}); "
            "correct or unset the variable"
        )
    elif (is_on_ray or has_remote_servers) and all("loopback" in stats[name].flags for name in usable_names):
        problem = (
            f"only the loopback interface is usable ({seen_text}), so other machines cannot be reached; "
            f"check {INTERFACE_VARIABLE}"
        )
    elif has_remote_servers and not interface_setting and len(usable_names) > 1:
        problem = (
            f"NCCL may choose the wrong interface ({seen_text}); export {INTERFACE_VARIABLE}=NAME here and "
            "for the servers"
        )

    if not problem or not (is_on_ray or uses_nccl(config)):
        yield ok(seen_text)
    elif interface_setting and not (usable_names or is_on_ray):
        raise ConfigError(problem)
    else:
        yield warning(problem)


def _matches_setting(setting: str, interface: str) -> bool:
    """Return whether NCCL would use an interface: by prefix, `eth,ib`; by name, `=eth0`; by exclusion,
    `^docker,lo`."""
    names = setting.removeprefix("^").removeprefix("=").split(",")
    is_exact = setting.removeprefix("^").startswith("=")
    is_listed = interface in names if is_exact else interface.startswith(tuple(names))
    return is_listed != setting.startswith("^")
