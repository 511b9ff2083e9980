"""Continuous batching, without a clock or an event loop: requests join and leave the batch at every step.

    add ──► waiting ──► slot ──► prefill ──► decode ──► end
            (FIFO)      (kept prefix skipped, (one token per slot and step)
                         another slot's copied)

A step is one forward over every decoding slot and, within the token budget, new prompt tokens. The host knows
every length in advance, so a step waits for the device once: to learn which slots are done.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from itertools import pairwise, takewhile

import numpy as np
import torch
from msgspec.structs import replace
from transformers import PreTrainedModel

from asyncrl.engines.base import Request
from asyncrl.engines.torch.images import NO_IMAGES, PromptImages
from asyncrl.engines.torch.recorded import RecordedStep
from asyncrl.engines.torch.slots import ChunkImages, KVCache, PrefixIndex, PrefixSource, Slot, Slots
from asyncrl.engines.torch.step_layout import Chunk, SlotSampling, StepLayout, build_layout, reordered_slots
from asyncrl.errors import EngineError
from asyncrl.types import Generation, StopReason, VersionSpan
from asyncrl.vision.layout import ImageLayout
from asyncrl.vision.pixels import Pixels
from asyncrl.weights.adapters import Adapters

# A prompt that would be padded to more than 4 times its length waits for a later step.
_MAX_PADDING_RATIO = 4


class RunningRequest:
    """Follows one request from arrival to its end."""

    def __init__(
        self, request: Request, images: PromptImages, max_length: int, version: int, started_at: float
    ) -> None:
        self.request = request
        self.images = images
        self.prefill_ids = request.ids  # after a sleep: with the ids sampled before
        self.max_length = max_length  # prompt and sampled ids together
        self.slot: Slot | None = None
        self.prefix_source: PrefixSource | None = None  # has a longer prefix than the slot: to be copied
        self.filled_length = 0  # leading ids whose KV is in the cache
        self.snapshot_length = 0  # the prefill takes a snapshot of the states behind so many ids; 0: none
        self.known_length = 0  # leading ids whose KV was in the slot, also where no state was behind them

        self.checked_ids: list[int] = []  # sampled ids that the stop check was called with
        self.decoding = False
        self.earlier_spans: tuple[VersionSpan, ...] = ()  # of the ids sampled before the last sleep
        self.version_marks = [(0, version)]  # (ids sampled before, version in use from there on)
        self.started_at = started_at

    @property
    def prompt_length(self) -> int:
        return len(self.request.ids)

    @property
    def slot_index(self) -> int:
        assert self.slot is not None
        return self.slot.index

    def chunk_end(self, limit: int) -> int:
        """Return the end of the next chunk, of at most `limit` ids: where a snapshot is taken, or the end of
        the prompt, if the chunk is long enough. An image of more ids is a chunk of its own."""
        takes_snapshot = self.filled_length < self.snapshot_length
        stop = self.snapshot_length if takes_snapshot else len(self.prefill_ids)
        end = min(stop, self.filled_length + limit)
        return self.images.chunk_end(self.filled_length, end)


class Batcher:
    """Owns the KV cache and decides what each step computes."""

    def __init__(
        self,
        model: PreTrainedModel,
        slot_count: int,
        max_len: int,
        token_budget: int,
        version: int,
        image_layout: ImageLayout | None = None,
    ) -> None:
        self.version = version
        self._swap_count = 0  # weight swaps: two may have one version number
        self.token_budget = token_budget
        self.generated_tokens = 0
        self.reprefilled_tokens = 0  # prompt tokens whose KV was kept, but no state behind them
        self.runs_by_session: dict[str, RunningRequest] = {}  # all that have not ended
        self.cache = KVCache(model, slot_count, max_len, image_layout)
        self._placeholders = frozenset(image_layout.placeholders if image_layout is not None else ())

        self._recorded_step = RecordedStep(self.cache)
        self.slots = Slots(slot_count)
        self._prefix_index = PrefixIndex()
        self._waiting_runs: deque[RunningRequest] = deque()
        self._filling_runs: list[RunningRequest] = []
        self._decoding_runs: dict[int, RunningRequest] = {}  # by slot index

        # Number of ids of each decoding slot, the last of which has no KV yet; 0 for other slots.
        self._slot_lengths = np.zeros(slot_count, dtype=np.int64)
        self._slot_sampling = SlotSampling(slot_count)
        self._steady_plan: StepLayout | None = None  # the last plan, while it only needs to be advanced

        self._asleep_since = math.inf
        self._slept_seconds = 0.0  # in earlier sleeps

    def add_request(self, request: Request, images: PromptImages = NO_IMAGES) -> RunningRequest:
        sampling = request.sampling
        # The next request would look for an image or a video at a sampled placeholder.
        if further_stop_ids := self._placeholders - {*sampling.stop_ids}:
            sampling = replace(sampling, stop_ids=(*sampling.stop_ids, *further_stop_ids))
            request = replace(request, sampling=sampling)

        max_length = min(len(request.ids) + sampling.max_new_tokens, self.cache.max_len)
        run = self.runs_by_session[request.session] = RunningRequest(
            request, images, max_length, self.version, self._awake_time()
        )
        self._waiting_runs.append(run)
        return run

    def use_adapters(self, adapters: Adapters) -> None:
        """Compute each slot with the adapter of its agent, from the next step on."""
        self.cache.adapters = adapters
        for slot in self.slots.every_slot:
            self.cache.adapter_indices[slot.index] = self._adapter_index(slot.agent)
        self._recorded_step = RecordedStep(self.cache)  # old recordings are of the model without adapters

    def _adapter_index(self, agent: str) -> int:
        return self.cache.adapters.adapter_index(agent) if self.cache.adapters else 0

    def mark_version(self, version: int) -> None:
        """Note that tokens are sampled by other weights from the next step on."""
        self.version = version
        self._swap_count += 1
        for run in self.runs_by_session.values():
            run.version_marks.append((self._sampled_count(run), version))

    @property
    def asleep(self) -> bool:
        return self._asleep_since < math.inf

    def sleep(self) -> None:
        """Drop the KV: after `wake`, prompts are prefilled again, with the ids sampled before."""
        for run in self._decoding_runs.values():
            sampled = self.sampled_so_far(run)
            run.prefill_ids = run.request.ids + sampled.ids
            run.decoding = False
            run.earlier_spans = sampled.spans
            run.version_marks = [(len(sampled.ids), self.version)]

        self._filling_runs = [*self._decoding_runs.values(), *self._filling_runs]
        self._decoding_runs = {}
        self._steady_plan = None
        self._prefix_index = PrefixIndex()
        self._slot_lengths[:] = 0
        for slot in self.slots.every_slot:
            slot.forget_ids()

        for run in self._filling_runs:
            run.filled_length = 0
            run.known_length = 0
            self._plan_prefix(run)

        self._asleep_since = time.perf_counter()

    def wake(self) -> None:
        """Go on: there are weights again, and room for KV."""
        for pool in self.cache.pools:
            pool.zero_()  # no mask stops a NaN
        self._slept_seconds += time.perf_counter() - self._asleep_since
        self._asleep_since = math.inf

    def _awake_time(self) -> float:
        """Return a time that stands still during a sleep, in seconds."""
        return min(time.perf_counter(), self._asleep_since) - self._slept_seconds

    @torch.inference_mode()
    def step(self) -> list[RunningRequest]:
        """Sample one token for every decoding slot and prefill as many prompt tokens as fit; return the runs
        for `end_run`."""
        self._admit_waiting()
        if self._steady_plan and self._steady_plan.steps_left and not self._filling_runs:
            plan = self._steady_plan.advance()
            chunks = {}
        else:
            self._reorder_slots()
            chunks = self._plan_chunks()
            plan = build_layout(self.cache, self._slot_sampling, self._slot_lengths, list(chunks.values()))

        ended_slots = self._recorded_step(plan, self._chunk_images(chunks))
        self._steady_plan = plan
        self._slot_lengths += self._slot_lengths > 0

        # The chunks' KV is in the cache; after the last chunk of a prompt the slot decodes.
        for run, chunk in chunks.items():
            assert run.slot is not None
            if chunk.start == 0:
                run.slot.oldest_version = self.version
                run.slot.swap_count = self._swap_count

            self.reprefilled_tokens += max(0, run.known_length - run.filled_length)
            run.known_length = 0
            run.filled_length = chunk.end
            run.slot.held_ids = run.prefill_ids[: chunk.end]
            if chunk.end == run.snapshot_length:
                self._take_snapshot(run.slot)
            if chunk.is_last:
                run.images.drop_pixels()
                self._filling_runs.remove(run)
                run.decoding = True
                self._decoding_runs[run.slot.index] = run
                self._slot_lengths[run.slot.index] = len(run.prefill_ids) + 1

        self.generated_tokens += len(self._decoding_runs)
        return [self._decoding_runs[slot] for slot in ended_slots]

    def ends_by_check(self, run: RunningRequest) -> bool:
        """Call the run's stop check with the new id; True if the run ends with this id."""
        stop_check = run.request.stop_check
        if stop_check is None:
            return False

        sampled_count = self._sampled_count(run)
        if sampled_count == len(run.checked_ids):
            return False
        run.checked_ids.append(int(self.cache.ids[run.slot_index, run.prompt_length + sampled_count - 1]))
        return stop_check(run.checked_ids)

    def end_run(self, run: RunningRequest, stop: StopReason | None = None) -> Generation:
        """Take a run out of the batch and return its sampled ids. `stop`: the reason, if the run was not
        done. Raises EngineError if log-probs are not finite; the run is out of the batch in this case,
        too."""
        generation = self.sampled_so_far(run)
        ids = generation.ids
        all_ids = run.request.ids + ids
        all_finite = all(map(math.isfinite, generation.logprobs))
        del self.runs_by_session[run.request.session]

        if run.slot is None:
            self._waiting_runs.remove(run)
        else:
            # The KV stays for the session's next turn, without that of the last sampled id, which was never
            # fed back.
            computed_length = run.filled_length
            if run.decoding:
                computed_length = len(all_ids) - 1
                del self._decoding_runs[run.slot.index]
            else:
                self._filling_runs.remove(run)

            run.decoding = False
            self._slot_lengths[run.slot.index] = 0
            self._steady_plan = None
            self.slots.finish_turn(run.slot, all_ids[:computed_length] if all_finite else ())

        if not all_finite:
            if not self.asleep:
                self.cache.wipe_slot(run.slot_index)
            raise EngineError(f"session {run.request.session!r}: the model's logits are not finite numbers")

        if stop is None:
            stop = StopReason.STOP if ids[-1] in run.request.sampling.stop_ids else StopReason.LENGTH

        return replace(generation, stop=stop)

    def sampled_so_far(self, run: RunningRequest) -> Generation:
        """Return the ids that a run has sampled, as a generation without an end."""
        sampled_count = self._sampled_count(run)
        spans = run.earlier_spans + tuple(
            VersionSpan(start, end, version, run.slot.oldest_version if run.slot else version)
            for (start, version), (end, _) in pairwise([*run.version_marks, (sampled_count, 0)])
            if start < end
        )

        ids: list[int] = []
        logprobs: list[float] = []
        if sampled_count:
            sampled_range = slice(run.prompt_length, run.prompt_length + sampled_count)
            ids = self.cache.ids[run.slot_index, sampled_range].tolist()
            logprobs = self.cache.logprobs[run.slot_index, sampled_range].tolist()

        seconds = self._awake_time() - run.started_at
        return Generation(tuple(ids), tuple(logprobs), spans, StopReason.ABORT, seconds)

    def _reorder_slots(self) -> None:
        """Move slots so that long sequences lie together: attention reads a range of slots as far as the
        longest sequence there."""
        lengths = self._slot_lengths.copy()
        for run in self._filling_runs:  # will decode soon
            lengths[run.slot_index] = len(run.prefill_ids)

        source_slots = reordered_slots(lengths)
        if source_slots is None:
            return

        moved_slots = np.flatnonzero(source_slots != np.arange(len(source_slots)))
        longest_prefix = 0
        for slot in (self.slots.every_slot[slot_index] for slot_index in moved_slots):
            run_of_session = self.runs_by_session.get(slot.session or "")
            if run_of_session and run_of_session.slot is slot:
                used_length = run_of_session.prompt_length + self._sampled_count(run_of_session)
            else:
                used_length = len(slot.held_ids)
            longest_prefix = max(longest_prefix, used_length)

        self.cache.move_slots(source_slots[moved_slots], moved_slots, longest_prefix)
        self._slot_lengths = self._slot_lengths[source_slots]
        self._slot_sampling.reorder_slots(source_slots)
        self.slots.reorder_slots(source_slots.tolist())

        self._decoding_runs = {run.slot_index: run for run in self._decoding_runs.values()}

    def _sampled_count(self, run: RunningRequest) -> int:
        length = int(self._slot_lengths[run.slot_index]) if run.decoding else len(run.prefill_ids)
        return length - run.prompt_length

    def _admit_waiting(self) -> None:
        """Give slots to waiting requests, in order."""
        while self._waiting_runs and (slot := self.slots.acquire_slot(self._waiting_runs[0].request.session)):
            run = self._waiting_runs.popleft()
            request = run.request
            adapter_index = self._adapter_index(request.agent)
            if adapter_index != self._adapter_index(slot.agent):
                slot.forget_ids()

            slot.agent = request.agent
            self.cache.adapter_indices[slot.index] = adapter_index
            run.slot = slot
            run.known_length = run.images.uncut_length(slot.common_prefix(request.ids))
            run.filled_length = self._keep_prefix(slot, run.known_length)
            self._plan_prefix(run)
            self.cache.write_prompt(slot.index, request.ids, run.filled_length, run.images.rope_offset)

            self._slot_sampling.set_slot(slot.index, request.key, request.sampling, run.max_length)
            self._filling_runs.append(run)

    def kept_length(self, request: Request) -> int:
        """Return the number of leading ids whose KV the session's slot holds, as far as is known before the
        request gets the slot."""
        slot = self.slots.slot_of(request.session)
        return self._usable_length(slot, slot.common_prefix(request.ids)) if slot else 0

    def _usable_length(self, slot: Slot, common_length: int) -> int:
        """Return the number of leading ids that need no prefill, of the `common_length` that a prompt shares
        with those that the slot holds. States are those behind all held ids or, after a rewrite, behind those
        of the snapshot."""
        if not self.cache.has_states or common_length >= len(slot.held_ids):
            return common_length
        return slot.snapshot_length if slot.snapshot_length <= common_length else 0

    def _keep_prefix(self, slot: Slot, common_length: int) -> int:
        """Return the usable length, and forget all later ids of the slot."""
        kept_length = self._usable_length(slot, common_length)
        if self.cache.has_states and 0 < kept_length < len(slot.held_ids):
            self.cache.states.copy_snapshot(slot.index, slot.index)

        slot.forget_ids(kept_length)
        return kept_length

    def _take_snapshot(self, slot: Slot) -> None:
        self.cache.states.take_snapshot(slot.index)
        slot.snapshot_length = len(slot.held_ids)

    def _plan_prefix(self, run: RunningRequest) -> None:
        """Find a slot to copy the beginning of the prompt from, and choose where the prefill takes a
        snapshot of the states: behind the last whole block of the prompt, or at once if all of it is kept."""
        assert run.slot is not None
        prefix_ends = run.images.prefix_ends(len(run.prefill_ids))
        snapshot_length = None
        if self.cache.has_states:
            last_block_end = max(run.images.prefix_ends(run.prompt_length), default=0)
            snapshot_length = last_block_end if last_block_end > run.filled_length else 0
            run.snapshot_length = snapshot_length
            if run.filled_length == 0:
                self.cache.states.begin_sequence(run.slot.index)
            elif snapshot_length == 0:
                self._take_snapshot(run.slot)

        prefix_source = self._prefix_index.enter_prompt(
            run.slot, run.prefill_ids, prefix_ends, self._adapter_index(run.request.agent), snapshot_length
        )
        run.prefix_source = (
            prefix_source if prefix_source and prefix_source.length > run.filled_length else None
        )

    def _plan_chunks(self) -> dict[RunningRequest, Chunk]:
        """Choose the tokens to prefill in this step. Chunks are padded to the length of the first chunk, and
        padding counts against the budget. A longer chunk, with an image, waits until it is the first."""
        chunks: dict[RunningRequest, Chunk] = {}
        ready_runs = [run for run in self._filling_runs if not self._awaits_prefix(run)]
        if not ready_runs:
            return chunks

        width = ready_runs[0].chunk_end(self.token_budget) - ready_runs[0].filled_length
        for run in ready_runs:
            end = run.chunk_end(width)
            chunk_size = end - run.filled_length
            if chunk_size <= width <= chunk_size * _MAX_PADDING_RATIO:
                chunks[run] = Chunk(run.slot_index, run.filled_length, end, end == len(run.prefill_ids))
            if (len(chunks) + 1) * width > self.token_budget:
                break

        return chunks

    def _chunk_images(self, chunks: Mapping[RunningRequest, Chunk]) -> ChunkImages | None:
        """Return the positions of all tokens of the chunks, and the patches of their images, on the device;
        None if all chunks lie behind the images of their prompts, or the prompts have none."""
        if all(chunk.start >= run.images.images_end for run, chunk in chunks.items()):
            return None

        width = max(chunk.end - chunk.start for chunk in chunks.values())
        rope_positions = np.zeros((3, len(chunks), width), dtype=np.int64)  # padding stays 0
        pixels: list[Pixels] = []
        for index, (run, chunk) in enumerate(chunks.items()):
            chunk_positions = run.images.positions_within(chunk.start, chunk.end)
            rope_positions[:, index, : chunk.end - chunk.start] = chunk_positions
            pixels += run.images.pixels_within(chunk.start, chunk.end)

        return ChunkImages(
            torch.from_numpy(rope_positions).flatten(1).to(self.cache.device),
            Pixels.concatenate(pixels).to(self.cache.device) if pixels else None,
        )

    def _awaits_prefix(self, run: RunningRequest) -> bool:
        """True if a request ahead is still computing the run's prefix. Copies a complete prefix if the
        present weights computed all of its KV: the sampled tokens are then as exact as without a copy."""
        if run.prefix_source is None:
            return False

        source_slot, length = run.prefix_source
        own_slot = run.slot
        prefix = run.prefill_ids[:length]
        assert own_slot is not None

        if (
            self._adapter_index(source_slot.agent) == self._adapter_index(own_slot.agent)
            and source_slot.held_ids[:length] == prefix
            and (source_slot.snapshot_length == length or not self.cache.has_states)
        ):
            if source_slot.swap_count == self._swap_count:
                self.cache.copy_prefix(source_slot.index, own_slot.index, length)
                run.filled_length = length
                own_slot.held_ids = prefix
                own_slot.snapshot_length = source_slot.snapshot_length
                own_slot.oldest_version = source_slot.oldest_version
                own_slot.swap_count = source_slot.swap_count
        else:
            runs_ahead = takewhile(lambda earlier_run: earlier_run is not run, self._filling_runs)
            if any(
                ahead.slot is source_slot
                and ahead.prefill_ids[:length] == prefix
                and (ahead.snapshot_length == length or not self.cache.has_states)
                for ahead in runs_ahead
            ):
                return True

        run.prefix_source = None
        return False
