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
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from asyncrl.state_layers import Convolve, Recurrence
from asyncrl.trainer.prefix_tree import Forest
from asyncrl.trainer.staging import to_device

CHUNK_TOKENS = 64  # functions of transformers compute rows in chunks of so many tokens
MAX_PADDING = 1.25  # the longest row of a call has at most so many times the chunks of the shortest


@dataclass(frozen=True)
class NodeCall:
    """Describes one call for nodes of a level. `token_index` [rows, longest]: the tokens of the rows, padded
    with 0. `output_index`: where the nodes' tokens lie in the flattened rows; None: there is no padding.

    `parents`: the call and the row in it whose final state each node continues; empty on the first level.
    `has_children`: other nodes continue the states of these nodes. `sequences`: for a kernel, the sequences
    of its only row.
    """

    token_index: Tensor
    output_index: Tensor | None
    parents: tuple[tuple[int, int], ...]
    has_children: bool
    sequences: Tensor | None = None

    def rows(self, values: Tensor) -> Tensor:
        """Return the values [T, ...] of the tokens of the rows: [rows, longest, ...]."""
        return values.index_select(0, self.token_index.flatten()).unflatten(0, self.token_index.shape)


class ForestStates:
    """Computes the layers with a state. Layers share the indices."""

    def __init__(self, forest: Forest, device: torch.device) -> None:
        self._forest = forest
        self._device = device
        self._convolution_indices: dict[int, tuple[Tensor, Tensor]] = {}
        self._calls_by_argument: dict[str, tuple[list[NodeCall], Tensor]] = {}

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
        if argument not in self._calls_by_argument:
            self._calls_by_argument[argument] = _node_calls(self._forest, argument, self._device)
        node_calls, output_order = self._calls_by_argument[argument]

        outputs = list[Tensor]()
        final_states = list[Tensor | None]()
        for node_call in node_calls:
            rows = {name: node_call.rows(tensor[0]) for name, tensor in recurrence.tokens.items()}
            parent_states = [_state_of(final_states, *parent) for parent in node_call.parents]
            output, final_state = recurrence.run(
                rows,
                torch.stack(parent_states) if parent_states else None,
                returns_state=node_call.has_children,
                sequences=node_call.sequences,
            )
            output = output.flatten(0, 1)
            index = node_call.output_index
            outputs.append(output if index is None else output.index_select(0, index))
            final_states.append(final_state if node_call.has_children else None)

        return torch.cat(outputs).index_select(0, output_order)[None]


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


def _node_calls(
    forest: Forest, sequence_argument: str, device: torch.device
) -> tuple[list[NodeCall], Tensor]:
    """Return the calls, level by level, and the index of each token in their concatenated outputs."""
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
    node_calls = list[NodeCall]()
    for numbers, is_one_row in groups:
        tensors = _one_row(nodes, numbers, sequence_argument) if is_one_row else _padded_rows(nodes, numbers)
        token_index, output_index, sequences = (
            None if tensor is None else to_device([tensor], device)[0] for tensor in tensors
        )
        assert token_index is not None
        parent_numbers = [nodes[number].parent for number in numbers]
        parent_rows = tuple(call_of_node[parent] for parent in parent_numbers if parent is not None)
        has_children = any(number in parents for number in numbers)
        node_calls.append(NodeCall(token_index, output_index, parent_rows, has_children, sequences))

    computed_tokens = np.concatenate([nodes[number].tokens for numbers, _ in groups for number in numbers])
    (output_order,) = to_device([torch.from_numpy(np.argsort(computed_tokens))], device)
    return node_calls, output_order


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


def _padded_rows(nodes: Sequence[ForestNode], numbers: Sequence[int]) -> tuple[Tensor, Tensor | None, None]:
    """Return the token index and the output index of nodes that are a row each."""
    lengths = [len(nodes[number].tokens) for number in numbers]
    longest = max(lengths)
    token_index = np.zeros((len(numbers), longest), dtype=np.int64)
    for row, number in enumerate(numbers):
        token_index[row, : lengths[row]] = nodes[number].tokens

    is_padded = min(lengths) < longest
    output_index = [row * longest + np.arange(length) for row, length in enumerate(lengths)]
    return (
        torch.from_numpy(token_index),
        torch.from_numpy(np.concatenate(output_index)) if is_padded else None,
        None,
    )


def _one_row(
    nodes: Sequence[ForestNode], numbers: Sequence[int], sequence_argument: str
) -> tuple[Tensor, None, Tensor]:
    """Return the token index of nodes that follow each other in one row, and the kernel's argument."""
    lengths = torch.tensor([len(nodes[number].tokens) for number in numbers])
    token_index = np.concatenate([nodes[number].tokens for number in numbers])[None]
    if sequence_argument == "cu_seqlens":
        sequences = pad(lengths.cumsum(0), (1, 0))
    else:
        sequences = torch.arange(len(numbers), dtype=torch.int32).repeat_interleave(lengths)[None]

    return torch.from_numpy(token_index), None, sequences
