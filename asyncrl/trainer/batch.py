"""From planned trajectories and their turns to padded tensors.

    turns ──training_sample──► TrainingSample ──collate──► MicroBatch

Everything but the models that a token's gradient depends on is fixed here, before any forward: its weight,
its lag, whether it may contribute. Log-probs and values by models are added to a TrainingSample later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from asyncrl.algorithms.aggregation import Aggregation
from asyncrl.algorithms.credit import AdvantageInput, token_rewards
from asyncrl.buffer.packing import Piece, micro_batches, partition_units, units
from asyncrl.buffer.payloads import check_turn
from asyncrl.buffer.staleness import stale_mask, token_lags
from asyncrl.config import Packing
from asyncrl.conversation.turns import without_untrained
from asyncrl.errors import ProtocolError
from asyncrl.trainer.forced_routes import NO_ROUTES, UNKNOWN_EXPERT
from asyncrl.trainer.images import ImagePixels
from asyncrl.trainer.scores import Selected
from asyncrl.trainer.staging import moved_to_device, to_device
from asyncrl.trainer.teacher import TeacherScores, references, teacher_sequences_of, topk_of_turns
from asyncrl.types import Turn
from asyncrl.wire.messages.trainer import PlannedTrajectory


@dataclass(frozen=True)
class TrainingSample:
    """Holds one trajectory with everything that its loss needs. Arrays are per model token, in order, [T_i].

    `sequences`: all its tokens, one array per sequence; a model token is sequences[sequence_of][position].
    `weight` (per token) and `denominator` come from the aggregation rule. `rewards`: the reward of each
    token. `stale` marks tokens over the staleness bound, `exact` tokens whose whole context was computed by
    the version in training; `excluded`: the episode is kept out of the loss. `proximal_logprobs`,
    `reference`, `value` (the critic's, before the batch moved it), `prepared` (by the loss) and `collision`
    (Σ π²) are set where the recipe asks for them. `routes`: the experts of each sequence's first tokens, [·,
    layers * k], -1 for a gap. `sequence_adapters`: the index of each sequence's adapter, where there are
    several. `teacher_sequences`: the sequences behind the teacher's prompts, if these differ. `teacher_topk`:
    the likeliest tokens by a teacher on servers, [T_i, k] ids and log-probs.
    """

    planned: PlannedTrajectory
    sequences: tuple[np.ndarray, ...]
    turns: int
    weight: float
    denominator: float
    sequence_of: np.ndarray
    position: np.ndarray
    turn: np.ndarray
    rewards: np.ndarray
    rollout_logprobs: np.ndarray
    lag: np.ndarray
    stale: np.ndarray
    exact: np.ndarray
    routes: tuple[np.ndarray, ...] = ()
    sequence_adapters: tuple[int, ...] = ()
    teacher_sequences: tuple[np.ndarray, ...] = ()
    teacher_topk: tuple[np.ndarray, np.ndarray] | None = None
    excluded: bool = False
    advantage: np.ndarray | None = None
    returns: np.ndarray | None = None
    proximal_logprobs: np.ndarray | None = None
    reference: np.ndarray | None = None
    value: np.ndarray | None = None
    prepared: np.ndarray | None = None
    collision: np.ndarray | None = None

    @property
    def group(self) -> str:
        return self.planned.group

    @property
    def model_tokens(self) -> int:
        """Return the number of tokens that the model sampled."""
        return len(self.position)

    @property
    def total_tokens(self) -> int:
        """Return the number of all tokens, of all sequences."""
        return sum(map(len, self.sequences))

    @property
    def prompt_tokens(self) -> int:
        """Return the number of tokens before the first sampled token."""
        return int(self.position[0]) if self.model_tokens else self.total_tokens

    @property
    def longest_sequence(self) -> int:
        """Return the number of tokens of the longest sequence."""
        return max(map(len, self.sequences))

    @property
    def within_staleness(self) -> np.ndarray:
        """Return which tokens [T_i] may contribute, as far as is known before a forward."""
        return ~self.stale & (not self.excluded)

    @property
    def has_advantage(self) -> bool:
        """True if some token's advantage is not 0."""
        return self.advantage is not None and bool(self.advantage.any())

    @property
    def is_scored(self) -> bool:
        """True if the trajectory has an advantage, or is the first of its group. The first is always scored,
        so that the log-probs of trainer and engines are compared even where no episode has an advantage."""
        return self.has_advantage or self.planned.place == 0

    def advantage_input(self) -> AdvantageInput:
        """Return the inputs of the advantage."""
        planned = self.planned
        return AdvantageInput(
            own=planned.own,
            siblings=planned.siblings,
            rewards=self.rewards,
            turn=self.turn,
            issued=planned.issued,
            position=planned.place,
            values=self.value,
            greedy=planned.greedy,
        )


@dataclass(frozen=True)
class MicroBatch:
    """Holds the model tokens of all sequences, flattened to [N]; token i belongs to episode[i], which may
    have several sequences. `adapter_index`: the index of the token's adapter, where there are several; the
    tokens of each adapter then count as an episode.

    `is_counted` is False only on the dummy token of a rank without sequences. `within_staleness`: the token
    may contribute, as it is neither stale nor excluded. `teacher_tokens`: the same tokens behind a teacher's
    prompts, if these differ. The last fields are the OPTIONAL_COLUMNS that the recipe asks for;
    `proximal_logprobs` is None where the policy does not change between now and the optimizer step.
    """

    selected: Selected
    episode: Tensor
    turn: Tensor
    rollout_logprobs: Tensor
    weight: Tensor
    lag: Tensor
    within_staleness: Tensor
    is_exact: Tensor
    is_counted: Tensor
    adapter_index: Tensor | None = None
    teacher_tokens: Selected | None = None
    advantage: Tensor | None = None
    returns: Tensor | None = None
    proximal_logprobs: Tensor | None = None
    reference: Tensor | None = None
    value: Tensor | None = None
    prepared: Tensor | None = None

    @property
    def reference_tokens(self) -> Selected:
        """Return the tokens as the reference reads them."""
        return self.teacher_tokens or self.selected

    def updated(self, samples: Sequence[TrainingSample]) -> MicroBatch:
        """Return a copy with the fields that the samples gained since they were collated; other fields are
        not copied again."""
        if not any(sample.model_tokens for sample in samples):
            return self
        return replace(
            self, **_optional_columns(samples, self.rollout_logprobs.dtype, self.rollout_logprobs.device)
        )

    def to(self, device: torch.device) -> MicroBatch:
        return moved_to_device(self, device)

    def with_tensors(self, convert: Callable[[Tensor], Tensor], device: torch.device) -> MicroBatch:
        """Return a copy whose tensors went through `convert`, with attention on `device`."""
        converted_columns: dict[str, Any] = {
            name: column.with_tensors(convert, device) if isinstance(column, Selected) else convert(column)
            for name, column in vars(self).items()
            if column is not None
        }
        return replace(self, **converted_columns)


_turn_decoder = msgspec.msgpack.Decoder(Turn)
OPTIONAL_COLUMNS = ("advantage", "returns", "proximal_logprobs", "reference", "value", "prepared")


def partition_plan(
    planned: Sequence[PlannedTrajectory],
    packing: Packing,
    token_budget: int,
    hidden_size: int,
    rank_count: int,
) -> list[list[list[PlannedTrajectory]]]:
    """Partition one part of a plan among all data ranks, with about the same work for each. Each rank's share
    is in lists of about a micro-batch of `token_budget` tokens. The result follows from the arguments alone,
    so all ranks compute the same.

    Attention takes 2·d·s of a token in a sequence of s, beside the 24·d² of a layer's matrix products; d:
    `hidden_size`.
    """
    plan_pieces = [
        Piece(
            key=trajectory.group if packing == "tree" else trajectory.uid,
            tokens=trajectory.tokens,
            shared=trajectory.prompt,
            rows=trajectory.rows,
            width=trajectory.width,
            attention=trajectory.tokens * trajectory.width / (12 * hidden_size),
        )
        for trajectory in planned
    ]

    largest_first = sorted(units(plan_pieces, token_budget, rank_count), key=lambda unit: -unit.work)
    parts_by_rank = []
    for rank_part in partition_units(largest_first, rank_count):
        rank_pieces = [plan_pieces[index] for index in rank_part.members]
        index_lists = micro_batches(rank_pieces, token_budget)
        parts_by_rank.append(
            [[planned[rank_part.members[index]] for index in indices] for indices in index_lists]
        )

    return parts_by_rank


def with_turns(
    planned: Sequence[PlannedTrajectory], frames: list[bytes]
) -> list[tuple[PlannedTrajectory, list[Turn]]]:
    """Return each trajectory of a plan with its trained turns. ProtocolError: the number of turns does not
    match."""
    frame_count = sum(trajectory.frames for trajectory in planned)
    if frame_count != len(frames):
        raise ProtocolError(f"the plan lists {frame_count} turns, but {len(frames)} arrived")

    turns = map(_turn_decoder.decode, frames)
    return [
        (trajectory, list(without_untrained(tuple(islice(turns, trajectory.frames)))))
        for trajectory in planned
    ]


def training_sample(
    planned: PlannedTrajectory,
    turns: Sequence[Turn],
    current_version: int,
    max_staleness: int,
    aggregation: Aggregation,
    *,
    mask_truncated: bool = False,
    expert_choices: int = 0,
    scorer_topk: int | None = None,
    agent_names: Sequence[str] = ("",),
) -> TrainingSample:
    """Join the turns of a trajectory token by token, for the step that starts from `current_version`, with
    their weight by the `aggregation` rule, rewards and lags, and mark tokens over `max_staleness`.

    `expert_choices`: how many experts the model chooses for a token, if the servers' choices are replayed;
    else 0. `scorer_topk`: turns carry the reference's log-probs, and as many likeliest tokens per position; a
    turn without gets NaN, so that its tokens are left out. `agent_names`: the agents that have adapters.
    Raises ProtocolError when a turn's arrays do not fit each other, or its row.
    """
    sequences: list[list[int]] = []
    token_origins: list[tuple[int, int]] = []  # row and position of each model token
    for turn in turns:
        check_turn(planned.uid, turn, len(sequences))
        if turn.row == len(sequences):
            sequences.append([])
        ids = sequences[turn.row]
        ids += turn.context
        context_end = len(ids)
        ids += turn.generation.ids
        token_origins += ((turn.row, position) for position in range(context_end, len(ids)))

    sequence_of, position = np.array(token_origins, dtype=np.int64).reshape(-1, 2).T
    turn_indices = np.repeat(np.arange(len(turns)), [len(turn.generation.ids) for turn in turns])
    version_spans = [span for turn in turns for span in turn.generation.spans]
    staleness = token_lags(version_spans, current_version)
    exact_spans = [span.version == span.kv_version == current_version for span in version_spans]
    token_share = aggregation(len(token_origins), planned.group_tokens)
    sequence_adapters = {  # in the order of sequences, as rows begin in the order of their numbers
        turn.row: agent_names.index(turn.agent) if turn.agent in agent_names else 0 for turn in turns
    }

    return TrainingSample(
        planned=planned,
        sequences=tuple(np.asarray(ids, dtype=np.int32) for ids in sequences),
        turns=len(turns),
        weight=token_share.weight,
        denominator=token_share.denominator,
        sequence_of=sequence_of,
        position=position,
        turn=turn_indices,
        rewards=token_rewards(planned.own, turn_indices),
        rollout_logprobs=np.array(
            [logprob for turn in turns for logprob in turn.generation.logprobs], dtype=np.float64
        ),
        lag=np.asarray(staleness, dtype=np.int64),
        stale=np.asarray(stale_mask(staleness, max_staleness), dtype=bool),
        exact=np.repeat(
            np.array(exact_spans, dtype=bool),
            [span.end - span.start for span in version_spans],
        ),
        reference=None if scorer_topk is None else references(turns, scorer_topk),
        routes=sequence_routes(turns, [*map(len, sequences)], expert_choices) if expert_choices else (),
        sequence_adapters=tuple(sequence_adapters.values()) if len(agent_names) > 1 else (),
        teacher_sequences=teacher_sequences_of(sequences, turns) if scorer_topk is None else (),
        teacher_topk=topk_of_turns(turns, scorer_topk) if scorer_topk else None,
        excluded=mask_truncated and planned.own.end.truncated,
    )


def sequence_routes(
    turns: Sequence[Turn], lengths: Sequence[int], expert_choices: int
) -> tuple[np.ndarray, ...]:
    """Return the experts of each sequence's first tokens. If two turns report a token's experts, the first
    report wins (the second turn was sampled by a worker that did not know the first). Reports of a model with
    other `expert_choices` are left out."""
    parts_by_sequence: list[list[np.ndarray]] = [[NO_ROUTES] for _ in lengths]
    for turn in turns:
        routes = turn.generation.routes
        if routes is not None and len(routes.data) == 2 * expert_choices * routes.tokens:
            turn_routes = np.frombuffer(routes.data, "<u2").astype(np.int32).reshape(routes.tokens, -1)
            parts = parts_by_sequence[turn.row]
            start = min(routes.start, lengths[turn.row])
            known_tokens = sum(map(len, parts))
            gap = np.full(
                (max(0, start - known_tokens), turn_routes.shape[1]), UNKNOWN_EXPERT, dtype=np.int32
            )
            parts += [gap, turn_routes[max(0, known_tokens - start) :]]

    joined_parts = (np.concatenate(parts[1:]) if len(parts) > 1 else parts[0] for parts in parts_by_sequence)
    return tuple(part[:length] for part, length in zip(joined_parts, lengths, strict=True))


def collate(
    samples: Sequence[TrainingSample],
    dtype: torch.dtype,
    packing: Packing = "padded",
    image_pixels: ImagePixels | None = None,
) -> MicroBatch:
    """Lay out the sequences and flatten them. `dtype`: of real numbers. `image_pixels`: see
    Selected.lay_out.

    Without a model token (an idle rank), a dummy token of weight zero keeps forward and backward valid.
    """
    token_counts = [sample.model_tokens for sample in samples]
    if not sum(token_counts):
        return _dummy_batch(dtype, packing, image_pixels)

    def per_token(values: Sequence[float]) -> Tensor:
        return torch.from_numpy(np.repeat(np.asarray(values, dtype=np.float64), token_counts)).to(dtype)

    join_column = partial(_join_column, samples)
    sequence_of = (
        np.repeat(np.cumsum([0, *(len(sample.sequences) for sample in samples[:-1])]), token_counts)
        + join_column("sequence_of").numpy()
    )
    position = join_column("position").numpy()
    temperature = per_token([sample.planned.temperature for sample in samples])
    sequences = [sequence for sample in samples for sequence in sample.sequences]
    routes = [
        routes_of_sequence
        for sample in samples
        for routes_of_sequence in sample.routes or [NO_ROUTES] * len(sample.sequences)
    ]
    episode_index = np.repeat(np.arange(len(samples)), token_counts)

    adapter_index = None
    adapters = [adapter for sample in samples for adapter in sample.sequence_adapters]
    if adapters:
        adapter_index = np.concatenate(
            [np.asarray(sample.sequence_adapters)[sample.sequence_of] for sample in samples]
        )
        episode_index = np.unique(episode_index * (max(adapters) + 1) + adapter_index, return_inverse=True)[1]

    selected = Selected.lay_out(
        sequences, sequence_of, position, temperature, packing, routes, adapters, image_pixels
    )

    teacher_tokens = None
    if teacher_sequences := [sequence for sample in samples for sequence in sample.teacher_sequences]:
        extra_tokens = np.array(
            [
                len(teacher_sequence) - len(sequence)
                for teacher_sequence, sequence in zip(teacher_sequences, sequences, strict=True)
            ]
        )
        teacher_tokens = Selected.lay_out(
            teacher_sequences,
            sequence_of,
            position + extra_tokens[sequence_of],
            temperature,
            packing,
            image_pixels=image_pixels,
        )

    if topk_parts := [sample.teacher_topk for sample in samples if sample.teacher_topk is not None]:
        selected = replace(
            selected, teacher_scores=TeacherScores.concatenate(topk_parts, join_column("reference").to(dtype))
        )

    return MicroBatch(
        selected=selected,
        teacher_tokens=teacher_tokens,
        episode=torch.from_numpy(episode_index),
        adapter_index=None if adapter_index is None else torch.from_numpy(adapter_index),
        turn=join_column("turn"),
        rollout_logprobs=join_column("rollout_logprobs").to(dtype),
        weight=per_token([sample.weight for sample in samples]),
        lag=join_column("lag"),
        within_staleness=join_column("within_staleness"),
        is_exact=join_column("exact"),
        is_counted=torch.ones(sum(token_counts), dtype=torch.bool),
        **_optional_columns(samples, dtype, torch.device("cpu")),
    )


def _optional_columns(
    samples: Sequence[TrainingSample], dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    names = [name for name in OPTIONAL_COLUMNS if getattr(samples[0], name) is not None]
    columns = to_device([_join_column(samples, name).to(dtype) for name in names], device)
    return dict(zip(names, columns, strict=True))


def _join_column(samples: Sequence[TrainingSample], name: str) -> Tensor:
    return torch.from_numpy(np.concatenate([getattr(sample, name) for sample in samples]))


def with_values(samples: Sequence[TrainingSample], name: str, values: Tensor) -> list[TrainingSample]:
    """Return the samples with the numbers that a model computed for their tokens, [N] over all samples in
    order. The value of a dummy token lies beyond the last sample and is dropped."""
    token_ends = np.cumsum([sample.model_tokens for sample in samples])
    values_by_sample = np.split(values.double().cpu().numpy(), token_ends)[:-1]
    added_fields: list[dict[str, Any]] = [{name: piece} for piece in values_by_sample]
    return [replace(sample, **added_field) for sample, added_field in zip(samples, added_fields, strict=True)]


def _dummy_batch(dtype: torch.dtype, packing: Packing, image_pixels: ImagePixels | None) -> MicroBatch:
    zero = torch.zeros(1, dtype=dtype)
    false = torch.zeros(1, dtype=torch.bool)
    zero_index = torch.zeros(1, dtype=torch.int64)
    ids = np.zeros(2, dtype=np.int64)
    second_token = Selected.lay_out(
        [ids], np.array([0]), np.array([1]), zero + 1, packing, image_pixels=image_pixels
    )

    return MicroBatch(
        selected=replace(
            second_token, teacher_scores=TeacherScores(zero_index[:, None], zero[:, None], zero)
        ),
        episode=zero_index,
        turn=zero_index,
        rollout_logprobs=zero,
        weight=zero,
        lag=zero_index,
        within_staleness=false,
        is_exact=false,
        is_counted=false,
        teacher_tokens=None,
        **dict.fromkeys(OPTIONAL_COLUMNS, zero),
    )
