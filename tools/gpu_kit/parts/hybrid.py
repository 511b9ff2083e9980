"""Layers with a state in packed rows: which kernels compute them, what are these told, and is the result that
of rows one by one?

The model has the layers of Qwen3.5: three of the gated delta rule and a short convolution to one of
attention, with random weights. transformers binds the kernels of fla and causal_conv1d where these are
installed, and drops each argument that a kernel does not take; so the arguments are recorded behind the place
where they are dropped. Gradients of packed rows and trees are compared with those of rows one by one in
float64 on the CPU, with the functions of torch (the rule itself is in float32 there, too). Distances are
relative, as in the part `packing`; the limit is 1e-4, or twice the distance of rows one by one with the same
kernels. Then useful tokens per second, packed against padded, of 16 rows of ragged lengths and of 16 of like
lengths.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.config import ModelConfig, Packing
from asyncrl.layer_kernels import installed_kernels, kernel_binding
from asyncrl.trainer.model import Policy, load_policy
from asyncrl.trainer.packing import packing_for, padded_meanwhile
from asyncrl.trainer.world import World, join_ranks, leave_ranks
from parts.common import Context, Finding, attempt, exact_float32, timed
from parts.packing import FLOAT32_LIMIT, NOISE, few_rows, in_way
from parts.rows import Rows, distances, formatted, like, measured, plain_backward, ragged

MODEL_TYPE = "qwen3_5_text"
MODEL_FILE = "transformers.models.qwen3_5.modeling_qwen3_5"
ROWS = 16
GOALS = {"ragged": 1.4, "like": 1.0}  # useful tokens per second, packed against padded

LAYERS = {
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_hidden_layers": 4,
    "vocab_size": 4096,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,
}
SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
SMALL_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "vocab_size": 512,
}


def visit(context: Context) -> Iterator[Finding]:
    world = join_ranks(0, 1, device=context.kind)
    try:
        yield Finding("kernels installed", ", ".join(installed_kernels()) or "none")
        for function in layer_functions():
            yield Finding(function.name, f"computed by {function.owner}")

        path = write_model(context)
        yield from compare_gradients(context, world, path)
        for kind in GOALS:
            yield from attempt(
                f"{kind} rows", lambda kind=kind: compare_speed(context, world, path, kind), context
            )
    finally:
        leave_ranks()


# -- the functions that transformers binds -----------------------------------------------------------------


class LayerFunction(NamedTuple):
    """A function of the model's file that may be a kernel. `implementation`: the cell of its closure that
    holds what is called."""

    name: str
    owner: str
    torch_function: Callable[..., Any]
    implementation: Any


def layer_functions() -> Iterator[LayerFunction]:
    for name, function in vars(importlib.import_module(MODEL_FILE)).items():
        cells = kernel_binding(function)
        if not cells:
            continue
        owner = cells["package"].cell_contents if cells["is_new_implementation"].cell_contents else "torch"
        yield LayerFunction(name, owner, cells["torch_function"].cell_contents, cells["implementation"])


@contextmanager
def replaced_implementations(replace: Callable[[LayerFunction], Callable[..., Any]]) -> Iterator[None]:
    """Call what `replace` returns, in place of each implementation."""
    with ExitStack() as originals:
        for function in layer_functions():
            cell = function.implementation
            originals.callback(setattr, cell, "cell_contents", cell.cell_contents)
            cell.cell_contents = replace(function)
        yield


def recorder(calls: dict[str, set[str]]) -> Callable[[LayerFunction], Callable[..., Any]]:
    """Return a replacement that notes what an implementation is passed by name, and calls it."""

    def recording(function: LayerFunction) -> Callable[..., Any]:
        implementation = function.implementation.cell_contents

        def call(*args: Any, **kwargs: Any) -> Any:
            passed = [described(name, value) for name, value in kwargs.items() if value is not None]
            calls.setdefault(function.name, set()).add(", ".join(passed))
            return implementation(*args, **kwargs)

        return call

    return recording


def described(name: str, value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{name} {list(value.shape)}"
    return f"{name}={value}"


# -- gradients ---------------------------------------------------------------------------------------------


def write_model(context: Context) -> Path:
    """Write a small model with random weights; return its directory."""
    path = context.work / MODEL_TYPE
    torch.manual_seed(0)
    config = AutoConfig.for_model(MODEL_TYPE, **LAYERS | (SMALL_SIZES if context.small else SIZES))
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


def compare_gradients(context: Context, world: World, path: Path) -> Iterator[Finding]:
    rows = few_rows(context)
    with exact_float32():
        with replaced_implementations(lambda function: function.torch_function):
            exact = AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.float64, attn_implementation="eager"
            )
            expected = on_cpu(measured(exact, plain_backward(exact.eval(), rows)))

        plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
        plain = plain.eval().to(context.device)
        floor = distances(on_cpu(measured(plain, plain_backward(plain, rows))), expected)
        yield Finding("float32: the plain loop", formatted(floor), note="with the kernels: their rounding")
        limits = [max(FLOAT32_LIMIT, NOISE * distance) for distance in floor]

        policy = load_policy(ModelConfig(path=str(path), dtype="float32"), world)
        packing = packing_for([policy], "tree", "float32", world)
        yield Finding("trainer.packing=tree in a run", packing, "tree", packing == "tree")
        ways: tuple[Packing, ...] = ("packed", "tree")
        for way in ways:
            calls = dict[str, set[str]]()

            def compare(way: Packing = way, calls: dict[str, set[str]] = calls) -> Finding:
                with replaced_implementations(recorder(calls)):
                    distance = distances(on_cpu(in_way(policy, rows, way, world)), expected)
                fine = all(far <= limit for far, limit in zip(distance, limits, strict=True))
                return Finding(f"float32: {way}", formatted(distance), f"<= {formatted(limits)}", fine)

            yield from attempt(f"float32: {way}", compare, context)
            for name, passed in calls.items():
                yield Finding(
                    f"{way}: {name} is passed",
                    f"{len(passed)} kinds of calls",
                    note="\n".join(sorted(passed)),
                )


def on_cpu(values: tuple[torch.Tensor, dict[str, Any]]) -> tuple[torch.Tensor, dict[str, Any]]:
    logprobs, gradients = values
    return logprobs.cpu(), {name: gradient.cpu() for name, gradient in gradients.items()}


# -- speed -------------------------------------------------------------------------------------------------


def compare_speed(context: Context, world: World, path: Path, kind: str) -> Finding:
    policy = load_policy(ModelConfig(path=str(path), dtype="bfloat16"), world)
    policy.packing = packing_for([policy], "packed", "bfloat16", world)
    if policy.packing == "padded":
        return Finding(f"{kind} rows", "not packed: the log says why", "packed", ok=False)

    draw = ragged if kind == "ragged" else like
    typical = 60 if context.small else 1000
    rows = draw(np.random.default_rng(0), policy.vocabulary, ROWS, typical)
    packed = timed(lambda: backward(policy, rows, "packed", world), context).seconds
    padded = timed(lambda: backward(policy, rows, "padded", world), context).seconds

    ratio = padded / packed
    value = (
        f"{rows.useful / packed:,.0f} useful tokens/s packed, {rows.useful / padded:,.0f} padded: {ratio:.2f}"
    )
    longest = max(map(len, rows.ids))
    note = f"{rows.useful:,} useful of {ROWS * longest:,} padded"
    return Finding(f"{kind} rows", value, f">= {GOALS[kind]}", context.judged(ratio >= GOALS[kind]), note)


def backward(policy: Policy, rows: Rows, way: Packing, world: World) -> None:
    with padded_meanwhile(policy) if way == "padded" else nullcontext():
        policy(rows.selected(way).to(world.device)).logp.sum().backward()
    policy.zero_grad()
