"""The KV cache, which has a number of slots, and the attention function that reads and writes it.

Every slot of the cache is one sequence of at most `max_len` tokens: its ids, log-probs and, per layer, keys
and values, or the state of a layer that has one (states.py). A window or a chunk is a mask over all keys of a
slot. A *cell* is `slot * columns + position`. One forward of the model takes the tokens of any cells,
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

from asyncrl.attention_rules import Reach, Scoring, queries_at_positions, read_scoring, unknown_arguments
from asyncrl.engines.torch.states import SlotStates, TokenGroup
from asyncrl.errors import ConfigError
from asyncrl.model_class import set_text_attention
from asyncrl.state_layers import hand_over_state_layers
from asyncrl.vision.image_ids import with_placeholders
from asyncrl.vision.layout import ImageLayout
from asyncrl.vision.pixels import Pixels
from asyncrl.weights.adapters import Adapters

ATTENTION = "asyncrl_slots"
_LENGTH_BUCKET = 32  # attention lengths are rounded up to this


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


class RopePositions(torch.Tensor):
    """Positions [3, 1, N] in time, height and width. While a step is recorded, sizes of tensors are traced
    values, and models branch on the first of these, which a recording refuses: here it is a plain number.
    Results of operations are plain tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return (3, *self.size()[1:])  # type: ignore[return-value]  # a torch.Size would be traced again


class ChunkImages(NamedTuple):
    """What the chunks of a step read beside their ids, if a prompt has images. `rope_positions` [3, tokens of
    the chunks]: positions in time, height and width. `pixels`: the patches of the images among these tokens,
    in order; None if there are only texts around images."""

    rope_positions: torch.Tensor
    pixels: Pixels | None


class KVCache:
    """Holds ids, log-probs, keys, values and states of all slots, on the model's device.

    `image_layout`: how the model reads images, if it does; its ids have positions in time, height and width
    (multimodal RoPE). Behind all images of a prompt, the three of them are the position in the slot plus the
    slot's offset, which is 0 without images; those of earlier ids come with the chunks (ChunkImages).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        slot_count: int,
        max_len: int,
        image_layout: ImageLayout | None = None,
    ) -> None:
        self.model = model
        self.placeholder = None if image_layout is None else image_layout.placeholder
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
        self.scorings: dict[int, Scoring] = {}  # layer -> what it asks of attention
        self.states = SlotStates(slot_count)

        self._all_columns = torch.arange(self.columns, device=self.device)
        self.rope_offsets: torch.Tensor | None = None  # [slots]
        if image_layout is not None:
            self.rope_offsets = torch.zeros(slot_count, dtype=torch.long, device=self.device)

        self._current_layout: Layout
        self._token_indices: torch.Tensor
        self._token_groups: list[TokenGroup] = []
        self._biases_by_reach: dict[Reach, list[torch.Tensor]] = {}
        self.vocabulary = self._allocate_layers()

    @property
    def scratch(self) -> int:
        return self.max_len - 1

    @property
    def kv_pools(self) -> tuple[torch.Tensor, ...]:
        return (*self.keys.values(), *self.values.values())

    @property
    def pools(self) -> tuple[torch.Tensor, ...]:
        """Return everything that is computed by the weights."""
        return (*self.kv_pools, *self.states.pools, *self.states.snapshots)

    @property
    def has_states(self) -> bool:
        """True if some layers have a state, which cannot be cut at any length, as keys and values can."""
        return bool(self.states.pools)

    def columns_for(self, length: int) -> torch.Tensor:
        """Return the columns 0, 1, … that sequences of at most `length` tokens attend to, [reach]. The reach
        is rounded up, so that kernels see few shapes."""
        return self._all_columns[: min(-(-length // _LENGTH_BUCKET) * _LENGTH_BUCKET, self.max_len)]

    def write_prompt(self, slot: int, ids: Sequence[int], start: int, rope_offset: int = 0) -> None:
        """Write the ids of a prompt into its slot, from number `start` on. `rope_offset`: what is added to
        the positions behind the prompt's images."""
        new_ids = np.array(ids[start:], dtype=np.int64)
        if self.placeholder is not None:
            new_ids = with_placeholders(new_ids, self.placeholder)
        self.ids[slot, start : len(ids)] = torch.from_numpy(new_ids).to(self.device)

        if self.rope_offsets is not None:
            self.rope_offsets[slot] = rope_offset

    def forward(
        self, layout: Layout, logit_indices: torch.Tensor, images: ChunkImages | None = None
    ) -> torch.Tensor:
        """Run the model on the tokens in the layout's cells and write their KV. `images`: of the chunks,
        whose tokens are the last. Returns logits [len(logit_indices), vocabulary] of the tokens with these
        indices."""
        self._current_layout = layout
        self._token_groups = _token_groups(layout)
        self._token_indices = torch.arange(layout.positions.shape[0], device=self.device)
        self._biases_by_reach = {}
        if self.has_states:
            is_live = [group.positions != self.scratch for group in layout.groups]
            self.states.begin_forward(self._token_groups, is_live)

        if self.adapters is not None:
            self.adapters.select_adapters(self.adapter_indices[layout.cells // self.columns])

        input_ids = self.ids.view(-1)[layout.cells]
        position_ids = layout.positions[None]
        if self.rope_offsets is not None:
            offsets = self.rope_offsets[layout.cells // self.columns]
            position_ids = (layout.positions + offsets).expand(3, 1, -1)

        image_arguments = {}
        if images is not None:
            other_tokens = position_ids.shape[2] - images.rope_positions.shape[1]
            position_ids = torch.cat(
                [position_ids[:, :, :other_tokens], images.rope_positions[:, None]], dim=2
            )
            if images.pixels is not None:
                # The scratch cell may hold a sampled placeholder, which is no image.
                input_ids = input_ids.masked_fill(layout.positions == self.scratch, 0)
                image_arguments = {
                    "pixel_values": images.pixels.pixel_values,
                    "image_grid_thw": images.pixels.grids,
                }

        if self.rope_offsets is not None:
            position_ids = position_ids.as_subclass(RopePositions)
        output = self.model(
            input_ids=input_ids[None],
            position_ids=position_ids,
            attention_mask=self._no_mask,
            use_cache=False,
            logits_to_keep=logit_indices,
            slots=self,
            **self._state_arguments,
            **image_arguments,
        )

        return output.logits[0]

    def attend(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Write key and value [1, kv_heads, N, d] of a layer's tokens into their cells; query [1, heads, N,
        d] reads the slots. Returns [1, N, heads, d]."""
        layer: int = module.layer_idx  # type: ignore[assignment]
        query = queries_at_positions(module, query, self._token_indices, self._current_layout.positions)
        keys = self.keys[layer]
        values = self.values[layer]
        for pool, states in ((keys, key), (values, value)):
            pool.flatten(1, 2).index_copy_(1, self._current_layout.cells, states[0])

        group_outputs: list[torch.Tensor] = []
        query_group_size = self.query_group_sizes[layer]
        scoring = self.scorings[layer]
        biases = self._biases(scoring.reach)
        for group, (tokens, slots), bias in zip(
            self._current_layout.groups, self._token_groups, biases, strict=True
        ):
            key = _group_states(keys, group, slots)
            value = _group_states(values, group, slots)

            # Query heads that share a KV head become further positions of the query, so that keys and values
            # are never repeated.
            slot_count = bias.shape[0]
            width = bias.shape[2]
            group_query = (
                query[0, :, tokens]
                .view(key.shape[1], query_group_size, slot_count, width, query.shape[3])
                .permute(2, 0, 1, 3, 4)
                .flatten(2, 3)
            )
            group_bias = bias[:, :, None].expand(-1, -1, query_group_size, -1, -1).flatten(2, 3)
            output = _scored_attention(group_query, key, value, group_bias, scoring)

            output = output.unflatten(2, (query_group_size, width)).permute(0, 3, 1, 2, 4)
            group_outputs.append(output.flatten(2, 3).flatten(0, 1))  # [r * width, heads, d]

        return (group_outputs[0] if len(group_outputs) == 1 else torch.cat(group_outputs))[None]

    def move_slots(self, source_slots: np.ndarray, target_slots: np.ndarray, length: int) -> None:
        """Copy the first `length` positions of `source_slots` to `target_slots`, the same slots in another
        order."""
        source_indices = torch.from_numpy(source_slots).to(self.device)
        target_indices = torch.from_numpy(target_slots).to(self.device)
        for token_table in (self.ids, self.logprobs):
            token_table[target_indices, :length] = token_table[source_indices, :length]
        if self.rope_offsets is not None:
            self.rope_offsets[target_indices] = self.rope_offsets[source_indices]

        self.adapter_indices[target_indices] = self.adapter_indices[source_indices]
        for pool in self.kv_pools:
            pool[:, target_indices, :length] = pool[:, source_indices, :length]
        self.states.move_slots(source_indices, target_indices)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the KV of a slot's first `length` positions to another slot, and the snapshot that the slot
        has at this length."""
        for pool in self.kv_pools:
            pool[:, target, :length] = pool[:, source, :length]
        self.states.copy_snapshot(source, target)

    def wipe_slot(self, slot: int) -> None:
        """Zero a slot and all scratch cells after values that are not finite: no mask stops a NaN."""
        for pool in self.kv_pools:
            pool[:, slot].zero_()
            pool[:, :, self.scratch].zero_()
        self.states.begin_sequence(slot)

    def _biases(self, reach: Reach) -> list[torch.Tensor]:
        """Return an additive mask [r, 1, width, reach] of each group: 0 where a token sees a key, -inf
        elsewhere. Layers of the same reach share the masks of a forward."""
        if reach not in self._biases_by_reach:
            biases = self._biases_by_reach[reach] = []
            for group in self._current_layout.groups:
                is_hidden = group.columns > group.positions[:, None, :, None]
                if reach != Reach():
                    # Padding sees every key: a row of scores without a key would be NaN.
                    first_column = reach.first_visible(group.positions)
                    first_column = first_column.masked_fill(group.positions == self.scratch, 0)
                    is_hidden = is_hidden | (group.columns < first_column[:, None, :, None])
                bias = torch.zeros(is_hidden.shape, dtype=self.model.dtype, device=self.device)
                biases.append(bias.masked_fill_(is_hidden, -torch.inf))

        return self._biases_by_reach[reach]

    def _allocate_layers(self) -> int:
        """Run one token through the model to learn the shapes of the layers and to see that the engine can
        serve the model. Returns the number of logits per token."""
        self._no_mask = torch.zeros(1, 1, 1, 1, device=self.device)
        set_text_attention(self.model, ATTENTION)

        for module in self.model.modules():
            if isinstance(module, torch.nn.Embedding):
                module.padding_idx = None  # for gradients only; a recording may not compare it

        hand_over_state_layers(self.model)
        self._state_arguments = {"seq_idx": self.states}
        probe = _Probe(self)
        with torch.no_grad():
            probe_input = torch.zeros(1, 1, dtype=torch.long, device=self.device)
            output = self.model(
                input_ids=probe_input,
                position_ids=probe_input,
                attention_mask=self._no_mask,
                use_cache=False,
                slots=probe,
                **self._state_arguments,
            )

        if not self.has_states:
            self._state_arguments = {}
        if not self.keys:
            name = type(self.model).__name__
            raise ConfigError(
                f"the embedded engine cannot serve {name}, which has its own attention implementation"
            )

        return output.logits.shape[-1]


class _Probe:
    """Stands in for the cache in the cache's first forward: allocates the keys and values of each layer."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scoring: Scoring,
    ) -> torch.Tensor:
        layer: int = module.layer_idx  # type: ignore[assignment]
        for pools, states in ((self.cache.keys, key), (self.cache.values, value)):
            shape = (states.shape[1], self.cache.slot_count, self.cache.columns, states.shape[3])
            pools[layer] = torch.zeros(shape, dtype=states.dtype, device=states.device)
        self.cache.query_group_sizes[layer] = query.shape[1] // key.shape[1]
        self.cache.scorings[layer] = scoring._replace(reach=scoring.reach.within(self.cache.max_len))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


def _token_groups(layout: Layout) -> list[TokenGroup]:
    groups: list[TokenGroup] = []
    start = 0
    for group in layout.groups:
        end = start + group.positions.numel()
        decodes = len(groups) < layout.decoding_groups
        groups.append(TokenGroup(slice(start, end), slice(start, end) if decodes else group.slots))
        start = end

    return groups


def _group_states(pool: torch.Tensor, group: SlotGroup, slots: slice | torch.Tensor) -> torch.Tensor:
    """Return the keys or values of a group's slots: [r, kv_heads, reach, d]."""
    return pool[:, :, : group.columns.shape[0]][:, slots].transpose(0, 1)


def _scored_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor, scoring: Scoring
) -> torch.Tensor:
    """Return the attention [r, kv_heads, q, d] of query [r, kv_heads, q, d] to key and value [r, kv_heads,
    reach, d]. The queries of a KV head are those of its first query head, then of its second one, and so on.
    """
    if scoring.softcap is None and scoring.sinks is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scoring.scale)

    scores = query @ key.transpose(-1, -2) * scoring.scale
    if scoring.softcap is not None:
        scores = scoring.softcap * (scores / scoring.softcap).tanh()
    scores = (scores + bias).float()

    log_sums = scores.logsumexp(-1, keepdim=True)
    if scoring.sinks is not None:
        sinks = scoring.sinks.float().view(key.shape[1], -1, 1)
        sinks = sinks.expand(-1, -1, query.shape[2] // sinks.shape[1]).flatten(1)
        log_sums = log_sums.logaddexp(sinks[..., None])

    return (scores - log_sums).exp().to(value.dtype) @ value


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    slots: KVCache | _Probe | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention with the cache `slots`; without a cache as transformers does, so that the model can
    still be called. Registered with transformers under the name ATTENTION."""
    if isinstance(slots, KVCache):
        return slots.attend(module, query, key, value), None

    scoring = read_scoring(module, query, kwargs)
    if slots is None:
        if scoring.softcap is None and scoring.sinks is None:
            return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return _uncached_attention(query, key, value, attention_mask, scoring), None

    refused_arguments = unknown_arguments(kwargs)
    if refused_arguments:
        raise ConfigError(
            f"the embedded engine does not support {', '.join(refused_arguments)} attention; use another "
            "engine"
        )

    return slots.attend(module, query, key, value, scoring), None


def _uncached_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scoring: Scoring,
) -> torch.Tensor:
    """Return the attention [B, T, heads, d] of rows, as transformers computes it with a cap or sinks: query
    [B, heads, T, d], key and value [B, kv_heads, T, d], mask [B, 1, T, T] of booleans or None."""
    length = query.shape[2]
    if attention_mask is None:
        attention_mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()[None, None]
    bias = torch.zeros(attention_mask.shape, dtype=query.dtype, device=query.device)
    bias = bias.masked_fill(~attention_mask, -torch.inf)

    query_group_size = query.shape[1] // key.shape[1]
    group_query = query.unflatten(1, (-1, query_group_size)).flatten(2, 3)
    group_bias = bias[:, :, None].expand(-1, -1, query_group_size, -1, -1).flatten(2, 3)
    output = _scored_attention(group_query, key, value, group_bias, scoring)

    return output.unflatten(2, (query_group_size, length)).flatten(1, 2).transpose(1, 2)


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


# -- the host's side: the session of each slot, and the ids whose KV the slot holds -------------------------


class Slot:
    """The host's record of one slot of the KV cache. The states of a slot, if the model has any, are those
    behind the last of `held_ids`; its snapshot is behind the first `snapshot_length` of them."""

    __slots__ = (
        "agent",
        "held_ids",
        "index",
        "is_busy",
        "last_used",
        "oldest_version",
        "session",
        "snapshot_length",
        "swap_count",
    )

    def __init__(self, index: int) -> None:
        self.index = index
        self.session: str | None = None
        self.agent = ""  # the slot is computed with this agent's adapter
        self.held_ids: tuple[int, ...] = ()  # ids whose KV the slot holds
        self.snapshot_length = 0  # 0: there is no snapshot
        # The policy version that wrote position 0: KV is written in order, so no position has an older
        # version.
        self.oldest_version = 0
        self.swap_count = 0  # weight swaps before position 0 was written
        self.is_busy = False
        self.last_used = 0

    def common_prefix(self, ids: Sequence[int]) -> int:
        """Return the length of the common prefix of `ids` and the held ids, without the last of `ids`, as
        logits are needed there."""
        common_length = min(len(self.held_ids), len(ids) - 1)
        if self.held_ids[:common_length] != tuple(ids[:common_length]):
            common_length = next(at for at in range(common_length) if self.held_ids[at] != ids[at])
        return common_length

    def forget_ids(self, start: int = 0) -> None:
        """Forget the held ids from `start` on, and a snapshot that is behind any of these."""
        self.held_ids = self.held_ids[:start]
        if self.snapshot_length > start:
            self.snapshot_length = 0


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
        slot = self.slot_of(session)
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

    def slot_of(self, session: str) -> Slot | None:
        """Return the session's slot; None if the session has none, or no longer."""
        return self._slot_by_session.get(session)

    def finish_turn(self, slot: Slot, held_ids: tuple[int, ...]) -> None:
        """Note that the slot's turn is over; the next turn may use the KV of these ids."""
        self._use_counter += 1
        slot.is_busy = False
        slot.forget_ids(len(held_ids))
        slot.held_ids = held_ids
        slot.last_used = self._use_counter

    def release_session(self, session: str) -> None:
        """Forget a session that is not busy."""
        slot = self.slot_of(session)
        if slot is not None:
            self._clear_slot(slot)

    def _clear_slot(self, slot: Slot) -> None:
        if slot.session is not None:
            del self._slot_by_session[slot.session]
        slot.session = None
        slot.forget_ids()


class PrefixSource(NamedTuple):
    """The KV of the leading `length` ids is, or will be, in `slot`."""

    slot: Slot
    length: int


class PrefixIndex:
    """Finds the slot that has computed the beginning of a prompt: members of a group, and prompts with the
    same examples in front, are prefilled once and copied. The index has the last slot of each block. Image
    ids are like other ids: equal ones are equal images."""

    def __init__(self) -> None:
        self._slot_by_block: dict[int, Slot] = {}  # by the hash of all ids up to a block's end
        self._blocks_by_slot: dict[Slot, list[int]] = {}

    def enter_prompt(
        self,
        slot: Slot,
        ids: Sequence[int],
        prefix_ends: Sequence[int],
        adapter_index: int,
        snapshot_length: int | None = None,
    ) -> PrefixSource | None:
        """Enter the prompt of `slot`, whose blocks end at `prefix_ends`. Returns the longest beginning of the
        prompt that another slot has with the same adapter. Prefixes are found by their hashes, so the caller
        has to compare the ids. `snapshot_length`: of a model with states only the ids up to its snapshot can
        be copied."""
        for block_hash in self._blocks_by_slot.pop(slot, ()):
            if self._slot_by_block.get(block_hash) is slot:
                del self._slot_by_block[block_hash]

        source = None
        block_hashes = []
        prefix_hash = adapter_index
        block_start = 0
        for end in prefix_ends:
            prefix_hash = hash((prefix_hash, tuple(ids[block_start:end])))
            block_start = end
            if snapshot_length is None or end == snapshot_length:
                block_hashes.append(prefix_hash)
            if prefix_hash in self._slot_by_block:
                source = PrefixSource(self._slot_by_block[prefix_hash], end)

        self._slot_by_block |= dict.fromkeys(block_hashes, slot)
        self._blocks_by_slot[slot] = block_hashes
        return source
