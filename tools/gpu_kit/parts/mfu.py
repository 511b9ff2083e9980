"""Which share of the GPU's peak is one training step, and what takes the rest of its time?

A step is the trainer's own, on one rank: joining the turns of episodes, forward, loss, backward, clipping
and AdamW, through FSDP2, in bfloat16 with float32 weights and optimizer state; random weights in the sizes
of Qwen3; all rows of one length, of which the first 128 tokens are the prompt.

MFU = FLOP / (seconds x peak). FLOP of a step, useful ones only:

    6 N T + 6 V H S + 6 L h d sum(t^2)

with N the weights of the layers' matrices, T tokens, V x H the output layer, S tokens scored, L layers of
h heads of size d, and t the length of each row. A weight that is frozen (LoRA) counts 4 instead of 6,
because its gradient is not computed; an adapter's counts 6. Attention: 2 products of h d t^2 multiply-adds
in the forward, 4 in the backward, of which the causal half counts: (4 + 8) h d t^2 / 2. Not counted:
activations, logits and scores that are recomputed, the masked half, the embedding, norms, softmax and
the optimizer.

Peak: the dense bfloat16 rate of the data sheet, by the GPU's name; for an unknown GPU the rate of a large
product, which is always printed. Memory: torch's max_memory_allocated over the step. The losses: kernels
of one step by torch's profiler, grouped by name; idle: the step's time in which no kernel ran. prime-rl's
numbers for 4B LoRA on one H100 are 21.7% at 16k and 37.4% at 64k.
"""

from __future__ import annotations

import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec import structs
from torch.autograd import DeviceType
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

from asyncrl.attention_rules import Scoring
from asyncrl.config import RunConfig, described_recomputation
from asyncrl.trainer import scores
from asyncrl.trainer.attention import FlexKernel
from asyncrl.trainer.footprint import footprint, least_recomputation, with_recomputation
from asyncrl.trainer.learner import Learner
from asyncrl.trainer.performance import FlopCount, peak_flops
from asyncrl.trainer.prefix_tree import plant_forest
from asyncrl.trainer.scores import score_chunks
from asyncrl.trainer.world import World, join_ranks, leave_ranks
from parts.common import Context, Finding, attempt, failure, memory, release, synchronize, timed
from parts.steps import episodes, make_learner, train

SECONDS = 300
GOAL = "4B LoRA 28% at 16k and 37.5% at 64k (prime-rl on one H100: 21.7% and 37.4%)"

K = 1024
SLOWEST = 0.15  # MFU with which a step is expected to end
LORA_RANK = 16
Attend = Callable[[], torch.Tensor]
PEAKS = {  # bfloat16, dense, FLOP/s
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "GH200": 989e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
}
# The first pattern that fits a kernel's name names its group.
GROUPS = {
    "attention": r"flex|flash|fmha|scaled_dot|attention",
    "matmul": r"gemm|nvjet|cutlass|cublas|xmma|aten::(add)?mm|aten::bmm|splitk|linear",
    "FSDP": r"chunk_cat|split_with_sizes|nccl|all_gather|reduce_scatter|fsdp|multi_tensor.*copy",
    "optimizer": r"adam|multi_tensor|foreach|lpnorm",
    "softmax and choice of the output layer": r"softmax|gather|scatter|logsumexp",
    "copies and casts": r"memcpy|memset|copy|fill|zero_",
    "compiled elementwise": r"triton",
    "elementwise and reductions": r"elementwise|reduce|vectorized|norm|cat|index|aten::",
}


class Shape(NamedTuple):
    """`rows` of `length` tokens. `goal`: of MFU; 0: none. `steps`: timed at most, the first of which warms
    up. `profiled`: one more step, by torch's profiler."""

    name: str
    rows: int
    length: int
    goal: float = 0.0
    steps: int = 3
    profiled: bool = False


class Case(NamedTuple):
    """Shapes of one model. `settings` of the trainer: the next are tried where one fails."""

    name: str
    model: str
    shapes: tuple[Shape, ...]
    settings: tuple[dict[str, Any], ...]
    lora_rank: int = 0

    @property
    def profiled(self) -> bool:
        return any(shape.profiled for shape in self.shapes)


COMPILED, FULL, PADDED = (  # without FULL: as few layers are recomputed as the estimate says fit
    {"compile": True},
    {"activation_checkpointing": "full"},
    {"packing": "padded"},  # where flex attention fails
)
LORA_4B = Case(
    "4B LoRA",
    "qwen3-4b",
    # A profile of 64k would take as long as two more steps of it.
    (
        Shape("1 row of 16k", 1, 16 * K, 0.28, profiled=True),
        Shape("1 row of 64k", 1, 64 * K, 0.375, steps=2),
    ),
    (COMPILED, COMPILED | FULL, FULL, FULL | PADDED),
    lora_rank=LORA_RANK,
)
FULL_1_7B = Case(
    "1.7B",
    "qwen3-1.7b",
    (
        Shape("1 row of 16k", 1, 16 * K, profiled=True),
        Shape("8 rows of 2k, packed", 8, 2 * K, profiled=True),
    ),
    (COMPILED, COMPILED | FULL, FULL, FULL | PADDED),
)
RECOMPUTED_1_7B = Case(
    "1.7B, recomputed",
    "qwen3-1.7b",
    (Shape("1 row of 64k", 1, 64 * K),),
    (COMPILED | FULL, FULL, FULL | PADDED),
)
# The shortest of 1.7B, for a visit: no profile and no output layer alone.
BRIEF_1_7B = FULL_1_7B._replace(shapes=(Shape("1 row of 16k", 1, 16 * K, steps=2),))


def run(context: Context) -> Iterator[Finding]:
    yield from measure_cases(context, LORA_4B, FULL_1_7B, RECOMPUTED_1_7B)
    yield from attention_alone(context)


def visit_4b(context: Context) -> Iterator[Finding]:
    yield from measure_cases(context, LORA_4B)


def visit_1_7b(context: Context) -> Iterator[Finding]:
    yield from measure_cases(context, BRIEF_1_7B)


def measure_cases(context: Context, *cases: Case) -> Iterator[Finding]:
    """Yield the peak, then the findings of each case."""
    world = join_ranks(0, 1, device=context.kind)
    try:
        peak, finding = peak_of(context)
        yield finding
        for case in cases:
            yield from measure(case, context, world, peak)
    finally:
        leave_ranks()


def peak_of(context: Context) -> tuple[float, Finding]:
    reached = peak_flops(context.device, "bfloat16")
    if context.small:
        return reached, Finding("peak", f"{reached / 1e12:.3g} TFLOP/s, of a product here")
    name = torch.cuda.get_device_name(context.device)
    known_peak = next((rate for kind, rate in PEAKS.items() if kind in name), None)
    source = "data sheet" if known_peak else "of a product here"
    peak = known_peak or reached
    value = f"{peak / 1e12:.0f} TFLOP/s ({source}); a large product reaches {reached / 1e12:.0f}"
    return peak, Finding("peak", value, note=name)


def measure(case: Case, context: Context, world: World, peak: float) -> Iterator[Finding]:
    """All shapes of a case under the first settings that work."""
    shorter = 64 if context.small else 1
    shapes = [shape._replace(length=shape.length // shorter) for shape in case.shapes]
    tokens = max(shape.rows * shape.length for shape in shapes)
    left = list(shapes)
    for settings in case.settings:
        learner = None
        try:
            began = time.monotonic()
            case_settings = {
                key: setting for key, setting in settings.items() if not (context.small and key == "compile")
            }
            learner = make_learner(
                context, world, case.model, tokens, lora_rank=case.lora_rank, **case_settings
            )
            # What is compiled, is: of a length that no other size equals. A row of 16k is 128 blocks, as many
            # as a head has numbers, which torch would take for one size, and compile again for 64k.
            train(learner, episodes(learner, [min(tokens, 16 * K // shorter) * 15 // 16]))
            synchronize(context)
            packed = learner.packing
            spent = time.monotonic() - began
            value = f"made and tried in {spent:.1f} s; {listed(settings)}; rows {packed}"
            yield Finding(f"{case.name}: model", value, "rows packed", packed == "packed")
            while left:
                yield from step(case, learner, left[0], context, peak)
                left.pop(0)
            for shape in shapes:
                if shape.profiled:  # after all times: it may take what is left
                    yield from losses(case, learner, shape, context)
            if case.profiled:
                yield head_alone(case, learner, context)
        except Exception as error:
            failed_case = failure(f"{case.name}: {listed(settings)}", error)
            yield failed_case if settings is case.settings[-1] else replace(failed_case, ok=None)
        finally:
            learner = None
            release(context)
        if not left:
            return


def listed(settings: dict[str, Any]) -> str:
    return ", ".join(f"{key}={setting}" for key, setting in settings.items())


def flops(learner: Learner, rows: int, length: int, scored: int) -> float:
    """As the formula above says."""
    count = FlopCount.of(learner.policy.lm)
    config = learner.policy.lm.config
    heads = config.num_attention_heads * config.head_dim
    attention = 6.0 * config.num_hidden_layers * heads * rows * length**2
    return count.body * rows * length + count.head * scored + attention


def step(case: Case, learner: Learner, shape: Shape, context: Context, peak: float) -> Iterator[Finding]:
    """Time its steps, the first of which warms up; fewer where there is no time for all."""
    config = of_shape(learner.config, shape)
    if learner.recomputation.automatic and not context.small:
        available = torch.cuda.get_device_properties(context.device).total_memory
        learner.recomputation.every = least_recomputation(config, available, gpu=0, gpus=1)
    name = f"{case.name}: {shape.name}"
    tokens = shape.rows * shape.length
    step_episodes = episodes(learner, [shape.length] * shape.rows)
    scored = sum(len(turn.generation.ids) for _, turns in step_episodes for turn in turns)
    work = flops(learner, shape.rows, shape.length, scored)
    if not context.small and context.left() < work / (SLOWEST * peak):
        yield Finding(name, "left out: there is no time for it", ok=context.judged(not shape.goal))
        return
    if not context.small:
        torch.cuda.reset_peak_memory_stats()
    durations: list[float] = []
    while len(durations) < shape.steps and (not durations or context.left() > 2 * durations[-1] + 5):
        step_episodes = episodes(learner, [shape.length] * shape.rows)
        synchronize(context)
        began = time.perf_counter()
        metrics = train(learner, step_episodes)
        synchronize(context)
        durations.append(time.perf_counter() - began)
    spent = statistics.median(durations[1:] or durations)
    share = work / (spent * peak)
    value = f"MFU {share:.1%}; {spent:.3g} s; {tokens / spent:,.0f} tokens/s"
    norm = metrics.get("actor/grad_norm", float("nan"))
    timing = (
        f"median of {len(durations) - 1} after one" if len(durations) > 1 else "the first step of this shape"
    )
    recomputed = described_recomputation(learner.recomputation.every)
    note = f"{work / 1e12:.3g} TFLOP; {timing}; gradient norm {norm:.3g}; {recomputed}"
    fine = context.judged(share > shape.goal) if shape.goal else None
    yield Finding(name, value, f"> {shape.goal:.1%}" if shape.goal else "", fine, note)
    allocated = 0.0 if context.small else float(torch.cuda.max_memory_allocated())
    estimate = footprint(with_recomputation(config, learner.recomputation.every)).total
    yield memory(name, allocated, float(estimate), context)


def of_shape(config: RunConfig, shape: Shape) -> RunConfig:
    """Return the configuration of micro-batches of this shape."""
    trainer = structs.replace(config.trainer, micro_batch_tokens=shape.rows * shape.length)
    rollout = structs.replace(config.rollout, max_tokens=shape.length)
    return structs.replace(config, trainer=trainer, rollout=rollout)


def losses(case: Case, learner: Learner, shape: Shape, context: Context) -> Iterator[Finding]:
    """Time by group of kernels in one more step."""
    step_episodes = episodes(learner, [shape.length] * shape.rows)
    activities = [ProfilerActivity.CPU if context.small else ProfilerActivity.CUDA]
    synchronize(context)
    with profile(activities=activities) as profiler:
        began = time.perf_counter()
        train(learner, step_episodes)
        synchronize(context)
        spent = 1e3 * (time.perf_counter() - began)
    times, busy = operator_times(profiler) if context.small else kernel_times(profiler)
    groups, largest = grouped(times)
    groups["idle"] = max(0.0, spent - busy)
    ranked = sorted(groups.items(), key=lambda pair: -pair[1])
    apart = [f"{group} {ms:.1f} ms" for group, ms in ranked if group not in ("attention", "matmul")][:3]
    everything = ", ".join(f"{group} {ms:.1f}" for group, ms in ranked)
    note = f"of {spent:.0f} ms under the profiler, in ms: {everything}\n" + "\n".join(largest)
    yield Finding(f"{case.name}: {shape.name}: the three largest losses", "; ".join(apart), note=note)


def kernel_times(profiler: Any) -> tuple[dict[str, list[float]], float]:
    """Milliseconds of each call by kernel; milliseconds in which some kernel ran."""
    times = defaultdict[str, list[float]](list)
    spans = []
    for event in profiler.events():
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False):
            spans.append((event.time_range.start, event.time_range.end))
            times[event.name].append((event.time_range.end - event.time_range.start) / 1e3)
    busy = 0.0
    reached = float("-inf")
    for start, end in sorted(spans):
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return times, busy / 1e3


def operator_times(profiler: Any) -> tuple[dict[str, list[float]], float]:
    """The same on a CPU, by operator."""
    times = {row.key: [row.self_cpu_time_total / 1e3] for row in profiler.key_averages()}
    return times, sum(sum(durations) for durations in times.values())


def grouped(times: dict[str, list[float]]) -> tuple[dict[str, float], list[str]]:
    """Milliseconds by group, and the largest kernels of each but products and attention."""
    groups = defaultdict[str, float](float)
    members = defaultdict[str, list[tuple[float, str]]](list)
    for name, calls in times.items():
        spent = sum(calls)
        fits = (group for group, pattern in GROUPS.items() if re.search(pattern, name, re.IGNORECASE))
        group = next(fits, "others")
        groups[group] += spent
        members[group].append((spent, f"{group}: {spent:.2f} ms, {len(calls)} x {name[:110]}"))
    lines = [line for group in members for _, line in sorted(members[group], reverse=True)[:4]]
    return dict(groups), lines


def head_alone(case: Case, learner: Learner, context: Context) -> Finding:
    """Output layer, log-probs and entropy, forward and backward: how far they are from their products."""
    count = 256 if context.small else 16 * K
    weight: Any = learner.policy.lm.get_output_embeddings().weight
    table = weight.full_tensor().detach().to(torch.bfloat16).requires_grad_()
    hidden = torch.randn(count, table.shape[1], device=context.device).bfloat16().requires_grad_()
    labels = torch.randint(0, len(table), (count,), device=context.device)
    token_labels: Any = _Tokens(labels, torch.ones(count, device=context.device))

    def work() -> None:
        total = scores._WideGradient.apply(table)
        chunked_scores = score_chunks(
            lambda part: scores._Linear.apply(part, table, total),
            hidden,
            token_labels,
            entropy_grad=False,
            with_collision=False,
        )
        chunked_scores.logp.sum().backward()

    spent = timed(work, context, repeats=2)
    rate = 8.0 * count * table.numel() / spent.seconds / 1e12  # one of the products is recomputed
    value = f"{spent}; {rate:.3g} TFLOP/s, products recomputed among them"
    return Finding(f"{case.name}: output layer alone", value, note=f"{count:,} tokens")


class _Tokens(NamedTuple):
    labels: torch.Tensor
    temperature: torch.Tensor


def attention_alone(context: Context) -> Iterator[Finding]:
    """Flex attention, which the trainer uses, beside torch's causal attention, of one row."""
    for model, heads, keys in (("1.7B", 16, 8), ("4B", 32, 8)):
        for length in (16 * K, 64 * K):
            size = length // 64 if context.small else length
            attention_inputs = [
                torch.randn(size, n, 128, device=context.device).bfloat16().transpose(0, 1).requires_grad_()
                for n in (heads, keys, keys)
            ]
            for way in (flex, causal):
                name = f"attention of {model} alone, a row of {size:,}: {way.__name__}"
                yield from attempt(name, partial(speed, name, way, attention_inputs, context), context)


def flex(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Attend:
    """As the trainer computes it on a GPU."""
    kernel = FlexKernel(plant_forest([np.arange(query.shape[1])], share_prefixes=False), query.device)
    return lambda: kernel.attend(query, key, value, Scoring(128**-0.5))


def causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Attend:
    """torch's own for one row."""
    attention_inputs = query[None], key[None], value[None]
    return lambda: scaled_dot_product_attention(*attention_inputs, is_causal=True, enable_gqa=True)[
        0
    ].transpose(0, 1)


def speed(
    name: str, way: Callable[..., Attend], attention_inputs: Sequence[torch.Tensor], context: Context
) -> Finding:
    forward_only = context.small and way is flex  # a CPU has no backward of it
    attend = way(*(x.detach() if forward_only else x for x in attention_inputs))
    heads, length, size = attention_inputs[0].shape
    work = 2.0 * heads * size * length**2  # of a forward, the causal half
    forward = timed(attend, context, repeats=3)
    value = f"forward {forward}, {work / forward.seconds / 1e12:.3g} TFLOP/s"
    if not forward_only:
        gradient = torch.ones_like(attend())

        def both() -> None:  # what is compiled keeps nothing for a second backward
            torch.autograd.grad(attend(), attention_inputs, gradient)

        backward = timed(both, context, repeats=3).seconds - forward.seconds
        value += f"; backward {1e3 * backward:.3g} ms, {2 * work / backward / 1e12:.3g} TFLOP/s"
    return Finding(name, value)
