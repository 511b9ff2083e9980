"""Checks that the gradients of sequences that are laid out together, or whose logits are computed in chunks,
equal the gradients of sequences one by one. The checked model is usually a small copy (shrunk.py)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from asyncrl.config import Packing
from asyncrl.errors import one_line
from asyncrl.shrunk import IGNORED_SETTINGS, LOGPROB_TOLERANCE, RESERVED_IDS, code_versions, is_passing_error
from asyncrl.trainer.attention import FOREST_ATTENTION
from asyncrl.trainer.scores import Scores, Selected
from asyncrl.trainer.world import World
from asyncrl.user_cache import keep_result, read_result

# Distance / norm of log-probs, and of gradients: of a small copy, whose recurrent layers round more, and of a
# loaded model by the type of its forward.
ERROR_LIMITS = {
    "copy": {"log-probs": LOGPROB_TOLERANCE, "gradients": 1e-2},
    **{
        dtype: dict.fromkeys(("log-probs", "gradients"), limit)
        for dtype, limit in (("float64", 1e-5), ("float32", 1e-3), ("bfloat16", 0.1))
    },
}
LAYOUTS: tuple[Packing, ...] = ("padded", "packed", "tree")


def transformer_of(root: nn.Module) -> PreTrainedModel:
    return next(module for module in root.modules() if isinstance(module, PreTrainedModel))


def check_gradients(
    root: nn.Module,
    layouts: Sequence[Packing] = LAYOUTS,
    limits_kind: str = "copy",
    world: World | None = None,
) -> dict[str, str]:
    """Compare each way to compute gradients with sequences computed one by one. Returns the problem of each
    way, '' for none: `split` at the output layer, and `layouts` of sequences.

    `root`: a policy or a critic, with weights. `limits_kind`: a key of ERROR_LIMITS. `world`: the ranks that
    share the model. A collective. Gradients are cleared.
    """
    model = transformer_of(root)
    own_attention = model.config._attn_implementation
    vocabulary_size = model.config.get_text_config().vocab_size
    rng = np.random.default_rng(0)
    common_start, *ends = (
        rng.integers(min(RESERVED_IDS, vocabulary_size - 1), vocabulary_size, n) for n in (24, 9, 14, 30)
    )
    sequences = [np.concatenate([common_start, ends[0]]), np.concatenate([common_start, ends[1]]), ends[2]]
    one_by_one = [_all_tokens([sequence], "padded") for sequence in sequences]

    split_methods: list[Any] = [] if getattr(root, "runs_whole", True) else ["split"]
    problems = dict.fromkeys(("split", *LAYOUTS), "")
    for method in (*split_methods, *layouts):
        laid_out = one_by_one if method == "split" else [_all_tokens(sequences, method)]
        forest = laid_out[0].forest
        try:
            _set_runs_whole(root, True)
            expected = _token_values(root, one_by_one, world)
            expected_norms = _norms(root, expected, world)
            for gradient in _local_gradients(root):
                gradient.neg_()  # the next are added to it: no second set is held
            _set_runs_whole(root, not split_methods or bool(problems["split"]))
            if forest is not None:
                model.set_attn_implementation(FOREST_ATTENTION)

            distances = _norms(root, _token_values(root, laid_out, world) - expected, world)
            for quantity, limit in ERROR_LIMITS[limits_kind].items():
                relative_distance = distances[quantity] / max(expected_norms[quantity], 1e-30)
                if not relative_distance < limit:  # also NaN
                    problems[method] = (
                        f"has {quantity} that differ from those of rows one by one by "
                        f"{relative_distance:.1e} of their norm (limit {limit:.0e})"
                    )
                    break

            if forest is not None and forest.ignored_arguments:
                problems[method] = f"has attention with {', '.join(sorted(forest.ignored_arguments))}"
        except Exception as error:
            if is_passing_error(error):
                raise
            problems[method] = f"fails with {one_line(error)}"

        root.zero_grad()
        if forest is not None:
            model.set_attn_implementation(own_attention)

    _set_runs_whole(root, not split_methods)

    return problems


def cached_gradient_check(
    root: nn.Module, layouts: Sequence[Packing], dtype: str, world: World, compiled: bool = False
) -> dict[str, str]:
    """Return the result of `check_gradients` for a loaded model. A result without problems is kept in the
    user's cache, under everything that decides it: classes, configuration, names of trained tensors, `dtype`
    of a forward, kind of device, ranks that share a sequence, whether layers are `compiled`, and versions of
    the code. A collective."""
    cache_key = ""
    cached_problems = None
    if world.rank == 0:
        cache_key = _cache_key(root, layouts, dtype, world, compiled)
        cached_problems = read_result(cache_key, dict[str, str])

    problems_type: Any = dict[str, str] | None
    problems = world.gather(cached_problems, problems_type)[0]
    if problems is None:
        problems = check_gradients(root, layouts, dtype, world)
        # A failure may be the machine's: it is asked again.
        if world.rank == 0 and not any(problems.values()):
            keep_result(cache_key, problems)

    return problems


def _cache_key(root: nn.Module, layouts: Sequence[Packing], dtype: str, world: World, compiled: bool) -> str:
    model = transformer_of(root)
    device = world.device
    key_parts = (
        "examined",
        type(root).__name__,
        type(model).__name__,
        sorted((model.config.to_dict() | dict.fromkeys(IGNORED_SETTINGS)).items()),
        sorted(name for name, parameter in root.named_parameters() if parameter.requires_grad),
        *layouts,
        dtype,
        torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        world.sequence.count if world.sequence else 1,
        compiled,
        *code_versions(),
    )

    return repr(key_parts)


def _all_tokens(sequences: Sequence[np.ndarray], packing: Packing) -> Selected:
    """Select all tokens but the first of each sequence."""
    sequence_of = np.repeat(np.arange(len(sequences)), [len(sequence) - 1 for sequence in sequences])
    position = np.concatenate([np.arange(1, len(sequence)) for sequence in sequences])
    return Selected.lay_out(sequences, sequence_of, position, torch.ones(len(sequence_of)), packing)


def _set_runs_whole(root: Any, runs_whole: bool) -> None:
    """Let the policy compute all logits at once, or in chunks. A critic has none."""
    if hasattr(root, "runs_whole"):
        root.runs_whole = runs_whole


def _token_values(root: nn.Module, selections: Sequence[Selected], world: World | None) -> Tensor:
    """Return the values of all tokens, [N]. If the model learns, a backward of their weighted sum has run."""
    token_counts = [len(selection.labels) for selection in selections]

    computed_values = []
    learns = any(p.requires_grad for p in root.parameters())
    for selection, weights in zip(
        selections, torch.linspace(0.5, 1.5, sum(token_counts)).split(token_counts), strict=True
    ):
        with torch.set_grad_enabled(learns):
            scores = root(selection if world is None else selection.to(world.device))
            values = scores.logp if isinstance(scores, Scores) else scores

        if learns:
            (values * weights.to(values.device)).sum().backward()
        elif isinstance(root, FSDPModule):
            root.reshard()

        computed_values.append(values.detach())

    if world is not None:
        world.average_gradients(root.parameters())

    return torch.cat(computed_values)


def _local_gradients(root: nn.Module) -> list[Tensor]:
    """Return the gradients of this rank's shards."""
    gradients = (parameter.grad for parameter in root.parameters() if parameter.grad is not None)
    return [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]


def _norms(root: nn.Module, values: Tensor, world: World | None) -> dict[str, float]:
    """Return the norm of `values`, which are the same on all ranks, and of the gradients over all ranks."""

    def norm(tensors: Sequence[Tensor]) -> float:
        square = sum(float(t.double().square().sum()) for t in tensors)
        return math.sqrt(square if world is None else sum(world.gather(square, float)))

    return {"log-probs": norm([values]), "gradients": norm(_local_gradients(root))}
