"""From planned trajectories and their turns to padded tensors.

    turns ──example──► Example ──collate──► MicroBatch

What a token's gradient depends on beside the models is fixed here, before any forward: its weight, its
lag, whether it may contribute. Log-probs and values that models compute are added to an Example later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from asyncrl.algorithms.aggregation import Aggregation
from asyncrl.algorithms.credit import CreditInput, token_rewards
from asyncrl.buffer.packing import Piece, deal, micro_batches, units
from asyncrl.buffer.payloads import check_turn
from asyncrl.buffer.staleness import stale_mask, token_lags
from asyncrl.config import Packing
from asyncrl.conversation.turns import trained
from asyncrl.errors import ProtocolError
from asyncrl.trainer.forced_routes import UNKNOWN
from asyncrl.trainer.scores import Selected
from asyncrl.trainer.staging import moved, to_device
from asyncrl.trainer.teacher import Told, likeliest, references, taught_rows
from asyncrl.types import Turn
from asyncrl.wire.messages.trainer import PlannedTrajectory


@dataclass(frozen=True)
class Example:
    """Holds one trajectory with what its loss needs. Arrays are per model token, in order, [T_i].

    `rows`: all its tokens, one array per row; a model token is rows[row_of][position]. `weight` (per token)
    and `denominator` come from the aggregation rule. `rewards`: what fell on each token.
    `stale` marks tokens over the bound, `exact` those whose whole context was computed by the version in
    training; `excluded`: the episode is kept out of the loss. `prox`, `reference`, `value` (the critic's,
    before the batch moved it), `prepared` (by the loss) and `collision` (Σ π²) are there where the recipe
    asks for them. `routes`: of each row the experts of its first tokens, [·, layers * k], -1 for a gap.
    `agents`: of each row the place of its adapter, where there are several.
    `taught`: the rows as a teacher in the trainer reads them, if their prompts are others. `likeliest`: what
    one on servers told of each token, [T_i, k] ids and log-probs.
    """

    planned: PlannedTrajectory
    rows: tuple[np.ndarray, ...]
    turns: int
    weight: float
    denominator: float
    row_of: np.ndarray
    position: np.ndarray
    turn: np.ndarray
    rewards: np.ndarray
    mu: np.ndarray
    lag: np.ndarray
    stale: np.ndarray
    exact: np.ndarray
    routes: tuple[np.ndarray, ...] = ()
    agents: tuple[int, ...] = ()
    taught: tuple[np.ndarray, ...] = ()
    likeliest: tuple[np.ndarray, np.ndarray] | None = None
    excluded: bool = False
    advantage: np.ndarray | None = None
    returns: np.ndarray | None = None
    prox: np.ndarray | None = None
    reference: np.ndarray | None = None
    value: np.ndarray | None = None
    prepared: np.ndarray | None = None
    collision: np.ndarray | None = None

    @property
    def group(self) -> str:
        return self.planned.group

    @property
    def tokens(self) -> int:
        """Model tokens."""
        return len(self.position)

    @property
    def length(self) -> int:
        """Return all tokens, of all rows."""
        return sum(map(len, self.rows))

    @property
    def prompt(self) -> int:
        """Tokens before the first that the model sampled."""
        return int(self.position[0]) if self.tokens else self.length

    @property
    def longest(self) -> int:
        """Return tokens of its longest row."""
        return max(map(len, self.rows))

    @property
    def fresh(self) -> np.ndarray:
        """Tokens [T_i] that may contribute, as far as is known before a forward."""
        return ~self.stale & (not self.excluded)

    @property
    def has_advantage(self) -> bool:
        """Some token's advantage is not 0."""
        return self.advantage is not None and bool(self.advantage.any())

    @property
    def is_read(self) -> bool:
        """True if the trajectory has an advantage, or is the first of its group, one of which is always
        scored: where nobody has an advantage, the log-probs of trainer and engines are still compared."""
        return self.has_advantage or self.planned.place == 0

    def credit_input(self) -> CreditInput:
        """Return the inputs of the advantage."""
        p = self.planned
        return CreditInput(
            p.own, p.siblings, self.rewards, self.turn, p.issued, p.place, self.value, p.greedy
        )


@dataclass(frozen=True)
class MicroBatch:
    """The model tokens of all rows, flattened to [N]; token i is of episode[i], which may have several rows.
    `agent`: the place of its adapter, where there are several: those of each are an episode by themselves.

    `counted` is False only on the dummy token of a rank without rows. `fresh` tokens may
    contribute: not stale, not excluded. `taught`: the same tokens behind the prompts of a teacher, if these
    are others. The last fields are those of ADDED that the recipe asks for; `prox` is None where the policy
    does not change between now and the optimizer step.
    """

    selected: Selected
    episode: Tensor
    turn: Tensor
    mu: Tensor
    weight: Tensor
    lag: Tensor
    fresh: Tensor
    exact: Tensor
    counted: Tensor
    agent: Tensor | None = None
    taught: Selected | None = None
    advantage: Tensor | None = None
    returns: Tensor | None = None
    prox: Tensor | None = None
    reference: Tensor | None = None
    value: Tensor | None = None
    prepared: Tensor | None = None

    @property
    def for_reference(self) -> Selected:
        """Return what the reference reads."""
        return self.taught or self.selected

    def updated(self, examples: Sequence[Example]) -> MicroBatch:
        """With the fields added to the examples since they were collated; no others are copied again."""
        if not any(e.tokens for e in examples):
            return self
        added: dict[str, Any] = _added(examples, self.mu.dtype, self.mu.device)
        return replace(self, **added)

    def to(self, device: torch.device) -> MicroBatch:
        return moved(self, device)

    def with_tensors(self, convert: Callable[[Tensor], Tensor], device: torch.device) -> MicroBatch:
        """Return a copy whose tensors went through `convert`, and whose attention runs on `device`."""
        columns = {f.name: getattr(self, f.name) for f in fields(self)}
        changed: dict[str, Any] = {
            name: column.with_tensors(convert, device) if isinstance(column, Selected) else convert(column)
            for name, column in columns.items()
            if column is not None
        }
        return replace(self, **changed)


NO_ROUTES = np.empty((0, 0), dtype=np.int32)
_turns = msgspec.msgpack.Decoder(Turn)
ADDED = ("advantage", "returns", "prox", "reference", "value", "prepared")  # by models and recipe, or None


def dealt(
    planned: Sequence[PlannedTrajectory], packing: Packing, budget: int, hidden: int, ranks: int
) -> list[list[list[PlannedTrajectory]]]:
    """The parts of a plan of all data ranks, which have about the same work, each in parts of about a
    micro-batch of `budget` tokens. It follows from the arguments alone, so all ranks find the same.

    Attention is 2·d·s of a token in a row of s, beside the 24·d² of a layer's matrix products; d: `hidden`.
    """
    pieces = [
        Piece(
            key=p.group if packing == "tree" else p.uid,
            tokens=p.tokens,
            shared=p.prompt,
            rows=p.rows,
            width=p.width,
            attention=p.tokens * p.width / (12 * hidden),
        )
        for p in planned
    ]
    largest_first = sorted(units(pieces, budget, ranks), key=lambda unit: -unit.work)
    found = []
    for part in deal(largest_first, ranks):
        own = [pieces[index] for index in part.members]
        found.append([[planned[part.members[i]] for i in cut] for cut in micro_batches(own, budget)])
    return found


def with_turns(
    planned: Sequence[PlannedTrajectory], frames: list[bytes]
) -> list[tuple[PlannedTrajectory, list[Turn]]]:
    """Return each trajectory of a plan with its trained turns. ProtocolError: there are not as many."""
    if sum(p.frames for p in planned) != len(frames):
        raise ProtocolError(f"plan names {sum(p.frames for p in planned)} turns, {len(frames)} came")
    turns = map(_turns.decode, frames)
    return [(p, list(trained(tuple(islice(turns, p.frames))))) for p in planned]


def example(
    planned: PlannedTrajectory,
    turns: Sequence[Turn],
    step: int,
    bound: int,
    rule: Aggregation,
    *,
    mask_truncated: bool = False,
    choices: int = 0,
    scored: int | None = None,
    agents: Sequence[str] = ("",),
) -> Example:
    """Join the turns of a trajectory token for token, for batch `step`, with the share of its aggregation
    rule, rewards and lags of its tokens, and which tokens are over `bound`. `choices` of experts that the
    model makes for a token, if they are to be made as the servers did. `scored`: turns bring the log-probs of
    the reference, and as many likeliest tokens of each place; those of a turn without are NaN, so that its
    tokens are left out. `agents` have adapters.

    Raises ProtocolError when a turn's arrays do not fit each other, or its row.
    """
    rows: list[list[int]] = []
    places: list[tuple[int, int]] = []  # row and position of each model token
    for turn in turns:
        check_turn(planned.uid, turn, len(rows))
        if turn.row == len(rows):
            rows.append([])
        ids = rows[turn.row]
        ids += (*turn.context, *turn.ids)
        places += ((turn.row, position) for position in range(len(ids) - len(turn.ids), len(ids)))
    row_of, position = np.array(places, dtype=np.int64).reshape(-1, 2).T
    turn_of = np.repeat(np.arange(len(turns)), [len(turn.ids) for turn in turns])
    spans = [span for turn in turns for span in turn.spans]
    lags = token_lags(spans, step)
    exact = [span.version == span.kv_version == step for span in spans]
    share = rule(len(places), planned.group_tokens)
    whose = {turn.row: agents.index(turn.agent) if turn.agent in agents else 0 for turn in turns}
    return Example(
        planned=planned,
        rows=tuple(np.asarray(ids, dtype=np.int32) for ids in rows),
        turns=len(turns),
        weight=share.weight,
        denominator=share.denominator,
        row_of=row_of,
        position=position,
        turn=turn_of,
        rewards=token_rewards(planned.own, turn_of),
        mu=np.array([p for turn in turns for p in turn.logprobs], dtype=np.float64),
        lag=np.asarray(lags, dtype=np.int64),
        stale=np.asarray(stale_mask(lags, bound), dtype=bool),
        exact=np.repeat(np.asarray(exact, dtype=bool), [span.end - span.start for span in spans]),
        reference=None if scored is None else references(turns, scored),
        routes=row_routes(turns, [*map(len, rows)], choices) if choices else (),
        agents=tuple(whose[row] for row in range(len(rows))) if len(agents) > 1 else (),
        taught=taught_rows(rows, turns) if scored is None else (),
        likeliest=likeliest(turns, scored) if scored else None,
        excluded=mask_truncated and planned.own.end.truncated,
    )


def row_routes(turns: Sequence[Turn], lengths: Sequence[int], choices: int) -> tuple[np.ndarray, ...]:
    """The experts of the first tokens of each row, of such lengths. A token that two turns tell of (the
    second one was sampled by a worker that did not know the first) went as the first one says. Those of
    a model with other `choices` are left out."""
    found: list[list[np.ndarray]] = [[NO_ROUTES] for _ in lengths]
    for turn in turns:
        if turn.routes is not None and len(turn.routes.data) == 2 * choices * turn.routes.tokens:
            told = np.frombuffer(turn.routes.data, "<u2").astype(np.int32).reshape(turn.routes.tokens, -1)
            parts = found[turn.row]
            start = min(turn.routes.start, lengths[turn.row])
            known = sum(map(len, parts))
            gap = np.full((max(0, start - known), told.shape[1]), UNKNOWN, dtype=np.int32)
            parts += [gap, told[max(0, known - start) :]]
    joined = (np.concatenate(parts[1:]) if len(parts) > 1 else parts[0] for parts in found)
    return tuple(own[:length] for own, length in zip(joined, lengths, strict=True))


def collate(examples: Sequence[Example], dtype: torch.dtype, packing: Packing = "padded") -> MicroBatch:
    """Lay out the rows and flatten. `dtype`: of real numbers.

    Without a model token (an idle rank), one dummy token of weight zero keeps forward and backward valid.
    """
    counts = [e.tokens for e in examples]
    if not sum(counts):
        return _dummy(dtype, packing)

    def spread(values: Sequence[float]) -> Tensor:
        return torch.from_numpy(np.repeat(np.asarray(values, dtype=np.float64), counts)).to(dtype)

    def join(name: str) -> Tensor:
        return _join(examples, name)

    row_of = np.repeat(np.cumsum([0, *(len(e.rows) for e in examples[:-1])]), counts) + join("row_of").numpy()
    position = join("position").numpy()
    temperature = spread([e.planned.temperature for e in examples])
    rows = [row for e in examples for row in e.rows]
    routes = [own for e in examples for own in e.routes or [NO_ROUTES] * len(e.rows)]
    episode = np.repeat(np.arange(len(examples)), counts)
    agent = None
    agents = [at for e in examples for at in e.agents]
    if agents:
        agent = np.concatenate([np.asarray(e.agents)[e.row_of] for e in examples])
        episode = np.unique(episode * (max(agents) + 1) + agent, return_inverse=True)[1]
    selected = Selected.of(rows, row_of, position, temperature, packing, routes, agents)
    taught = None
    if theirs := [row for e in examples for row in e.taught]:
        longer = np.array([len(other) - len(own) for other, own in zip(theirs, rows, strict=True)])
        taught = Selected.of(theirs, row_of, position + longer[row_of], temperature, packing)
    if told := [e.likeliest for e in examples if e.likeliest is not None]:
        selected = replace(selected, told=Told.of(told, join("reference").to(dtype)))
    return MicroBatch(
        selected=selected,
        taught=taught,
        episode=torch.from_numpy(episode),
        agent=None if agent is None else torch.from_numpy(agent),
        turn=join("turn"),
        mu=join("mu").to(dtype),
        weight=spread([e.weight for e in examples]),
        lag=join("lag"),
        fresh=join("fresh"),
        exact=join("exact"),
        counted=torch.ones(sum(counts), dtype=torch.bool),
        **_added(examples, dtype, torch.device("cpu")),
    )


def _added(examples: Sequence[Example], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    known = [name for name in ADDED if getattr(examples[0], name) is not None]
    columns = to_device([_join(examples, name).to(dtype) for name in known], device)
    return dict(zip(known, columns, strict=True))


def _join(examples: Sequence[Example], name: str) -> Tensor:
    return torch.from_numpy(np.concatenate([getattr(e, name) for e in examples]))


def with_values(examples: Sequence[Example], name: str, values: Tensor) -> list[Example]:
    """The examples with what a model computed of their tokens, [N] over all of them in order. The value of a
    dummy token lies beyond the last one and is dropped."""
    edges = np.cumsum([e.tokens for e in examples])
    pieces = np.split(values.double().cpu().numpy(), edges)[:-1]
    added: list[dict[str, Any]] = [{name: piece} for piece in pieces]
    return [replace(e, **one) for e, one in zip(examples, added, strict=True)]


def _dummy(dtype: torch.dtype, packing: Packing) -> MicroBatch:
    zero = torch.zeros(1, dtype=dtype)
    no = torch.zeros(1, dtype=torch.bool)
    index = torch.zeros(1, dtype=torch.int64)
    told = Told(index[:, None], zero[:, None], zero)
    ids = np.zeros(2, dtype=np.int64)
    first = np.array([0])
    second = np.array([1])
    return MicroBatch(
        selected=replace(Selected.of([ids], first, second, zero + 1, packing), told=told),
        episode=index,
        turn=index,
        mu=zero,
        weight=zero,
        lag=index,
        fresh=no,
        exact=no,
        counted=no,
        taught=None,
        **dict.fromkeys(ADDED, zero),
    )
