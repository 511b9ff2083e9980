"""Attention over a forest on a GPU: torch's flex attention, with the forest's mask. Not run on a GPU yet;
`make gpu-check` does."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad

from asyncrl.trainer.prefix_tree import Forest

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
BLOCK = 128  # tokens of a block; keys that none of its queries sees are not computed


class Scoring(NamedTuple):
    """Settings of a layer's attention scores. `window`: tokens that one sees, itself among them; `softcap`:
    the bound of a tanh. None: none."""

    scale: float
    window: int | None = None
    softcap: float | None = None


class FlexKernel:
    """Nodes lie in the sequence depth first, so what is below a node ends where its last descendant does, at
    its `end`: a token sees those up to itself whose `end` comes after it. Layers share the masks.

    Per token [T]: `end`, and `position` in its row. Numbers that a kernel reads are tensors: with dynamic
    shapes torch cannot compile captured Python numbers.
    """

    def __init__(self, forest: Forest, device: torch.device) -> None:
        end = np.empty(len(forest.ids), dtype=np.int32)
        for path, stop in zip(forest.paths, np.cumsum(forest.sizes), strict=True):
            end[path] = stop  # in order: a node on several paths keeps the last
        position = forest.positions.astype(np.int32)
        self.end, self.position = (torch.from_numpy(x).to(device) for x in (end, position))
        self._masks: dict[int | None, BlockMask] = {}
        self._caps: dict[float, Callable[..., Tensor]] = {}

    def visible(self, window: int | None) -> MaskMod:
        """True where the token at index q sees that at index k; any shapes."""
        end, position = self.end, self.position

        def seen(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (k <= q) & (q < end[k])

        if window is None:
            return seen
        reach = torch.tensor(window, device=end.device)

        def near(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (k <= q) & (q < end[k]) & (position[q] - position[k] < reach)

        return near

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Computes attention, see `AttentionKernel`."""
        if scoring.window not in self._masks:
            self._masks[scoring.window] = self.block_mask(scoring.window)
        if scoring.softcap is not None and scoring.softcap not in self._caps:
            self._caps[scoring.softcap] = _capped(query.new_tensor(scoring.softcap))
        found = _flex(query.is_cuda)(
            query[None],
            key[None],
            value[None],
            score_mod=None if scoring.softcap is None else self._caps[scoring.softcap],
            block_mask=self._masks[scoring.window],
            scale=scoring.scale,
            enable_gqa=query.shape[0] != key.shape[0],
            kernel_options={"BACKEND": "TRITON"},  # one kernel for short rows, too
        )
        return found[0].transpose(0, 1)

    def block_mask(self, window: int | None) -> BlockMask:
        """Find, from the extremes of both, which blocks of keys a block of queries sees in part, and which
        all its queries see whole. With a window, some blocks that none sees count as seen in part."""
        size = len(self.end)
        first = torch.arange(0, size, BLOCK, dtype=torch.int32, device=self.end.device)
        last, short = first + BLOCK - 1, -size % BLOCK
        ends, places = (pad(x, (0, short), value=size).view(-1, BLOCK) for x in (self.end, self.position))
        some = (first <= first[:, None]) & (ends.amax(1) > first[:, None])
        whole = (first < first[:, None]) & (ends.amin(1) > last[:, None])
        if window is not None:
            low, high = places.amin(1), pad(self.position, (0, short)).view(-1, BLOCK).amax(1)
            some &= low[:, None] - high < window
            whole &= high[:, None] - low < window
        seen, lengths = self.visible(window), (size, size)
        in_part, entire = _listed(some & ~whole), _listed(whole)
        return BlockMask.from_kv_blocks(
            *in_part, *entire, mask_mod=seen, BLOCK_SIZE=BLOCK, seq_lengths=lengths
        )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many of each row are true, and which, in BlockMask's form."""
    order = blocks.int().argsort(dim=1, descending=True, stable=True)
    return blocks.sum(1, dtype=torch.int32)[None, None], order.int()[None, None]


def _capped(bound: Tensor) -> Callable[..., Tensor]:
    def capped(score: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return bound * torch.tanh(score / bound)

    return capped


@cache
def _flex(compiled: bool) -> Any:
    """Not compiled it would hold a T x T matrix of scores. Shapes are dynamic: every batch has another."""
    if not compiled:
        return flex_attention
    from torch._dynamo import config  # a slow import, which only a GPU needs

    # Compiled by themselves are types, windows, caps, numbers of heads, one block, and what has no gradient:
    # after 8 of them torch would go on without compiling.
    config.recompile_limit = max(config.recompile_limit, 64)
    return torch.compile(flex_attention, dynamic=True)
