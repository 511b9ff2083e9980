"""Checks and describes the memory of trainer ranks (trainer/footprint.py), and describes which matrices
adapters adapt."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from math import prod

import psutil

from asyncrl.config import RunConfig, described_recomputation, memory_advice
from asyncrl.engines.sglang.served_layers import kinds_not_served, servers_get_adapters
from asyncrl.errors import ConfigError, recorded
from asyncrl.launch.architecture import SlotMemory
from asyncrl.launch.estimates import format_bytes, uses_gpu
from asyncrl.launch.notes import Note, ok, warning
from asyncrl.runtime.process import main_memory
from asyncrl.trainer.footprint import (
    RECOMPUTED_EVERY,
    footprint,
    gpu_tensor_bytes,
    least_recomputation,
    static_bytes,
    usable_memory,
    with_recomputation,
)
from asyncrl.weights.checkpoint_match import trained_shapes
from asyncrl.weights.model_files import DTYPE_BYTES
from asyncrl.weights.trained_tensors import adapted_shapes, adapter_count, linear_kinds


def version_bytes(config: RunConfig) -> int:
    """Return the main memory, at most, that a trainer rank needs for versions that are being published:
    copies of its shards that ranks collect, and the next copy; the last published version, if only changes
    are published; and two buckets, in which the parts of several ranks are joined for a broadcast."""
    from asyncrl.trainer.publishing import readers

    ranks = config.trainer.ranks
    copy_count = readers(config, ranks) + 1 + (config.weights.full_every > 1)
    shard_count = ranks // config.trainer.replicas

    shapes = trained_shapes(config.model.path, train_vision=config.model.train_vision)
    parameters = adapter_count(config) if config.adapters_apart else sum(map(prod, shapes.values()))
    dtype_bytes = DTYPE_BYTES[config.model.dtype]

    bucket_bytes = 0
    if config.weights.transport == "collective" and ranks > 1:
        largest_tensor = max((prod(shape) for shape in shapes.values()), default=0) * dtype_bytes
        bucket_bytes = 2 * min(parameters * dtype_bytes, max(config.weights.bucket_bytes, largest_tensor))

    return copy_count * parameters * dtype_bytes // shard_count + bucket_bytes


def available_memory(config: RunConfig, has_gpu: bool | None) -> int | None:
    """Return the memory for all ranks: of their GPUs, or of the machine. None if unknown, as on Ray."""
    if has_gpu is None:
        return None
    if has_gpu and config.model.device != "cpu" and not config.trainer.offload_optimizer:
        from torch.cuda import device_count, get_device_properties

        rank_gpus = range(min(config.trainer.ranks, device_count()))
        return sum(int(get_device_properties(index).total_memory) for index in rank_gpus)

    return main_memory().total


def check_memory(config: RunConfig, has_gpu: bool | None) -> None:
    """Raise ConfigError if the tensors that stay in memory cannot fit. The largest micro-batch is tried
    before the first step, and made smaller if it does not fit."""
    needed_bytes = config.trainer.ranks * sum(static_bytes(config))
    available_bytes = available_memory(config, has_gpu)
    place_text = ""
    advice = "or, with GPUs, more trainer.ranks or trainer.offload_optimizer=true"

    if (
        config.shifts
        and available_bytes is not None
        and available_bytes > (main_bytes := main_memory().total)
    ):
        available_bytes = main_bytes
        place_text = " of main memory, to which they are offloaded,"
        advice = "or engine.colocated=0"

    if available_bytes is not None and needed_bytes > available_bytes:
        raise ConfigError(
            f"the trainer's weights, gradients and optimizer state take {format_bytes(needed_bytes)}, but "
            f"only {format_bytes(available_bytes)}{place_text} is available; set model.lora_rank, a "
            "trainer.optimizer with less state, a model.path with fewer parameters, fewer trainer.replicas, "
            f"{advice}"
        )


def check_engine_memory(config: RunConfig, has_gpu: bool | None, slot: SlotMemory) -> str:
    """Return what the slots of an embedded engine take. Raises ConfigError if they cannot fit into its GPU
    or, those of all engines, into the machine's memory. A worker has a second engine for validations."""
    kv_bytes = slot.kv_numbers * DTYPE_BYTES[config.model.dtype] * (config.rollout.max_tokens + 1)
    slot_bytes = kv_bytes + slot.state_bytes
    engine_bytes = config.rollout.slots * slot_bytes
    slot_text = f"{format_bytes(kv_bytes)} of KV cache"
    if slot.state_bytes:
        slot_text += f" and {format_bytes(slot.state_bytes)} of layer states"
    text = f"{config.rollout.slots} slots take {format_bytes(engine_bytes)} (each {slot_text})"

    available_bytes = None
    if uses_gpu(config, has_gpu):
        from torch.cuda import device_count, get_device_properties

        available_bytes = max(get_device_properties(gpu).total_memory for gpu in range(device_count()))
    elif has_gpu is not None:
        available_bytes = main_memory().total // config.rollout.workers
    if available_bytes is not None and config.data.test and config.validation.samples:
        available_bytes //= 2

    if available_bytes is not None and engine_bytes > available_bytes:
        raise ConfigError(
            f"rollout.slots: the embedded engine's {text}, but only {format_bytes(available_bytes)} of "
            "memory is available to the engine; lower rollout.slots or rollout.max_tokens, or use "
            "engine=sglang"
        )
    return text


def describe_memory(config: RunConfig, has_gpu: bool | None, sequence_image_ids: int = 0) -> Iterator[Note]:
    """Yield lines of the plan, and a warning if the largest micro-batch does not fit. `sequence_image_ids`:
    the most ids of images in a sequence."""
    with recorded() as failure:
        config, recomputation_notes = _with_chosen_recomputation(config, has_gpu, sequence_image_ids)
        rank_footprint = footprint(config, sequence_image_ids)
    if failure:
        yield warning(f"cannot estimate a trainer rank's memory: {failure.line}")
        return

    ranks = config.trainer.ranks
    available_bytes = available_memory(config, has_gpu)
    process_bytes = psutil.Process().memory_info().rss
    outgoing_bytes = version_bytes(config)

    part_bytes = {
        "weights": rank_footprint.weights,
        "gradients": rank_footprint.gradients,
        "optimizer": rank_footprint.optimizer,
    }
    parts_text = ", ".join(f"{name} {format_bytes(size)}" for name, size in part_bytes.items())
    micro_batch_text = (
        f"a micro-batch of {rank_footprint.rows} x {rank_footprint.length} tokens "
        + (f"({sequence_image_ids} of images) " if sequence_image_ids else "")
        + format_bytes(rank_footprint.work)
    )

    yield ok(
        f"memory        tensors of a trainer rank: {parts_text}, {micro_batch_text}, "
        f"{format_bytes(rank_footprint.total)} in total; the rank's process takes about "
        f"{format_bytes(process_bytes)} more, and versions being published take "
        f"{format_bytes(outgoing_bytes)} of main memory"
    )

    yield from recomputation_notes

    if config.adapters:
        has_experts = any(".experts." in name for name in trained_shapes(config.model.path))
        coverage_text = f"adapters      {describe_coverage(config)}"
        yield warning(coverage_text) if has_experts else ok(coverage_text)

    if config.versions_held:  # Servers reserve as much room for each adapter as for the largest.
        version_size = adapter_count(config) * DTYPE_BYTES[config.model.dtype]
        adapters_held = config.adapters_held
        adapter_ranks = [rank for rank, _ in config.adapters.values()]
        yield ok(
            f"              a version takes {format_bytes(version_size)}; besides its weights, a server has "
            f"room for {adapters_held} adapters: "
            f"{format_bytes(adapters_held * version_size * max(adapter_ranks) // sum(adapter_ranks))}"
        )

    needed_bytes = ranks * (rank_footprint.total if has_gpu else rank_footprint.total + outgoing_bytes)
    if available_bytes is not None and needed_bytes > available_bytes:
        yield warning(
            f"the trainer's ranks ({ranks}) need {format_bytes(needed_bytes)}, but only "
            f"{format_bytes(available_bytes)} is available; set a smaller trainer.micro_batch_tokens, "
            f"{memory_advice(config.trainer.checkpointed_every)}"
        )


def _with_chosen_recomputation(
    config: RunConfig, has_gpu: bool | None, sequence_image_ids: int
) -> tuple[RunConfig, list[Note]]:
    """Replace `auto` of trainer.activation_checkpointing by its meaning on these GPUs, and return a note
    about the choice; without GPUs or `auto` return the configuration unchanged."""
    if config.trainer.activation_checkpointing != "auto" or not has_gpu or config.model.device == "cpu":
        return config, []

    from torch.cuda import device_count, get_device_properties

    gpu_count = device_count()
    rank_gpus = range(min(config.trainer.ranks, gpu_count))
    memory_by_gpu = {index: get_device_properties(index).total_memory for index in rank_gpus}
    least_by_gpu = {
        index: least_recomputation(config, size, index, gpu_count, sequence_image_ids)
        for index, size in memory_by_gpu.items()
    }
    # All ranks recompute as much as the tightest rank needs.
    tightest_gpu = max(least_by_gpu, key=lambda index: RECOMPUTED_EVERY.index(least_by_gpu[index]))
    config = with_recomputation(config, least_by_gpu[tightest_gpu])

    usable_bytes = usable_memory(config, memory_by_gpu[tightest_gpu], tightest_gpu, gpu_count)
    text = f"recomputation {described_recomputation(least_by_gpu[tightest_gpu])} in the backward pass"
    if (held_bytes := gpu_tensor_bytes(config, sequence_image_ids)) > usable_bytes:
        cure = f"a smaller trainer.micro_batch_tokens, {memory_advice(least_by_gpu[tightest_gpu])}"
        return config, [
            warning(
                f"{text}, but a rank still needs {format_bytes(held_bytes)} and has only "
                f"{format_bytes(usable_bytes)}; set {cure}"
            )
        ]
    return config, [
        ok(f"{text}, the minimum for a rank to fit into {format_bytes(usable_bytes)} of GPU memory")
    ]


def describe_coverage(config: RunConfig) -> str:
    """List the kinds of matrices that adapters adapt and the kinds that they leave out, with their number and
    their fraction of the parameters that train, and why linear layers are left out. (Stacked experts are no
    linear layers.)"""
    path = config.model.path
    shapes = trained_shapes(path)
    kinds = linear_kinds(path)
    adapted_names = adapted_shapes(config).keys()
    unserved_kinds = kinds_not_served(path) if servers_get_adapters(config) else {}
    total_parameters = sum(map(prod, shapes.values()))

    matrices_by_reason = defaultdict[str, dict[str, list[int]]](lambda: defaultdict(list))
    for name, shape in shapes.items():
        if len(shape) < 2:
            continue

        reason = "not adapted"
        if name in adapted_names:
            reason = ""
        elif name in kinds:
            cause = unserved_kinds.get(kinds[name], "model.lora_modules does not list them")
            reason = f"left out, because {cause}"

        name_parts = [part for part in name.removesuffix(".weight").split(".") if not part.isdigit()]
        matrices_by_reason[reason][".".join(name_parts[-2:])].append(prod(shape))

    matrices_by_reason.setdefault("not adapted", {})
    texts = []
    for reason, sizes_by_kind in sorted(matrices_by_reason.items()):
        kinds_text = ", ".join(
            f"{len(sizes)} x {kind} ({sum(sizes) / total_parameters:.1%})"
            for kind, sizes in sizes_by_kind.items()
        )
        texts.append(f"{reason}: {kinds_text or 'nothing'}" if reason else kinds_text)

    return f"{'; '.join(texts)} (shares of all trainable parameters)"
