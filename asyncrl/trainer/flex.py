"""Attention over a forest on a GPU: torch's flex attention, with the forest's mask. Not run on a GPU yet;
`make gpu-check` does."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from asyncrl.trainer.prefix_tree import Forest

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Scoring(NamedTuple):
    """How a layer makes its scores. `window`: tokens that one sees, itself among them; `softcap`: the bound
    of a tanh. None: none."""

    scale: float
    window: int | None = None
    softcap: float | None = None


class FlexKernel:
    """Nodes are numbered depth first, so a node's descendants are those up to its last one: a token sees
    another if its node is a descendant of the other's, or the same, and its position is not before.

    Per token [T]: `node`, `last`, the last descendant of its node, and `position`.
    """

    def __init__(self, forest: Forest, device: torch.device) -> None:
        node = torch.arange(len(forest.sizes)).repeat_interleave(torch.tensor(forest.sizes))
        last = _last_descendants(forest).repeat_interleave(torch.tensor(forest.sizes))
        self.node, self.last = node.to(device), last.to(device)
        self.position = torch.from_numpy(forest.positions).to(device)
        self._masks: dict[int | None, BlockMask] = {}

    def visible(self, window: int | None) -> MaskMod:
        """Whether the token at index q sees that at index k; any shapes."""
        node, last, position = self.node, self.last, self.position

        def seen(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            under = (node[k] <= node[q]) & (node[q] <= last[k])
            back = position[q] - position[k]
            near = back >= 0
            return under & (near if window is None else near & (back < window))

        return seen

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """As `AttentionKernel`."""
        found = _flex(query.is_cuda)(
            query[None],
            key[None],
            value[None],
            score_mod=None if scoring.softcap is None else _capped(scoring.softcap),
            block_mask=self._block_mask(scoring.window),
            scale=scoring.scale,
            enable_gqa=query.shape[0] != key.shape[0],
        )
        return found[0].transpose(0, 1)

    def _block_mask(self, window: int | None) -> BlockMask:
        if window not in self._masks:
            size = len(self.node)
            make = _block_masks(self.node.is_cuda)
            self._masks[window] = make(self.visible(window), None, None, size, size, self.node.device)
        return self._masks[window]


def _capped(bound: float) -> Callable[..., Tensor]:
    def capped(score: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return bound * torch.tanh(score / bound)

    return capped


@cache
def _flex(compiled: bool) -> Any:
    """Not compiled it would hold a T x T matrix of scores. Shapes are dynamic: every batch has another."""
    return torch.compile(flex_attention, dynamic=True) if compiled else flex_attention


@cache
def _block_masks(compiled: bool) -> Any:
    """Not compiled it would hold a T x T mask."""
    return torch.compile(create_block_mask, dynamic=True) if compiled else create_block_mask


def _last_descendants(forest: Forest) -> Tensor:
    """Of each node, the number of its last descendant."""
    node_of = torch.arange(len(forest.sizes)).repeat_interleave(torch.tensor(forest.sizes))
    last = torch.arange(len(forest.sizes))
    for number, path in enumerate(forest.paths):  # in order: the last one that has a node above it remains
        last[node_of[torch.from_numpy(path)].unique()] = number
    return last
