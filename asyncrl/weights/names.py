"""The names of a model's weights in the files of its directory, which servers and other programs use, too.

The names of a run are those in the headers of the files that it started from (`checkpoint_pieces`), not those
that this version of transformers would write: published, exported and merged weights keep them.

transformers stacks the experts of a layer while it reads them: `experts.gate_up_proj` [experts, 2 * width,
hidden] is made of `experts.0.gate_proj.weight`, `experts.0.up_proj.weight`, `experts.1.gate_proj.weight`, …
Files and servers have the experts one by one. Each expert is one contiguous piece of the stacked tensor, so
splitting means reading piece by piece: nothing is copied, and a tensor sharded by experts stays sharded.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    MergeModulelist,
    PrefixChange,
    SplitModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from asyncrl.model_class import is_within
from asyncrl.weights.model_files import StoredTensor, TensorsByPart


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


def pieces_in_files(model: PreTrainedModel, file_tensors: Mapping[str, StoredTensor]) -> list[FilePiece]:
    """List the parts of the model that the tensors of files hold, each under its name in the files. Tensors
    that the model does not hold, or holds converted in another way than by stacking experts or joining rows,
    are left out."""
    state = model.state_dict(keep_vars=True)
    renamings, converters = split_rules(get_model_conversion_mapping(model))

    pieces = list[FilePiece]()
    for file_name in sorted(file_tensors, key=dot_natural_key):  # some rules depend on the order
        piece: FilePiece | None = None
        name, pattern = rename_source_key(file_name, renamings, converters, model.base_model_prefix, state)
        if pattern is not None and name in state:
            converter = next(rule for rule in converters if pattern in rule.source_patterns)
            parameter = FilePiece(name, name, tuple(state[name].shape))
            piece = _converted_piece(file_name, pattern, converter, parameter, file_tensors)
        if piece is None and pattern is None and name in state:
            piece = FilePiece(file_name, name, tuple(state[name].shape))
        if piece is None and file_name in state:  # files may hold a tensor as the model does
            piece = FilePiece(file_name, file_name, tuple(state[file_name].shape))
        if piece is not None and piece.shape == file_tensors[file_name].shape:
            pieces.append(piece)

    return pieces


def _converted_piece(
    file_name: str,
    pattern: str,
    rule: WeightConverter,
    parameter: FilePiece,
    file_tensors: Mapping[str, StoredTensor],
) -> FilePiece | None:
    """Return the part of `parameter` that a tensor of the files becomes: one expert of a stack, or some rows
    of several tensors joined. None for other conversions. `pattern`: the pattern of `rule` that the tensor's
    name matches."""
    operations = [(type(operation), getattr(operation, "dim", None)) for operation in rule.operations]
    position = rule.source_patterns.index(pattern)

    if operations == [(Concatenate, 0)]:
        earlier_patterns = rule.source_patterns[:position]
        earlier_names = [file_name.replace(pattern, earlier) for earlier in earlier_patterns]
        shape = file_tensors[file_name].shape
        if pattern not in file_name or not {*earlier_names} <= file_tensors.keys():
            return None  # the pattern is no plain text, or files lack the rows before
        rows_before = sum(file_tensors[name].shape[0] for name in earlier_names)
        return FilePiece(file_name, parameter.name, shape, rows_before * math.prod(shape[1:]))

    if operations not in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)]):
        return None

    number_match = re.search(pattern.replace(".*.", r"\.(\d+)\."), file_name)
    if number_match is None:
        return None
    _, rows, *inner_shape = parameter.shape
    part_count = len(rule.source_patterns)
    shape = (rows // part_count, *inner_shape)
    index = int(number_match[1]) * part_count + position
    return FilePiece(file_name, parameter.name, shape, index * math.prod(shape))


def checkpoint_pieces(
    model: PreTrainedModel, tensors: Mapping[str, Tensor], file_tensors: Mapping[str, StoredTensor]
) -> tuple[FilePiece, ...]:
    """List the tensors in files for `tensors` of the model, by name: in the order of `tensors`, and pieces of
    a tensor as in memory. A tensor has the names of the files, `file_tensors`, where these hold it unchanged,
    whole or in pieces; else it has the names that `save_pretrained` would give it."""
    state = model.state_dict(keep_vars=True)
    pieces_of_tensor = defaultdict[int, dict[int, FilePiece]](dict)
    # Files may hold a tensor under several names, if the model ties them. The name in `tensors` is used:
    # servers ignore the output layer's name if it is tied to the embedding.
    for piece in sorted(
        pieces_in_files(model, file_tensors), key=lambda piece: piece.parameter not in tensors
    ):
        pieces_of_tensor[id(state[piece.parameter])].setdefault(piece.offset, piece)

    pieces_by_name = {
        name: [piece._replace(parameter=name) for _, piece in sorted(stored_pieces.items())]
        for name, tensor in tensors.items()
        if (stored_pieces := pieces_of_tensor[id(state.get(name))])
        and sum(piece.numel for piece in stored_pieces.values()) == tensor.numel()
    }

    absent_names = tensors.keys() - pieces_by_name.keys()
    if absent_names:
        for piece in file_pieces(model, tensors):
            if piece.parameter in absent_names:
                pieces_by_name.setdefault(piece.parameter, []).append(piece)

    return tuple(piece for name in tensors for piece in pieces_by_name[name])


def sort_tensors(
    model: PreTrainedModel,
    file_tensors: Mapping[str, StoredTensor],
    renamed: Mapping[str, str],
    frozen_part_names: tuple[str, ...],
) -> TensorsByPart:
    """Sort the tensors in files by the parts of the model. `renamed`: see `model_names`."""
    state = model.state_dict()
    tied_names = model.all_tied_weights_keys  # by the name of the tensor that holds their values
    names_in_model = {*renamed.values()}
    parts = TensorsByPart({}, {}, {})

    for file_name, model_name in sorted(renamed.items()):
        shape = file_tensors[file_name].shape
        frozen_part = next((part for part in frozen_part_names if is_within(model_name, (part,))), None)
        if model_name not in state and file_name not in state:
            parts.passed_on[file_name] = shape
        elif frozen_part is not None:
            parts.frozen.setdefault(frozen_part, {})[file_name] = shape
        elif tied_names.get(model_name) not in names_in_model:  # else the values are there twice
            parts.trained[file_name] = shape

    return parts


def model_names(model: PreTrainedModel, file_names: Iterable[str]) -> dict[str, str]:
    """Return the model's name of each tensor in the files, as transformers renames it."""
    renamings, converters = split_rules(get_model_conversion_mapping(model))
    state = model.state_dict()
    return {
        name: rename_source_key(name, renamings, converters, model.base_model_prefix, state)[0]
        for name in sorted(file_names, key=dot_natural_key)
    }


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
