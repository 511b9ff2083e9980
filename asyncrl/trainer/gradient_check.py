"""Checks that the gradients of sequences that are laid out together, or whose logits are computed in chunks,
equal the gradients of sequences one by one. The checked model is usually a small copy (shrunk.py)."""

from __future__ import annotations

import math
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from asyncrl.config import Packing
from asyncrl.errors import one_line
from asyncrl.model_class import set_text_attention, text_part
from asyncrl.shrunk import (
    IGNORED_SETTINGS,
    LOGPROB_TOLERANCE,
    RESERVED_IDS,
    is_passing_error,
)
from asyncrl.state_layers import has_state
from asyncrl.trainer.attention import text_attention, use_forest_attention
from asyncrl.trainer.scores import Scores, Selected
from asyncrl.trainer.world import World
from asyncrl.user_cache import code_versions, keep_result, read_result

# Distance / norm of log-probs, and of gradients: of a small copy, whose recurrent layers round more, and of a
# loaded model by the type of its forward.
ERROR_LIMITS = {
    "copy": {"log-probs": LOGPROB_TOLERANCE, "gradients": 1e-2},
    **{
        dtype: dict.fromkeys(("log-probs", "gradients"), limit)
        for dtype, limit in (("float64", 1e-5), ("float32", 1e-3), ("bfloat16", 0.1))
    },
}
CHANGED_TOKENS = 8  # last tokens of a sequence that are changed to see which sequences they reach
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
    own_attention = text_attention(model)
    vocabulary_size = model.config.get_text_config().vocab_size

    # Three sequences: two with a common start, which a tree computes once, and one without.
    rng = np.random.default_rng(0)
    lowest_id = min(RESERVED_IDS, vocabulary_size - 1)
    common_start = rng.integers(lowest_id, vocabulary_size, 24)
    first_end = rng.integers(lowest_id, vocabulary_size, 9)
    second_end = rng.integers(lowest_id, vocabulary_size, 14)
    sequences = [
        np.concatenate([common_start, first_end]),
        np.concatenate([common_start, second_end]),
        rng.integers(lowest_id, vocabulary_size, 30),
    ]
    one_by_one = [_all_tokens([sequence], "padded") for sequence in sequences]

    layers_by_identity = {
        id(layer): f"{name} ({type(layer).__name__})" for name, layer in named_layers(model).items()
    }
    split_methods: list[Any] = [] if getattr(root, "runs_whole", True) else ["split"]
    problems = dict.fromkeys(("split", *LAYOUTS), "")
    for method in (*split_methods, *layouts):
        laid_out = one_by_one if method == "split" else [_all_tokens(sequences, method)]
        forest = laid_out[0].forest
        differs = False
        try:
            # Compute the sequences one by one. Their gradients are negated, and those of the method are added
            # to them: the sum is the difference, and no second set is held.
            _set_runs_whole(root, True)
            expected = _token_values(root, one_by_one, world)
            expected_norms = _norms(root, expected, world)
            for gradient in _local_gradients(root):
                gradient.neg_()

            # Compute them by the method.
            _set_runs_whole(root, not split_methods or bool(problems["split"]))
            if forest is not None:
                use_forest_attention(model)
            differences = _token_values(root, laid_out, world) - expected

            distances = _norms(root, differences, world)
            for quantity, limit in ERROR_LIMITS[limits_kind].items():
                relative_distance = distances[quantity] / max(expected_norms[quantity], 1e-30)
                if not relative_distance < limit:  # also NaN
                    problems[method] = (
                        f"has {quantity} that differ from those of single rows by "
                        f"{relative_distance:.1e} of their norm (limit {limit:.0e})"
                    )
                    differs = True
                    break

            # An attention argument that the method ignores explains any difference.
            if forest is not None and forest.ignored_arguments:
                differs = False
                argument_names = ", ".join(sorted(forest.ignored_arguments))
                ignoring_layer = next(iter(forest.ignored_arguments.values()))
                layer_name = layers_by_identity.get(id(ignoring_layer), "")
                problems[method] = f"has attention with {argument_names}"
                problems[method] += f": {layer_name}" if layer_name else ""
        except Exception as error:
            if is_passing_error(error):
                raise
            failed_layer = _layer_in_traceback(error, layers_by_identity)
            problems[method] = f"fails with {one_line(error)}" + (f": {failed_layer}" if failed_layer else "")

        root.zero_grad()
        if forest is not None:
            set_text_attention(model, own_attention)

        # Layers are compared on a small copy only: a loaded model's calls would fill its device.
        if differs and method != "split" and world is None:
            layer_difference = describe_layer_difference(root, sequences, method)
            problems[method] += f": {layer_difference}" if layer_difference else ""

    _set_runs_whole(root, not split_methods)

    return problems


class LayerCall(NamedTuple):
    """Hold what one call of a layer read and returned: tensors [N, ...] of the N selected tokens. `inputs`:
    by the name or the index of the argument. `output`: None without a row for each token."""

    inputs: dict[str, Tensor]
    output: Tensor | None


LayerCalls = dict[tuple[str, int], LayerCall]
"""The layer calls in a forward pass, in the order in which the calls return, by the layer's name and the
number of the call."""


def named_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the modules below the backbone of a model's text part, by their names there."""
    backbone = text_part(model).base_model
    return {name: module for name, module in backbone.named_modules() if name}


def sharing_problem(model: PreTrainedModel) -> str:
    """Describe why ranks cannot share a row of the model; '' if they can."""
    for name, layer in named_layers(model).items():
        if has_state(layer):
            described_layer = f"{name} ({type(layer).__name__})"
            return f"has layers that carry a state, whose rows cannot be shared by ranks: {described_layer}"
    return ""


@torch.no_grad()
def describe_layer_difference(root: nn.Module, sequences: Sequence[np.ndarray], packing: Packing) -> str:
    """Describe the first layer whose output for `sequences` that are laid out together differs from its
    output one by one, although its inputs agree; '' if there is none. Example: `layers.0.temporal_block
    (RecurrentGemmaRecurrentBlock) mixes rows`."""
    limit = ERROR_LIMITS["copy"]["log-probs"]
    layers = named_layers(transformer_of(root))

    calls_alone = [
        _record_layer_calls(root, layers, _all_tokens([sequence], "padded")) for sequence in sequences
    ]
    calls_together = _record_layer_calls(root, layers, _all_tokens(sequences, packing))

    for call_key, call_together in calls_together.items():
        if call_together.output is None or not all(call_key in calls for calls in calls_alone):
            continue

        outputs_alone = [calls[call_key].output for calls in calls_alone]
        inputs_agree = [
            _relative_distance(value, [calls[call_key].inputs.get(name) for calls in calls_alone]) < limit
            for name, value in call_together.inputs.items()
            if all(name in calls[call_key].inputs for calls in calls_alone)
        ]
        if not inputs_agree or not all(inputs_agree):
            continue
        if _relative_distance(call_together.output, outputs_alone) < limit:
            continue

        # Another end of the first sequence changes the outputs for other sequences only where they are mixed.
        first_sequence = sequences[0].copy()
        first_sequence[-CHANGED_TOKENS:] = np.roll(first_sequence[-CHANGED_TOKENS:], 1)
        changed_calls = _record_layer_calls(
            root, layers, _all_tokens([first_sequence, *sequences[1:]], packing)
        )
        other_tokens = slice(len(first_sequence) - 1, None)
        changed_output = changed_calls[call_key].output
        is_mixed = changed_output is None or not (
            _relative_distance(changed_output[other_tokens], [call_together.output[other_tokens]]) < limit
        )

        name = call_key[0]
        effect = "mixes rows" if is_mixed else "computes rows in one batch differently from single rows"
        return f"{name} ({type(layers[name]).__name__}) {effect}"

    return ""


def _record_layer_calls(root: nn.Module, layers: Mapping[str, nn.Module], selection: Selected) -> LayerCalls:
    """Run a forward of the selected tokens, and return the calls of its layers."""
    layer_calls: LayerCalls = {}
    call_counts = Counter[str]()
    model = transformer_of(root)
    plain_attention = text_attention(model)

    def selected_rows(value: Any) -> Tensor | None:
        """Return the rows of the selected tokens, where a tensor has a row for each token."""
        if not isinstance(value, Tensor):
            return None
        if value.shape[:2] == selection.ids.shape:
            return value.flatten(0, 1)[selection.predictor_index].clone()
        if value.dim() > 1 and len(value) == selection.ids.numel():
            return value[selection.predictor_index].clone()
        return None

    def record_call(name: str, _: nn.Module, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        arguments = {str(index): value for index, value in enumerate(args)} | kwargs
        values = {
            f"{key}.{index}": value
            for key, argument in arguments.items()
            for index, value in enumerate(argument if isinstance(argument, tuple) else (argument,))
        }
        inputs = {key: rows for key, value in values.items() if (rows := selected_rows(value)) is not None}
        output = result[0] if isinstance(result, tuple) else result
        layer_calls[name, call_counts[name]] = LayerCall(inputs, selected_rows(output))
        call_counts[name] += 1

    hooks = [
        layer.register_forward_hook(partial(record_call, name), with_kwargs=True)
        for name, layer in layers.items()
    ]
    if selection.forest is not None:
        use_forest_attention(model)
    try:
        root(selection)
    finally:
        set_text_attention(model, plain_attention)
        for hook in hooks:
            hook.remove()

    return layer_calls


def _relative_distance(together: Tensor, alone: Sequence[Tensor | None]) -> float:
    """Return the distance of two results for the same tokens, by the norm of those one by one; infinity where
    they have other shapes, as scores of keys do, whose number depends on the row."""
    rows_alone = [rows for rows in alone if rows is not None]
    if any(rows.shape[1:] != together.shape[1:] for rows in rows_alone):
        return math.inf
    expected = torch.cat(rows_alone)
    if expected.shape != together.shape:
        return math.inf
    distance = (together.double() - expected.double()).norm()
    return float(distance / expected.double().norm().clamp(min=1e-30))


def _layer_in_traceback(error: Exception, layers_by_identity: Mapping[int, str]) -> str:
    """Return the innermost layer in which an error was raised; '' outside of layers."""
    layer_names = [
        layers_by_identity.get(id(frame.f_locals.get("self")), "")
        for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    return next(filter(None, reversed(layer_names)), "")


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
