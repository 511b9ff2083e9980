"""Sequence parallelism over heads (DeepSpeed Ulysses, arXiv 2309.14509): S ranks compute one packed sequence.

    T/S tokens, all heads ──► T tokens, 1/S of the heads ── attention ──► T/S tokens, all heads

Everything but attention is computed token by token. What is computed of the selected tokens is gathered, so
all S ranks have the same loss. The gradient of an exchange is its adjoint, so the gradients of all S ranks
add up to that of the sum of their equal losses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import pad

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class SequenceRanks:
    """This rank, number `index` of the `count` ranks of `group`, which compute the same micro-batch."""

    group: dist.ProcessGroup
    index: int
    count: int

    def attend(self, query: Tensor, key: Tensor, value: Tensor, size: int, attend: Attend) -> Tensor:
        """Attention among `size` tokens, of which this rank has t, perhaps with padding behind the last one:
        query [heads, t, d], key and value [kv_heads, t, d]; returns [t, heads, d]. `attend` computes it of
        some heads and all tokens. KV heads that are no multiple of the ranks are repeated."""
        copies = self.count // gcd(self.count, key.shape[0])
        key, value = (x.repeat_interleave(copies, 0) for x in (key, value))
        query, key, value = (self.swap(x)[:, :size] for x in (query, key, value))
        found = attend(query, key, value)
        return self.swap(pad(found, (0, 0, 0, 0, 0, self.count * self.width(size) - size)))

    def swap(self, x: Tensor) -> Tensor:
        """Deal out the first dimension and collect the second: [a, b, d] to [a/S, S·b, d]."""
        parts: Tensor = _Exchange.apply(x, self.group)
        return parts.unflatten(0, (self.count, -1)).transpose(0, 1).flatten(1, 2)

    def gather(self, mine: Tensor, most: int) -> Tensor:
        """[n] of each rank, at most `most`, filled up with 0: [S·most]."""
        filled = pad(mine, (0, most - len(mine)))
        return self.swap(filled.expand(self.count, -1)[..., None]).flatten()

    def width(self, size: int) -> int:
        """Tokens of one rank's part of `size`, padding included."""
        return -(-size // self.count)


class _Exchange(Function):
    """An all-to-all of equal parts of the first dimension."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchange(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _exchange(gradient, ctx.group), None


def _exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    found = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(found, x.contiguous(), group=group)
    return found
