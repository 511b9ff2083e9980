"""The KV cache, which has a number of slots, and the attention function that reads and writes it.

Every slot of the cache is one sequence of at most `max_len` tokens: its ids, log-probs and, per layer, keys
and values. A *cell* is `slot * columns + position`. One forward of the model takes the tokens of any cells,
packed into one sequence of length N; only attention knows about slots. The last position whose KV anyone can
need is `max_len - 2` (the last token is never fed back), so `max_len - 1` is each slot's scratch position:
padding and slots that sit out a step write there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from asyncrl.errors import ConfigError
from asyncrl.shrunk import unknown
from asyncrl.weights.adapters import Adapters

ATTENTION = "asyncrl_slots"
_BUCKET = 32  # attention lengths are rounded up to this
BLOCK = 32  # ids; a prompt is known by its whole blocks


class SlotGroup(NamedTuple):
    """Holds r slots × width tokens of a packed step, slot by slot."""

    slots: torch.Tensor  # [r]
    positions: torch.Tensor  # [r, width]
    columns: torch.Tensor  # [reach] 0, 1, …: the keys that cover every real position


class Layout(NamedTuple):
    """The places of the N tokens of one forward in the cache, and how they attend: the tokens of the groups,
    one group after another."""

    cells: torch.Tensor  # [N]
    positions: torch.Tensor  # [N]
    groups: tuple[SlotGroup, ...]
    decoding: int  # so many groups, the first ones, decode: slots 0, 1, …, read in place. Others are gathered


class KVCache:
    """Holds ids, log-probs, keys and values of all slots, on the model's device."""

    def __init__(self, model: PreTrainedModel, slots: int, max_len: int) -> None:
        self.model = model
        self.slots = slots
        self.max_len = max_len
        self.columns = max_len + 1
        self.device = model.device
        self.ids = torch.zeros(slots, self.columns, dtype=torch.long, device=self.device)
        self.logprobs = torch.zeros(slots, self.columns, dtype=torch.float32, device=self.device)
        self.agents = torch.zeros(slots, dtype=torch.long, device=self.device)  # places of their adapters
        self.adapters: Adapters | None = None
        self.keys: dict[int, torch.Tensor] = {}  # layer -> [kv_heads, slots, columns, head_dim]
        self.values: dict[int, torch.Tensor] = {}
        self.share: dict[int, int] = {}  # layer -> query heads of one KV head
        self._every = torch.arange(self.columns, device=self.device)
        self._layout: Layout
        self._biases: list[torch.Tensor] = []
        self.vocabulary = self._allocate()

    @property
    def scratch(self) -> int:
        return self.max_len - 1

    @property
    def pools(self) -> tuple[torch.Tensor, ...]:
        return (*self.keys.values(), *self.values.values())

    def reach(self, length: int) -> torch.Tensor:
        """[reach] The columns 0, 1, … that sequences of at most `length` tokens attend to; reach is rounded
        up, so that kernels see few shapes."""
        return self._every[: min(-(-length // _BUCKET) * _BUCKET, self.max_len)]

    def forward(self, layout: Layout, keep: torch.Tensor) -> torch.Tensor:
        """Run the model on the tokens in these cells and write their KV. Returns logits [len(keep),
        vocabulary] of the tokens with these indices."""
        self._layout = layout
        self._biases = [self._bias(group) for group in layout.groups]
        if self.adapters is not None:
            self.adapters.use(self.agents[layout.cells // self.columns])
        output = self.model(
            input_ids=self.ids.view(-1)[layout.cells][None],
            position_ids=layout.positions[None],
            attention_mask=self._no_mask,
            use_cache=False,
            logits_to_keep=keep,
            slots=self,
        )
        return output.logits[0]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Write key and value [1, kv_heads, N, d] into their cells; query [1, heads, N, d] reads its slots.
        Returns [1, N, heads, d]."""
        keys = self.keys[layer]
        values = self.values[layer]
        for pool, states in ((keys, key), (values, value)):
            pool.flatten(1, 2).index_copy_(1, self._layout.cells, states[0])
        parts: list[torch.Tensor] = []
        start = 0
        for group, bias in zip(self._layout.groups, self._biases, strict=True):
            end = start + group.positions.numel()
            place = slice(start, end) if len(parts) < self._layout.decoding else group.slots
            key = _read(keys, group, place)
            value = _read(values, group, place)
            parts.append(_attend(query[0, :, start:end], key, value, bias, self.share[layer], scale))
            start = end
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[None]

    def move(self, froms: np.ndarray, tos: np.ndarray, length: int) -> None:
        """Slots `tos` get the first `length` positions of `froms`, the same slots in another order."""
        sources, targets = (torch.from_numpy(slots).to(self.device) for slots in (froms, tos))
        for rows in (self.ids, self.logprobs):
            rows[targets, :length] = rows[sources, :length]
        self.agents[targets] = self.agents[sources]
        for pool in self.pools:
            pool[:, targets, :length] = pool[:, sources, :length]

    def copy(self, source: int, target: int, length: int) -> None:
        """The KV of a slot's first `length` positions to another slot."""
        for pool in self.pools:
            pool[:, target, :length] = pool[:, source, :length]

    def wipe(self, slot: int) -> None:
        """Zero a slot and all scratch cells after values that are not finite: no mask stops a NaN."""
        for pool in self.pools:
            pool[:, slot].zero_()
            pool[:, :, self.scratch].zero_()

    def _bias(self, group: SlotGroup) -> torch.Tensor:
        """Additive mask [r, 1, width, reach]: 0 where a token may look, -inf on later positions."""
        later = group.columns > group.positions[:, None, :, None]
        bias = torch.zeros(later.shape, dtype=self.model.dtype, device=self.device)
        return bias.masked_fill_(later, -torch.inf)

    def _allocate(self) -> int:
        """Run one token through the model to learn the shapes of its layers and that it can be served.
        Returns the number of its logits."""
        self._no_mask = torch.zeros(1, 1, 1, 1, device=self.device)
        self.model.set_attn_implementation(ATTENTION)
        for module in self.model.modules():
            if isinstance(module, torch.nn.Embedding):
                module.padding_idx = None  # for gradients only; a recording may not compare it
        probe = _Probe(self)
        with torch.no_grad():
            one = torch.zeros(1, 1, dtype=torch.long, device=self.device)
            output = self.model(
                input_ids=one, position_ids=one, attention_mask=self._no_mask, use_cache=False, slots=probe
            )
        if not self.keys:
            name = type(self.model).__name__
            raise ConfigError(f"the embedded engine cannot serve {name}: it has its own attention")
        return output.logits.shape[-1]


class _Probe:
    """Stands in for the cache in its first forward: allocates each layer's cache."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        for pools, states in ((self.cache.keys, key), (self.cache.values, value)):
            shape = (states.shape[1], self.cache.slots, self.cache.columns, states.shape[3])
            pools[layer] = torch.zeros(shape, dtype=states.dtype, device=states.device)
        self.cache.share[layer] = query.shape[1] // key.shape[1]
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


def _read(pool: torch.Tensor, group: SlotGroup, place: slice | torch.Tensor) -> torch.Tensor:
    """The keys or values of a group's slots: [r, kv_heads, reach, d]."""
    return pool[:, :, : group.columns.shape[0]][:, place].transpose(0, 1)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor,
    share: int,
    scale: float | None,
) -> torch.Tensor:
    """Attention of one group: query [heads, r * width, d], returns [r * width, heads, d]. Query heads that
    share a KV head are folded into the query's length, so that keys and values are never repeated."""
    count = bias.shape[0]
    width = bias.shape[2]
    folded = (
        query.view(key.shape[1], share, count, width, query.shape[2]).permute(2, 0, 1, 3, 4).flatten(2, 3)
    )
    bias = bias[:, :, None].expand(-1, -1, share, -1, -1).flatten(2, 3)
    out = F.scaled_dot_product_attention(folded, key, value, attn_mask=bias, scale=scale)
    return out.unflatten(2, (share, width)).permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)


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
        used = unknown(kwargs)
        if used:
            raise ConfigError(f"the embedded engine has no {', '.join(used)} attention; use another engine")
    return slots.attend(module.layer_idx, query, key, value, scaling), None  # type: ignore[arg-type]


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


# -- the host's side: which session owns which slot, and which ids it still holds --------------------------


class Slot:
    """The host's record of one slot of the KV cache."""

    __slots__ = ("agent", "born", "busy", "held", "index", "session", "swap", "used")

    def __init__(self, index: int) -> None:
        self.index = index
        self.session: str | None = None
        self.agent = ""  # whose adapter computes it
        self.held: tuple[int, ...] = ()  # ids whose KV the slot holds
        self.born = 0  # policy version that wrote position 0: KV is written in order, so the oldest of all
        self.swap = 0  # how often weights had been swapped then
        self.busy = False
        self.used = 0

    def keep(self, ids: Sequence[int]) -> int:
        """Returns the number of leading ids that need no prefill: the common prefix with what is held, short
        of the last id (whose logits are needed). Forgets the rest."""
        limit = min(len(self.held), len(ids) - 1)
        if self.held[:limit] != tuple(ids[:limit]):
            limit = next(i for i in range(limit) if self.held[i] != ids[i])
        self.held = self.held[:limit]
        return limit


class Slots:
    """Slots by session. An idle session keeps its slot until it is needed: least recently used first."""

    def __init__(self, count: int) -> None:
        self.all = [Slot(index) for index in range(count)]
        self._owned: dict[str, Slot] = {}
        self._clock = 0

    def acquire(self, session: str) -> Slot | None:
        """The session's own slot, a free one, or that of an idle session; None when all are busy.
        Free slots are taken from below, which keeps the slots in use together."""
        slot = self._owned.get(session)
        if slot is None:
            idle = [slot for slot in self.all if not slot.busy]
            if not idle:
                return None
            slot = min(idle, key=lambda slot: slot.used if slot.session else -1)
            self._forget(slot)
            slot.session = session
            self._owned[session] = slot
        slot.busy = True
        return slot

    def move(self, sources: Sequence[int]) -> None:
        """Slot number i becomes the one that was number sources[i]."""
        self.all = [self.all[source] for source in sources]
        for index, slot in enumerate(self.all):
            slot.index = index

    def rest(self, slot: Slot, held: tuple[int, ...]) -> None:
        """The slot's turn is over and the KV of these ids may be used by the next one."""
        self._clock += 1
        slot.busy = False
        slot.held = held
        slot.used = self._clock

    def release(self, session: str) -> None:
        """Forget a session that is not busy."""
        slot = self._owned.get(session)
        if slot is not None:
            self._forget(slot)

    def _forget(self, slot: Slot) -> None:
        if slot.session is not None:
            del self._owned[slot.session]
        slot.session = None
        slot.held = ()


class Source(NamedTuple):
    """The KV of the leading `length` ids is, or will be, in `slot`."""

    slot: Slot
    length: int


class Prefixes:
    """Finds the slot that has computed the beginning of a prompt: members of a group, and prompts with the
    same examples in front, are prefilled once and copied. It knows the last slot of each block."""

    def __init__(self) -> None:
        self._slots: dict[int, Slot] = {}  # by the hash of all ids up to a block's end
        self._blocks: dict[Slot, list[int]] = {}

    def enter(self, slot: Slot, ids: Sequence[int], adapter: int) -> Source | None:
        """`slot` is given a prompt. Returns the longest beginning of it that another slot was given before
        for the same adapter; by its hash, so they are to be compared."""
        for block in self._blocks.pop(slot, ()):
            if self._slots.get(block) is slot:
                del self._slots[block]
        source = None
        blocks = []
        last = adapter
        for end in range(BLOCK, len(ids), BLOCK):  # the last id is computed in any case, for its logits
            last = hash((last, tuple(ids[end - BLOCK : end])))
            blocks.append(last)
            if last in self._slots:
                source = Source(self._slots[last], end)
        self._slots |= dict.fromkeys(blocks, slot)
        self._blocks[slot] = blocks
        return source
