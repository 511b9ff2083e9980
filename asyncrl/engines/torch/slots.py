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

from asyncrl.attention_rules import READ_ARGUMENTS, unknown_arguments
from asyncrl.errors import ConfigError
from asyncrl.weights.adapters import Adapters

ATTENTION = "asyncrl_slots"
_LENGTH_BUCKET = 32  # attention lengths are rounded up to this
PREFIX_BLOCK = 32  # ids; a prompt is known by its whole blocks


class SlotGroup(NamedTuple):
    """Holds r slots × width tokens of a packed step, slot by slot."""

    slots: torch.Tensor  # [r]
    positions: torch.Tensor  # [r, width]
    columns: torch.Tensor  # [reach] 0, 1, …: the keys that cover every real position


class Layout(NamedTuple):
    """Places the N tokens of one forward in the cache, and says how these tokens attend: the tokens of the
    groups, one group after another."""

    cells: torch.Tensor  # [N]
    positions: torch.Tensor  # [N]
    groups: tuple[SlotGroup, ...]
    # How many of the groups decode, the first: slots 0, 1, …, read in place. Other groups are gathered.
    decoding_groups: int


class KVCache:
    """Holds ids, log-probs, keys and values of all slots, on the model's device."""

    def __init__(self, model: PreTrainedModel, slot_count: int, max_len: int) -> None:
        self.model = model
        self.slot_count = slot_count
        self.max_len = max_len
        self.columns = max_len + 1
        self.device = model.device

        self.ids = torch.zeros(slot_count, self.columns, dtype=torch.long, device=self.device)
        self.logprobs = torch.zeros(slot_count, self.columns, dtype=torch.float32, device=self.device)
        self.adapter_indices = torch.zeros(slot_count, dtype=torch.long, device=self.device)
        self.adapters: Adapters | None = None
        self.keys: dict[int, torch.Tensor] = {}  # layer -> [kv_heads, slots, columns, head_dim]
        self.values: dict[int, torch.Tensor] = {}
        self.query_group_sizes: dict[int, int] = {}  # layer -> query heads of one KV head

        self._all_columns = torch.arange(self.columns, device=self.device)
        self._current_layout: Layout
        self._group_biases: list[torch.Tensor] = []
        self.vocabulary = self._allocate_layers()

    @property
    def scratch(self) -> int:
        return self.max_len - 1

    @property
    def pools(self) -> tuple[torch.Tensor, ...]:
        return (*self.keys.values(), *self.values.values())

    def columns_for(self, length: int) -> torch.Tensor:
        """Return the columns 0, 1, … that sequences of at most `length` tokens attend to, [reach]. The reach
        is rounded up, so that kernels see few shapes."""
        return self._all_columns[: min(-(-length // _LENGTH_BUCKET) * _LENGTH_BUCKET, self.max_len)]

    def forward(self, layout: Layout, logit_indices: torch.Tensor) -> torch.Tensor:
        """Run the model on the tokens in the layout's cells and write their KV. Returns logits
        [len(logit_indices), vocabulary] of the tokens with these indices."""
        self._current_layout = layout
        self._group_biases = []
        for group in layout.groups:
            # An additive mask [r, 1, width, reach]: 0 where a token attends, -inf on later positions.
            is_later = group.columns > group.positions[:, None, :, None]
            bias = torch.zeros(is_later.shape, dtype=self.model.dtype, device=self.device)
            self._group_biases.append(bias.masked_fill_(is_later, -torch.inf))

        if self.adapters is not None:
            self.adapters.select_adapters(self.adapter_indices[layout.cells // self.columns])

        output = self.model(
            input_ids=self.ids.view(-1)[layout.cells][None],
            position_ids=layout.positions[None],
            attention_mask=self._no_mask,
            use_cache=False,
            logits_to_keep=logit_indices,
            slots=self,
        )

        return output.logits[0]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Write key and value [1, kv_heads, N, d] into the cells of the tokens; query [1, heads, N, d] reads
        the slots. Returns [1, N, heads, d]."""
        keys = self.keys[layer]
        values = self.values[layer]
        for pool, states in ((keys, key), (values, value)):
            pool.flatten(1, 2).index_copy_(1, self._current_layout.cells, states[0])

        group_outputs: list[torch.Tensor] = []
        query_group_size = self.query_group_sizes[layer]
        start = 0
        for group, bias in zip(self._current_layout.groups, self._group_biases, strict=True):
            end = start + group.positions.numel()
            slot_selection: slice | torch.Tensor = group.slots
            if len(group_outputs) < self._current_layout.decoding_groups:
                slot_selection = slice(start, end)
            key = _group_states(keys, group, slot_selection)
            value = _group_states(values, group, slot_selection)

            # Query heads that share a KV head become further positions of the query, so that keys and values
            # are never repeated.
            slot_count = bias.shape[0]
            width = bias.shape[2]
            group_query = (
                query[0, :, start:end]
                .view(key.shape[1], query_group_size, slot_count, width, query.shape[3])
                .permute(2, 0, 1, 3, 4)
                .flatten(2, 3)
            )
            group_bias = bias[:, :, None].expand(-1, -1, query_group_size, -1, -1).flatten(2, 3)
            output = F.scaled_dot_product_attention(
                group_query, key, value, attn_mask=group_bias, scale=scale
            )

            output = output.unflatten(2, (query_group_size, width)).permute(0, 3, 1, 2, 4)
            group_outputs.append(output.flatten(2, 3).flatten(0, 1))  # [r * width, heads, d]
            start = end

        return (group_outputs[0] if len(group_outputs) == 1 else torch.cat(group_outputs))[None]

    def move_slots(self, source_slots: np.ndarray, target_slots: np.ndarray, length: int) -> None:
        """Copy the first `length` positions of `source_slots` to `target_slots`, the same slots in another
        order."""
        source_indices = torch.from_numpy(source_slots).to(self.device)
        target_indices = torch.from_numpy(target_slots).to(self.device)
        for token_table in (self.ids, self.logprobs):
            token_table[target_indices, :length] = token_table[source_indices, :length]

        self.adapter_indices[target_indices] = self.adapter_indices[source_indices]
        for pool in self.pools:
            pool[:, target_indices, :length] = pool[:, source_indices, :length]

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the KV of a slot's first `length` positions to another slot."""
        for pool in self.pools:
            pool[:, target, :length] = pool[:, source, :length]

    def wipe_slot(self, slot: int) -> None:
        """Zero a slot and all scratch cells after values that are not finite: no mask stops a NaN."""
        for pool in self.pools:
            pool[:, slot].zero_()
            pool[:, :, self.scratch].zero_()

    def _allocate_layers(self) -> int:
        """Run one token through the model to learn the shapes of the layers and to see that the engine can
        serve the model. Returns the number of logits per token."""
        self._no_mask = torch.zeros(1, 1, 1, 1, device=self.device)
        self.model.set_attn_implementation(ATTENTION)

        for module in self.model.modules():
            if isinstance(module, torch.nn.Embedding):
                module.padding_idx = None  # for gradients only; a recording may not compare it

        probe = _Probe(self)
        with torch.no_grad():
            probe_input = torch.zeros(1, 1, dtype=torch.long, device=self.device)
            output = self.model(
                input_ids=probe_input,
                position_ids=probe_input,
                attention_mask=self._no_mask,
                use_cache=False,
                slots=probe,
            )

        if not self.keys:
            name = type(self.model).__name__
            raise ConfigError(f"the embedded engine cannot serve {name}: it has its own attention")

        return output.logits.shape[-1]


class _Probe:
    """Stands in for the cache in the cache's first forward: allocates the keys and values of each layer."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        for pools, states in ((self.cache.keys, key), (self.cache.values, value)):
            shape = (states.shape[1], self.cache.slot_count, self.cache.columns, states.shape[3])
            pools[layer] = torch.zeros(shape, dtype=states.dtype, device=states.device)
        self.cache.query_group_sizes[layer] = query.shape[1] // key.shape[1]
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


def _group_states(pool: torch.Tensor, group: SlotGroup, slot_selection: slice | torch.Tensor) -> torch.Tensor:
    """Return the keys or values of a group's slots: [r, kv_heads, reach, d]."""
    return pool[:, :, : group.columns.shape[0]][:, slot_selection].transpose(0, 1)


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
    """Compute attention with the cache `slots`; plain SDPA without a cache, so that the model can still be
    called. Registered with transformers under the name ATTENTION."""
    if slots is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)

    if isinstance(slots, _Probe):
        unserved_rules = [name for name in sorted(READ_ARGUMENTS) if kwargs.get(name) is not None]
        refused_arguments = unknown_arguments(kwargs) + unserved_rules
        if refused_arguments:
            raise ConfigError(
                f"the embedded engine has no {', '.join(refused_arguments)} attention; use another engine"
            )

    return slots.attend(module.layer_idx, query, key, value, scaling), None  # type: ignore[arg-type]


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


# -- the host's side: the session of each slot, and the ids whose KV the slot holds -------------------------


class Slot:
    """The host's record of one slot of the KV cache."""

    __slots__ = (
        "agent",
        "held_ids",
        "index",
        "is_busy",
        "last_used",
        "oldest_version",
        "session",
        "swap_count",
    )

    def __init__(self, index: int) -> None:
        self.index = index
        self.session: str | None = None
        self.agent = ""  # the slot is computed with this agent's adapter
        self.held_ids: tuple[int, ...] = ()  # ids whose KV the slot holds
        # The policy version that wrote position 0: KV is written in order, so no position has an older
        # version.
        self.oldest_version = 0
        self.swap_count = 0  # weight swaps before position 0 was written
        self.is_busy = False
        self.last_used = 0

    def keep_prefix(self, ids: Sequence[int]) -> int:
        """Return the number of leading ids that need no prefill: the common prefix with `held_ids`, without
        the last id, as logits are needed there. Forgets all later held ids."""
        common_length = min(len(self.held_ids), len(ids) - 1)
        if self.held_ids[:common_length] != tuple(ids[:common_length]):
            common_length = next(at for at in range(common_length) if self.held_ids[at] != ids[at])
        self.held_ids = self.held_ids[:common_length]
        return common_length


class Slots:
    """Slots by session. An idle session keeps its slot until another session needs the slot; the least
    recently used slot goes first."""

    def __init__(self, count: int) -> None:
        self.every_slot = [Slot(index) for index in range(count)]
        self._slot_by_session: dict[str, Slot] = {}
        self._use_counter = 0

    def acquire_slot(self, session: str) -> Slot | None:
        """Return the session's own slot, a free slot, or that of an idle session; None when all are busy.
        Free slots are taken from below, which keeps the slots in use together."""
        slot = self._slot_by_session.get(session)
        if slot is None:
            idle_slots = [slot for slot in self.every_slot if not slot.is_busy]
            if not idle_slots:
                return None

            slot = min(idle_slots, key=lambda slot: slot.last_used if slot.session else -1)
            self._clear_slot(slot)
            slot.session = session
            self._slot_by_session[session] = slot

        slot.is_busy = True
        return slot

    def reorder_slots(self, sources: Sequence[int]) -> None:
        """Renumber the slots: slot number i becomes the former number sources[i]."""
        self.every_slot = [self.every_slot[source] for source in sources]
        for index, slot in enumerate(self.every_slot):
            slot.index = index

    def finish_turn(self, slot: Slot, held_ids: tuple[int, ...]) -> None:
        """Note that the slot's turn is over; the next turn may use the KV of these ids."""
        self._use_counter += 1
        slot.is_busy = False
        slot.held_ids = held_ids
        slot.last_used = self._use_counter

    def release_session(self, session: str) -> None:
        """Forget a session that is not busy."""
        slot = self._slot_by_session.get(session)
        if slot is not None:
            self._clear_slot(slot)

    def _clear_slot(self, slot: Slot) -> None:
        if slot.session is not None:
            del self._slot_by_session[slot.session]
        slot.session = None
        slot.held_ids = ()


class PrefixSource(NamedTuple):
    """The KV of the leading `length` ids is, or will be, in `slot`."""

    slot: Slot
    length: int


class PrefixIndex:
    """Finds the slot that has computed the beginning of a prompt: members of a group, and prompts with the
    same examples in front, are prefilled once and copied. The index has the last slot of each block."""

    def __init__(self) -> None:
        self._slot_by_block: dict[int, Slot] = {}  # by the hash of all ids up to a block's end
        self._blocks_by_slot: dict[Slot, list[int]] = {}

    def enter_prompt(self, slot: Slot, ids: Sequence[int], adapter_index: int) -> PrefixSource | None:
        """Enter the prompt of `slot`. Returns the longest beginning of the prompt that another slot has with
        the same adapter. Prefixes are found by their hashes, so the caller has to compare the ids."""
        for block_hash in self._blocks_by_slot.pop(slot, ()):
            if self._slot_by_block.get(block_hash) is slot:
                del self._slot_by_block[block_hash]

        source = None
        block_hashes = []
        prefix_hash = adapter_index
        # Without the last id, which is computed in any case, for its logits.
        for end in range(PREFIX_BLOCK, len(ids), PREFIX_BLOCK):
            prefix_hash = hash((prefix_hash, tuple(ids[end - PREFIX_BLOCK : end])))
            block_hashes.append(prefix_hash)
            if prefix_hash in self._slot_by_block:
                source = PrefixSource(self._slot_by_block[prefix_hash], end)

        self._slot_by_block |= dict.fromkeys(block_hashes, slot)
        self._blocks_by_slot[slot] = block_hashes
        return source
