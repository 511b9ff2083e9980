"""Checks and describes the memory of trainer ranks (trainer/footprint.py), and says which matrices adapters
adapt."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from math import prod

import psutil

from asyncrl.config import RunConfig, described_recomputation, memory_advice
from asyncrl.errors import ConfigError, recorded
from asyncrl.launch.data import Note, ok, warning
from asyncrl.launch.estimates import sized
from asyncrl.runtime.process import main_memory
from asyncrl.trainer.footprint import (
    RECOMPUTED_EVERY,
    footprint,
    held_on_gpu,
    least_recomputation,
    static_bytes,
    usable_memory,
    with_recomputation,
)
from asyncrl.weights.model_files import DTYPE_BYTES, adapter_count, linear_shapes, weight_shapes


def version_bytes(config: RunConfig) -> int:
    """Main memory of a trainer rank for versions on their way out, at most: copies of its shards that ranks
    collect, and the next one; where only what has changed is published, the one that was published last; and
    two buckets, where those of several ranks are put together to be broadcast."""
    from asyncrl.trainer.publishing import readers

    ranks = config.trainer.ranks
    copies = readers(config, ranks) + 1 + (config.weights.full_every > 1)
    shards = ranks // config.trainer.replicas

    whole = weight_shapes(config.model.path)
    parameters = adapter_count(config) if config.adapters_apart else sum(map(prod, whole.values()))
    size = DTYPE_BYTES[config.model.dtype]

    buckets = 0
    if config.weights.transport == "collective" and ranks > 1:
        largest_tensor = max((prod(shape) for shape in whole.values()), default=0) * size
        buckets = 2 * min(parameters * size, max(config.weights.bucket_bytes, largest_tensor))

    return copies * parameters * size // shards + buckets


def room(config: RunConfig, gpu: bool | None) -> int | None:
    """Memory for all ranks: that of their GPUs, or of the machine. None where it is not known: on Ray."""
    if gpu is None:
        return None
    if gpu and config.model.device != "cpu" and not config.trainer.offload_optimizer:
        from torch.cuda import device_count, get_device_properties

        devices = range(min(config.trainer.ranks, device_count()))
        return sum(int(get_device_properties(index).total_memory) for index in devices)

    return main_memory().total


def check_memory(config: RunConfig, gpu: bool | None) -> None:
    """Raise ConfigError if what stays in memory cannot fit. The largest micro-batch is tried before the first
    step, and made smaller where it does not fit."""
    needed = config.trainer.ranks * sum(static_bytes(config))
    there = room(config, gpu)
    place = ""
    more = "with GPUs, more trainer.ranks or trainer.offload_optimizer=true"

    if config.shifts and there is not None and there > (main := main_memory().total):
        there = main
        place = " of main memory, where they rest"
        more = "engine.colocated=0"

    if there is not None and needed > there:
        raise ConfigError(
            f"weights, gradients and optimizer state of the trainer take {sized(needed)}, and there are "
            f"{sized(there)}{place}; set model.lora_rank, a trainer.optimizer with less state, a model.path "
            f"with fewer parameters, fewer trainer.replicas, or {more}"
        )


def describe_memory(config: RunConfig, gpu: bool | None) -> Iterator[Note]:
    """Yield lines of the plan, and a warning if the largest micro-batch does not fit."""
    with recorded() as failure:
        config, recomputation = _with_chosen_recomputation(config, gpu)
        found = footprint(config)
    if failure:
        yield warning(f"the memory of a trainer rank is not estimated: {failure.line}")
        return

    ranks = config.trainer.ranks
    there = room(config, gpu)
    own = psutil.Process().memory_info().rss
    out = version_bytes(config)

    parts = {"weights": found.weights, "gradients": found.gradients, "optimizer": found.optimizer}
    each = ", ".join(f"{name} {sized(size)}" for name, size in parts.items())
    micro = f"a micro-batch of {found.rows} x {found.length} tokens {sized(found.work)}"

    yield ok(
        f"memory        tensors of a trainer rank: {each}, {micro}, {sized(found.total)} in all; "
        f"its process takes about {sized(own)} beside them, and versions on their way out "
        f"{sized(out)} of main memory"
    )

    yield from recomputation

    if config.adapters:
        left_out = weight_shapes(config.model.path).keys() - linear_shapes(config.model.path)
        experts = any(".experts." in name for name in left_out)
        yield (warning if experts else ok)(f"adapters      {coverage(config.model.path)}")

    if config.versions_held:  # a server has as much room for each as for the largest
        size = adapter_count(config) * DTYPE_BYTES[config.model.dtype]
        held = config.adapters_held
        of = [rank for rank, _ in config.adapters.values()]
        yield ok(
            f"              a version is {sized(size)}; a server, beside its weights, has room for {held} "
            f"adapters at once: {sized(held * size * max(of) // sum(of))}"
        )

    needed = ranks * (found.total if gpu else found.total + out)
    if there is not None and needed > there:
        yield warning(
            f"{ranks} trainer ranks need {sized(needed)}, and there are {sized(there)}; set a "
            f"smaller trainer.micro_batch_tokens, {memory_advice(config.trainer.checkpointed_every)}"
        )


def _with_chosen_recomputation(config: RunConfig, gpu: bool | None) -> tuple[RunConfig, list[Note]]:
    """Return the configuration with what `auto` of trainer.activation_checkpointing means on these GPUs, and
    a note that says so; without GPUs or `auto`, as it is."""
    if config.trainer.activation_checkpointing != "auto" or not gpu or config.model.device == "cpu":
        return config, []

    from torch.cuda import device_count, get_device_properties

    count = device_count()
    rank_gpus = range(min(config.trainer.ranks, count))
    memory = {index: get_device_properties(index).total_memory for index in rank_gpus}
    least = {index: least_recomputation(config, size, index, count) for index, size in memory.items()}
    tightest = max(least, key=lambda index: RECOMPUTED_EVERY.index(least[index]))  # all ranks do as this one
    config = with_recomputation(config, least[tightest])

    usable = usable_memory(config, memory[tightest], tightest, count)
    text = f"recomputation {described_recomputation(least[tightest])} in the backward"
    if (held := held_on_gpu(config)) > usable:
        cure = f"a smaller trainer.micro_batch_tokens, {memory_advice(least[tightest])}"
        return config, [
            warning(f"{text}, but a rank still needs {sized(held)} and has only {sized(usable)}; set {cure}")
        ]
    return config, [ok(f"{text}: the least with which a rank fits into {sized(usable)} of its GPU")]


def coverage(path: str) -> str:
    """Return the matrices that adapters adapt and those they leave, by kind, with their number and their
    share of all parameters. (Stacked experts are no linear layers.)"""
    shapes = weight_shapes(path)
    adapted = linear_shapes(path)
    sizes = {True: defaultdict[str, list[int]](list), False: defaultdict[str, list[int]](list)}

    for name, shape in shapes.items():
        parts = [part for part in name.removesuffix(".weight").split(".") if not part.isdigit()]
        if len(shape) > 1:
            sizes[name in adapted][".".join(parts[-2:])].append(prod(shape))

    total = sum(map(prod, shapes.values()))
    yes, no = (
        ", ".join(f"{len(n)} x {kind} ({sum(n) / total:.1%})" for kind, n in sizes[which].items())
        for which in (True, False)
    )
    return f"{yes}; not adapted: {no or 'nothing'} (shares of all parameters)"
