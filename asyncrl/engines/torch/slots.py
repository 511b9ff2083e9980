"""The KV cache, which has a number of slots, and the attention function that reads and writes it.

Every slot of the cache is one sequence of at most `max_len` tokens: its ids, log-probs and, per layer, keys
and values. A *cell* is `slot * columns + position`. One forward of the model takes the tokens of any cells,
packed into one sequence of length N; only attention knows about slots. The last position whose KV anyone can
need is `max_len - 2` (the last token is never fed back), so `max_len - 1` is each slot's scratch position:
padding and slots that sit out a step write there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from asyncrl.errors import ConfigError

ATTENTION = "asyncrl_slots"
_BUCKET = 32  # attention lengths are rounded up to this
_UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "position_bias")


class SlotGroup(NamedTuple):
    """r slots × width tokens of a packed step: tokens [start, start + r * width), slot by slot."""

    start: int
    slots: slice | torch.Tensor  # a slice is read in place, an index [r] is gathered
    positions: torch.Tensor  # [r, width]
    reach: int  # keys [0, reach) cover every real position


class Layout(NamedTuple):
    """Where the N tokens of one forward live, and how they attend."""

    cells: torch.Tensor  # [N]
    positions: torch.Tensor  # [N]
    groups: tuple[SlotGroup, ...]


class KVCache:
    """Ids, log-probs, keys and values of all slots, on the model's device."""

    def __init__(self, model: PreTrainedModel, slots: int, max_len: int) -> None:
        self.slots, self.max_len, self.columns = slots, max_len, max_len + 1
        self.device = model.device
        self.ids = torch.zeros(slots, self.columns, dtype=torch.long, device=self.device)
        self.logprobs = torch.zeros(slots, self.columns, dtype=torch.float32, device=self.device)
        self.keys: dict[int, torch.Tensor] = {}  # layer -> [slots, kv_heads, columns, head_dim]
        self.values: dict[int, torch.Tensor] = {}
        self._model = model
        self._layout: Layout
        self._biases: list[torch.Tensor] = []
        self._writes: dict[int, torch.Tensor] = {}  # kv_heads -> index into the flat cache per token and head
        self._allocate()

    @property
    def scratch(self) -> int:
        return self.max_len - 1

    def forward(self, layout: Layout, keep: torch.Tensor | None) -> torch.Tensor:
        """Run the model on the tokens in these cells and write their KV. Returns logits [N, vocabulary], or
        [len(keep), vocabulary] of the tokens with these indices."""
        self._layout = layout
        self._biases = [self._bias(group) for group in layout.groups]
        self._writes = {}
        output = self._model(
            input_ids=self.ids.view(-1)[layout.cells][None],
            position_ids=layout.positions[None],
            attention_mask=self._no_mask,
            use_cache=False,
            logits_to_keep=0 if keep is None else keep,
            slots=self,
        )
        return output.logits[0]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Write key and value [1, kv_heads, N, d] into their cells; query [1, heads, N, d] reads its slots.
        Returns [1, N, heads, d]."""
        keys, values = self.keys[layer], self.values[layer]
        self._write(keys, key)
        self._write(values, value)
        tokens = query[0].transpose(0, 1)
        parts = [
            _attend(tokens, group, keys, values, bias, scale)
            for group, bias in zip(self._layout.groups, self._biases, strict=True)
        ]
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[None]

    def copy(self, source: int, target: int, length: int) -> None:
        """The KV of a slot's first `length` positions to another slot."""
        for pool in (*self.keys.values(), *self.values.values()):
            pool[target, :, :length] = pool[source, :, :length]

    def wipe(self, slot: int) -> None:
        """Zero a slot and all scratch cells after values that are not finite: no mask stops a NaN."""
        for pool in (*self.keys.values(), *self.values.values()):
            pool[slot].zero_()
            pool[:, :, self.scratch].zero_()

    def _write(self, pool: torch.Tensor, states: torch.Tensor) -> None:
        heads, dim = states.shape[1], states.shape[3]
        if heads not in self._writes:
            slot, position = self._layout.cells // self.columns, self._layout.positions
            head = torch.arange(heads, device=self.device)
            self._writes[heads] = ((slot[:, None] * heads + head) * self.columns + position[:, None]).view(-1)
        pool.view(-1, dim).index_copy_(0, self._writes[heads], states[0].transpose(0, 1).reshape(-1, dim))

    def _bias(self, group: SlotGroup) -> torch.Tensor:
        """Additive mask [r, 1, width, reach]: 0 where a token may look, -inf on later positions."""
        later = torch.arange(group.reach, device=self.device) > group.positions[:, None, :, None]
        bias = torch.zeros(later.shape, dtype=self._model.dtype, device=self.device)
        return bias.masked_fill_(later, -torch.inf)

    def _allocate(self) -> None:
        """Run one token through the model to learn the shapes of its layers and that it can be served."""
        self._no_mask = torch.zeros(1, 1, 1, 1, device=self.device)
        self._model.set_attn_implementation(ATTENTION)
        probe = _Probe(self)
        with torch.no_grad():
            one = torch.zeros(1, 1, dtype=torch.long, device=self.device)
            self._model(
                input_ids=one, position_ids=one, attention_mask=self._no_mask, use_cache=False, slots=probe
            )
        if not self.keys:
            name = type(self._model).__name__
            raise ConfigError(f"the embedded engine cannot serve {name}: it has its own attention")


class _Probe:
    """Stands in for the cache in its first forward: allocates each layer's cache."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        for pools, states in ((self.cache.keys, key), (self.cache.values, value)):
            shape = (self.cache.slots, states.shape[1], self.cache.columns, states.shape[3])
            pools[layer] = torch.zeros(shape, dtype=states.dtype, device=states.device)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


def reach(length: int, max_len: int) -> int:
    """Attention length for sequences of at most `length` tokens: bucketed, so that kernels see few shapes."""
    return min(-(-length // _BUCKET) * _BUCKET, max_len)


def _attend(
    tokens: torch.Tensor,
    group: SlotGroup,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor,
    scale: float | None,
) -> torch.Tensor:
    """Attention of one group: [r * width, heads, d]. Query heads that share a KV head are folded into the
    query's length, so that keys and values are never repeated."""
    count, width = group.positions.shape
    heads, kv_heads = tokens.shape[1], keys.shape[1]
    share = heads // kv_heads
    query = tokens[group.start : group.start + count * width].reshape(count, width, kv_heads, share, -1)
    query = query.permute(0, 2, 3, 1, 4).reshape(count, kv_heads, share * width, -1)
    if share > 1 and width > 1:
        bias = bias.repeat(1, 1, share, 1)
    key, value = keys[:, :, : group.reach][group.slots], values[:, :, : group.reach][group.slots]
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale)
    out = out.view(count, kv_heads, share, width, -1).permute(0, 3, 1, 2, 4)
    return out.reshape(count * width, heads, -1)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    slots: KVCache | _Probe | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The registered attention function. Without a cache it is plain SDPA: the module can still be called."""
    if slots is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if isinstance(slots, _Probe):
        used = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
        if used:
            raise ConfigError(f"the embedded engine has no {', '.join(used)} attention; use another engine")
    return slots.attend(module.layer_idx, query, key, value, scaling), None  # type: ignore[arg-type]


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
