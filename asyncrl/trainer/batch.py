"""From rows and turns to padded tensors.

    turns ──assemble──► Trajectory ──example──► Example ──collate──► MicroBatch

Everything that decides a token's gradient apart from the policy itself is fixed here, before the
forward: its advantage, its weight, its lag.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from asyncrl.algorithms.advantages import GroupRewards, advantages
from asyncrl.algorithms.aggregation import aggregations
from asyncrl.buffer.staleness import stale_mask, token_lags
from asyncrl.config import AlgorithmConfig
from asyncrl.errors import ProtocolError
from asyncrl.trainer.model import Selected
from asyncrl.transport.messages import Row
from asyncrl.types import Trajectory, Turn, VersionSpan


@dataclass(frozen=True)
class Example:
    """One trajectory with what its loss needs. Arrays are per model token, in order, [T_i].

    `weight` (per token) and `denominator` come from the aggregation rule. `stale` marks tokens over the
    bound, `exact` those whose whole context was computed by the version in training. `prox` is set
    behind a barrier only.
    """

    trajectory: Trajectory
    group: str
    advantage: float
    weight: float
    denominator: float
    position: np.ndarray
    mu: np.ndarray
    lag: np.ndarray
    stale: np.ndarray
    exact: np.ndarray
    prox: np.ndarray | None = None

    @property
    def tokens(self) -> int:
        """Model tokens."""
        return len(self.position)

    @property
    def length(self) -> int:
        """All tokens."""
        return len(self.trajectory.ids)


@dataclass(frozen=True)
class MicroBatch:
    """Padded ids [B, T] and the model tokens of all rows, flattened to [N].

    Token i is ids[row[i], position[i]], predicted from position - 1. `counted` is False only on the
    dummy token of a rank without rows. `fresh` tokens may contribute: those not stale. `prox` is None
    when the policy does not change between now and the optimizer step.
    """

    ids: Tensor
    row: Tensor
    position: Tensor
    temperature: Tensor
    mu: Tensor
    advantage: Tensor
    weight: Tensor
    lag: Tensor
    fresh: Tensor
    exact: Tensor
    counted: Tensor
    prox: Tensor | None

    @property
    def selected(self) -> Selected:
        return Selected(self.ids, self.row, self.position, self.temperature)

    def to(self, device: torch.device) -> MicroBatch:
        """All tensors on `device`."""
        tensors = ((f.name, getattr(self, f.name)) for f in fields(self))
        return replace(self, **{name: tensor.to(device) for name, tensor in tensors if tensor is not None})


def assemble(row: Row, turns: Sequence[Turn]) -> Trajectory:
    """Join the turns of an episode, token for token; spans move to trajectory positions.

    Raises ProtocolError when a turn's arrays do not fit each other.
    """
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    spans: list[VersionSpan] = []
    for turn in turns:
        _check(row.uid, turn, first=not ids)
        shift = len(ids) + len(turn.context)
        ids += (*turn.context, *turn.ids)
        mask += [0] * len(turn.context) + [1] * len(turn.ids)
        logprobs += [0.0] * len(turn.context) + list(turn.logprobs)
        spans += (VersionSpan(s.start + shift, s.end + shift, s.version, s.kv_version) for s in turn.spans)
    return Trajectory(
        uid=row.uid,
        ids=tuple(ids),
        mask=tuple(mask),
        logprobs=tuple(logprobs),
        spans=tuple(spans),
        reward=row.reward,
        end=row.end,
        turns=len(turns),
        tool_calls=sum(len(turn.replies) for turn in turns),
        temperature=row.temperature,
        seconds=sum(turn.seconds for turn in turns),
    )


def _check(uid: str, turn: Turn, *, first: bool) -> None:
    """Every model token has a log-prob, a version and a token before it that predicts it."""
    covered = [p for span in turn.spans for p in range(span.start, span.end)]
    if len(turn.ids) != len(turn.logprobs) or covered != list(range(len(turn.ids))):
        raise ProtocolError(
            f"episode {uid} turn {turn.index}: {len(turn.ids)} tokens with {len(turn.logprobs)} log-probs "
            f"and spans {[(s.start, s.end) for s in turn.spans]}"
        )
    if first and turn.ids and not turn.context:
        raise ProtocolError(f"episode {uid} starts with a model token: nothing predicts it")


def example(row: Row, turns: Sequence[Turn], step: int, bound: int, config: AlgorithmConfig) -> Example:
    """Assemble one row for batch `step`: advantage, aggregation share, lags, and what is over `bound`."""
    trajectory = assemble(row, turns)
    position = np.flatnonzero(np.asarray(trajectory.mask, dtype=np.int64))
    share = aggregations.get(config.aggregation)(len(position), row.group_tokens)
    rewards = GroupRewards(row.reward, row.siblings, row.self_inside)
    spans = trajectory.spans  # in order and without gaps, so repeating them aligns to `position`
    sizes = [span.end - span.start for span in spans]
    exact = [span.version == span.kv_version == step for span in spans]
    lags = token_lags(spans, step)
    return Example(
        trajectory=trajectory,
        group=row.group,
        advantage=advantages.load(config.advantage)(rewards),
        weight=share.weight,
        denominator=share.denominator,
        position=position,
        mu=np.asarray(trajectory.logprobs, dtype=np.float64)[position],
        lag=np.asarray(lags, dtype=np.int64),
        stale=np.asarray(stale_mask(lags, bound), dtype=bool),
        exact=np.repeat(np.asarray(exact, dtype=bool), sizes),
    )


def collate(examples: Sequence[Example], dtype: torch.dtype) -> MicroBatch:
    """Pad on the right and flatten. `dtype`: of real numbers.

    Without a model token (an idle rank), one dummy token of weight zero keeps forward and backward valid.
    """
    counts = [e.tokens for e in examples]
    if not sum(counts):
        return _dummy(dtype)
    ids = np.zeros((len(examples), max(e.length for e in examples)), dtype=np.int64)
    for i, e in enumerate(examples):
        ids[i, : e.length] = e.trajectory.ids

    def spread(values: Sequence[float]) -> Tensor:
        return torch.from_numpy(np.repeat(np.asarray(values, dtype=np.float64), counts)).to(dtype)

    def join(name: str) -> Tensor:
        return torch.from_numpy(np.concatenate([getattr(e, name) for e in examples]))

    return MicroBatch(
        ids=torch.from_numpy(ids),
        row=torch.from_numpy(np.repeat(np.arange(len(examples)), counts)),
        position=join("position"),
        temperature=spread([e.trajectory.temperature for e in examples]),
        mu=join("mu").to(dtype),
        advantage=spread([e.advantage for e in examples]),
        weight=spread([e.weight for e in examples]),
        lag=join("lag"),
        fresh=~join("stale"),
        exact=join("exact"),
        counted=torch.ones(sum(counts), dtype=torch.bool),
        prox=join("prox").to(dtype) if examples[0].prox is not None else None,
    )


def _dummy(dtype: torch.dtype) -> MicroBatch:
    zero, no = torch.zeros(1, dtype=dtype), torch.zeros(1, dtype=torch.bool)
    index = torch.zeros(1, dtype=torch.int64)
    return MicroBatch(
        ids=torch.zeros(1, 2, dtype=torch.int64),
        row=index,
        position=index + 1,
        temperature=zero + 1,
        mu=zero,
        advantage=zero,
        weight=zero,
        lag=index,
        fresh=no,
        exact=no,
        counted=no,
        prox=None,
    )
