"""Computes layers with a state over a forest of sequences: a node continues the state of its parent.

    nodes      [a b] ─┬─ [c d]      level 0   [a b] and [f g], from no state
               [f g]  └─ [e]        level 1   [c d] and [e], each from the state behind b

A convolution needs the last tokens of the ancestors only. Recurrences are computed level by level. Within a
level, nodes of about the same length are the rows of one call; a kernel that takes the boundaries of
sequences gets a whole level as one row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from asyncrl.state_layers import Convolve, Recurrence
from asyncrl.trainer.prefix_tree import Forest
from asyncrl.trainer.staging import to_device

CHUNK_TOKENS = 64  # functions of transformers compute rows in chunks of so many tokens
MAX_PADDING = 1.25  # the longest row of a call has at most so many times the chunks of the shortest


@dataclass(frozen=True)
class NodeCall:
    """Describes one call for nodes of a level: `rows` of `width` tokens.

    `parents`: the call and the row in it whose final state each node continues; empty on the first level.
    `has_children`: other nodes continue the states of these nodes. `sequences`: for a kernel, the sequences
    of its only row.
    """

    rows: int
    width: int
    parents: tuple[tuple[int, int], ...]
    has_children: bool
    sequences: Tensor | None = None


class CallLayout(NamedTuple):
    """Maps T tokens to C cells: the positions of all calls' rows, one behind another. `token_index` [C]: the
    token in each cell, 0 for padding. `cell_index` [T]: the cell of each token."""

    calls: list[NodeCall]
    token_index: Tensor
    cell_index: Tensor

    def rows_of(self, values: Tensor) -> list[Tensor]:
        """Return the values [T, ...] in the rows of each call: [rows, width, ...]."""
        cells = _TokensToCells.apply(values, self.token_index, self.cell_index)
        parts = cells.split([call.rows * call.width for call in self.calls])
        return [
            part.unflatten(0, (call.rows, call.width)) for part, call in zip(parts, self.calls, strict=True)
        ]

    def tokens_of(self, rows: Sequence[Tensor]) -> Tensor:
        """Return the values of the tokens [T, ...] from the rows of each call."""
        cells = torch.cat([call_rows.flatten(0, 1) for call_rows in rows])
        tokens: Tensor = _CellsToTokens.apply(cells, self.cell_index)
        return tokens


class _TokensToCells(Function):
    """Copies each token to its cell. A token has one cell, so the gradient is gathered, not added up; what
    autograd would add from padding is zero."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, token_index: Tensor, cell_index: Tensor) -> Tensor:
        ctx.save_for_backward(cell_index)
        return values.index_select(0, token_index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (cell_index,) = ctx.saved_tensors
        return gradient.index_select(0, cell_index), None, None


class _CellsToTokens(Function):
    """Copies each token from its cell; the gradient of padding is zero."""

    @staticmethod
    def forward(ctx: Any, cells: Tensor, cell_index: Tensor) -> Tensor:
        ctx.save_for_backward(cell_index)
        ctx.cell_count = len(cells)
        return cells.index_select(0, cell_index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (cell_index,) = ctx.saved_tensors
        cell_gradients = gradient.new_zeros(ctx.cell_count, *gradient.shape[1:])
        return cell_gradients.index_copy_(0, cell_index, gradient), None


class ForestStates:
    """Computes the layers with a state. Layers share the indices."""

    def __init__(self, forest: Forest, device: torch.device) -> None:
        self._forest = forest
        self._device = device
        self._convolution_indices: dict[int, tuple[Tensor, Tensor]] = {}
        self._layouts_by_argument: dict[str, CallLayout] = {}

    def convolve(self, convolve: Convolve, inputs: Tensor, reach: int) -> Tensor:
        """Compute a convolution, see StateLayout: of each node behind the last `reach` tokens of its
        ancestors, all in one row."""
        if reach not in self._convolution_indices:
            indices = _convolution_indices(self._forest, reach)
            input_index, output_index = to_device([*map(torch.from_numpy, indices)], self._device)
            self._convolution_indices[reach] = input_index, output_index

        input_index, output_index = self._convolution_indices[reach]
        tokens_and_zero = pad(inputs[0].t(), (0, 0, 0, 1))
        outputs = convolve(tokens_and_zero.index_select(0, input_index).t()[None])

        return outputs[0].t().index_select(0, output_index).t()[None]

    def recur(self, recurrence: Recurrence) -> Tensor:
        """Compute a recurrence, see StateLayout."""
        argument = recurrence.sequence_argument
        if argument not in self._layouts_by_argument:
            self._layouts_by_argument[argument] = _call_layout(self._forest, argument, self._device)
        layout = self._layouts_by_argument[argument]
        rows_by_argument = {name: layout.rows_of(tensor[0]) for name, tensor in recurrence.tokens.items()}

        outputs = list[Tensor]()
        final_states = list[Tensor | None]()
        for index, call in enumerate(layout.calls):
            parent_states = [_state_of(final_states, *parent) for parent in call.parents]
            output, final_state = recurrence.run(
                {name: rows[index] for name, rows in rows_by_argument.items()},
                torch.stack(parent_states) if parent_states else None,
                returns_state=call.has_children,
                sequences=call.sequences,
            )
            outputs.append(output)
            final_states.append(final_state if call.has_children else None)

        return layout.tokens_of(outputs)[None]


def _state_of(final_states: Sequence[Tensor | None], call: int, row: int) -> Tensor:
    states = final_states[call]
    assert states is not None, "the nodes of this call have children"
    return states[row]


def _convolution_indices(forest: Forest, reach: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens that are the inputs of the convolution's row, with the index behind the last token
    for a zero, and where the outputs of the forest's tokens lie in the row."""
    zero_index = len(forest.ids)
    inputs = list[np.ndarray]()
    outputs = list[np.ndarray]()
    end = 0

    for path, size in zip(forest.paths, forest.sizes, strict=True):
        ancestors = path[: len(path) - size][-reach:] if reach else path[:0]
        missing = np.full(reach - len(ancestors), zero_index, dtype=np.int64)
        inputs += [missing, ancestors, path[-size:]]
        outputs.append(np.arange(end + reach, end + reach + size))
        end += reach + size

    return np.concatenate(inputs), np.concatenate(outputs)


class ForestNode(NamedTuple):
    """A node of a forest: the indices of its own tokens, its parent's number, and the number of ancestors."""

    tokens: np.ndarray
    parent: int | None
    level: int


def _nodes(forest: Forest) -> list[ForestNode]:
    nodes = list[ForestNode]()
    node_by_last_token = dict[int, int]()
    for number, (path, size) in enumerate(zip(forest.paths, forest.sizes, strict=True)):
        ancestors = path[: len(path) - size]
        parent = node_by_last_token[int(ancestors[-1])] if len(ancestors) else None
        level = 0 if parent is None else nodes[parent].level + 1
        nodes.append(ForestNode(path[-size:], parent, level))
        node_by_last_token[int(path[-1])] = number

    return nodes


def _call_layout(forest: Forest, sequence_argument: str, device: torch.device) -> CallLayout:
    """Return the calls, level by level, and the cells of the tokens in their rows."""
    nodes = _nodes(forest)
    parents = {node.parent for node in nodes}
    groups = list[tuple[list[int], bool]]()  # nodes of a call, and whether they are sequences of one row
    for level in range(max(node.level for node in nodes) + 1):
        numbers = [number for number, node in enumerate(nodes) if node.level == level]
        inner = [number for number in numbers if number in parents]
        leaves = [number for number in numbers if number not in parents]
        if sequence_argument == "cu_seqlens":
            groups.append((numbers, True))
            continue

        # Without padding behind its last token, a row's final state is that of its node.
        groups += [(group, False) for group in _groups_of_length(nodes, inner)]
        if sequence_argument == "seq_idx" and level == 0 and leaves:
            groups.append((leaves, True))
        else:
            groups += [(group, False) for group in _groups_of_like_length(nodes, leaves)]

    call_of_node = {
        number: (call, row) for call, (numbers, _) in enumerate(groups) for row, number in enumerate(numbers)
    }
    calls = list[NodeCall]()
    cells = list[np.ndarray]()  # the token in each cell, by call
    cell_index = np.empty(len(forest.ids), dtype=np.int64)
    end = 0
    for numbers, is_one_row in groups:
        lengths = [len(nodes[number].tokens) for number in numbers]
        rows = 1 if is_one_row else len(numbers)
        width = sum(lengths) if is_one_row else max(lengths)
        row_starts = np.cumsum([0, *lengths[:-1]]) if is_one_row else np.arange(rows) * width
        call_cells = np.zeros(rows * width, dtype=np.int64)
        for number, row_start in zip(numbers, row_starts.tolist(), strict=True):
            tokens = nodes[number].tokens
            call_cells[row_start : row_start + len(tokens)] = tokens
            cell_index[tokens] = np.arange(end + row_start, end + row_start + len(tokens))
        cells.append(call_cells)
        end += rows * width

        parent_numbers = [nodes[number].parent for number in numbers]
        parent_rows = tuple(call_of_node[parent] for parent in parent_numbers if parent is not None)
        has_children = any(number in parents for number in numbers)
        sequences = None
        if is_one_row:
            (sequences,) = to_device([_sequences_of_row(lengths, sequence_argument)], device)
        calls.append(NodeCall(rows, width, parent_rows, has_children, sequences))

    indices = [torch.from_numpy(np.concatenate(cells)), torch.from_numpy(cell_index)]
    return CallLayout(calls, *to_device(indices, device))


def _groups_of_length(nodes: Sequence[ForestNode], numbers: Sequence[int]) -> list[list[int]]:
    """Return groups of nodes that have the same number of tokens."""
    groups = defaultdict[int, list[int]](list)
    for number in numbers:
        groups[len(nodes[number].tokens)].append(number)
    return list(groups.values())


def _groups_of_like_length(nodes: Sequence[ForestNode], numbers: Sequence[int]) -> list[list[int]]:
    """Return groups of nodes that have about the same number of chunks."""
    groups = list[list[int]]()
    most_chunks = 0
    for number in sorted(numbers, key=lambda number: -len(nodes[number].tokens)):
        chunks = -(-len(nodes[number].tokens) // CHUNK_TOKENS)
        if not groups or most_chunks > MAX_PADDING * chunks:
            groups.append([])
            most_chunks = chunks
        groups[-1].append(number)

    return groups


def _sequences_of_row(lengths: Sequence[int], sequence_argument: str) -> Tensor:
    """Return a kernel's argument for nodes of these lengths that follow each other in one row."""
    if sequence_argument == "cu_seqlens":
        return pad(torch.tensor(lengths).cumsum(0), (1, 0))
    return torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(torch.tensor(lengths))[None]
