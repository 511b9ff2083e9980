"""The names of a model's weights in Hugging Face's files, which servers and other programs use.

transformers stacks the experts of a layer while it reads them: `experts.gate_up_proj` [experts, 2 * width,
hidden] is made of `experts.0.gate_proj.weight`, `experts.0.up_proj.weight`, `experts.1.gate_proj.weight`, …
Files and servers have the experts one by one. Each expert is one contiguous piece of the stacked tensor, so
splitting means reading piece by piece: nothing is copied, and a tensor sharded by experts stays sharded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    PrefixChange,
    SplitModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)


class FilePiece(NamedTuple):
    """A tensor of the files, `name`, as part of a model's `parameter`, behind `offset` numbers."""

    name: str
    parameter: str
    shape: tuple[int, ...]
    offset: int = 0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def view_in(self, tensor: Tensor, start: int = 0) -> Tensor:
        """Return a view of the piece in `tensor`, which holds the parameter without the first `start`
        numbers."""
        if tuple(tensor.shape) == self.shape:
            return tensor
        position = self.offset - start
        return tensor.view(-1)[position : position + self.numel].view(self.shape)


def file_pieces(model: PreTrainedModel, tensors: Mapping[str, Tensor] | None = None) -> tuple[FilePiece, ...]:
    """List the tensors that `save_pretrained` would write for the parameters, or for other `tensors` of the
    model by name: in the order of the tensors, and pieces of a tensor as in memory. A tensor with another
    conversion than stacking experts keeps the model's name."""
    tensors = dict(model.named_parameters()) if tensors is None else tensors
    mapping = get_model_conversion_mapping(model, add_legacy=False)[::-1]
    # Files may have or lack such a prefix; `save_pretrained` does not know either.
    renamings, converters = split_rules(
        rule.reverse_transform() for rule in mapping if not isinstance(rule, PrefixChange)
    )

    pieces_by_parameter = {}
    for parameter in sorted(tensors, key=dot_natural_key):  # some rules depend on the order
        name, pattern = rename_source_key(parameter, renamings, converters, reverse=True)
        matching_rules = [rule for rule in converters if pattern in rule.source_patterns]
        stacked_names = _stacked_names(name, matching_rules[0]) if matching_rules else (name,)
        pieces_by_parameter[parameter] = tuple(
            _cut_pieces(stacked_names or (parameter,), parameter, tuple(tensors[parameter].shape))
        )

    return tuple(piece for parameter in tensors for piece in pieces_by_parameter[parameter])


def split_rules(rules: Iterable[Any]) -> tuple[list[WeightRenaming], list[WeightConverter]]:
    """Return the rules of a model's conversion by kind, as `rename_source_key` takes them."""
    rules = list(rules)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    return renamings, [rule for rule in rules if isinstance(rule, WeightConverter)]


def saved_buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the buffers that `save_pretrained` writes beside the parameters, by the model's names:
    persistent buffers, a shared buffer under its last name that is not tied to another tensor."""
    buffers = dict(model.named_buffers(remove_duplicate=False))
    unsaved_names = {name for name, _ in model.named_non_persistent_buffers(remove_duplicate=False)}
    names = sorted(buffers.keys() - unsaved_names - {*(model._keys_to_ignore_on_save or ())})
    names.sort(key=lambda name: name not in model.all_tied_weights_keys)
    return {name: buffers[name] for name in {id(buffers[name]): name for name in names}.values()}


def _stacked_names(name: str, rule: WeightConverter) -> tuple[str, ...]:
    """Return the names of the tensors side by side in each expert of a stack, with `*` for the expert's
    number; () for another conversion. `rule` splits the stack, and `name` is the first of its names."""
    *split_operations, stack = rule.operations
    if not isinstance(stack, SplitModulelist) or stack.dim != 0 or rule.target_patterns[0] not in name:
        return ()

    if not all(
        isinstance(operation, Chunk) and (operation.dim, operation.num_shards_attribute) == (1, None)
        for operation in split_operations
    ):
        return ()

    return tuple(name.replace(rule.target_patterns[0], part) for part in rule.target_patterns)


def _cut_pieces(names: tuple[str, ...], parameter: str, shape: tuple[int, ...]) -> Iterator[FilePiece]:
    if "*" not in names[0]:
        yield FilePiece(names[0], parameter, shape)
        return

    experts, rows, *inner_shape = shape
    piece_shape = (rows // len(names), *inner_shape)
    for index in range(experts * len(names)):
        expert, name_index = divmod(index, len(names))
        yield FilePiece(
            names[name_index].replace("*", str(expert)),
            parameter,
            piece_shape,
            index * math.prod(piece_shape),
        )
