"""A policy small enough to sum over everything it can do: no sampling, no tolerance for noise, float64.

Three letters, at most three tokens, one logit table per prefix (13 of them). Groups are enumerated as
multisets with their multiplicities, which is exact because nothing may depend on the order of siblings.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncrl.algorithms.advantages import AdvantageInput, Trace, advantages
from asyncrl.algorithms.correction import Correction, CorrectionInput, correct, select_rules
from asyncrl.algorithms.losses import Loss, LossInput
from asyncrl.algorithms.recipe import losses
from asyncrl.types import EpisodeResult

LETTERS = 3
LENGTH = 3
PREFIXES = 13
TURN = torch.tensor([0, 0, 1])  # turn of each token
GREEDY = 0.7
Options = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Language:
    """All sequences [S, LENGTH]; `live` is False behind the end."""

    tokens: Tensor
    live: Tensor

    @property
    def prefix(self) -> Tensor:
        """Return the index of the table, of 13, that predicts each token, [S, LENGTH]."""
        first, second, _ = self.tokens.unbind(1)
        return torch.stack([0 * first, 1 + first, 4 + LETTERS * first + second], 1)

    def __len__(self) -> int:
        return len(self.tokens)


def _language(end: int | None) -> Language:
    """Return all sequences.

    With `end`, this letter is the last one of a sequence: 15 sequences of length 1 to 3; otherwise 27.
    """
    sequences = {}
    for letters in itertools.product(range(LETTERS), repeat=LENGTH):
        length = letters.index(end) + 1 if end in letters else LENGTH
        sequences[letters[:length]] = [t < length for t in range(LENGTH)]
    padded = [[*letters, 0, 0][:LENGTH] for letters in sequences]
    return Language(torch.tensor(padded), torch.tensor(list(sequences.values())))


FIXED = _language(None)
ENDED = _language(2)


def table(seed: int, width: int = LETTERS) -> Tensor:
    """Normal numbers for every prefix, [13, width]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(PREFIXES, width, generator=generator, dtype=torch.float64)


PI = 0.7 * table(1)
LAG = table(2)
REFERENCE = 0.7 * table(3)
PARTS = {"answer": table(4), "style": 0.5 * table(5)}
VALUES = table(6, 1)[:, 0]


def older(lag: float) -> Tensor:
    """Return the logits of a behaviour policy; at 0 the logits of the policy itself."""
    return PI + lag * LAG


def token_logp(language: Language, logits: Tensor) -> Tensor:
    """[S, LENGTH], 0 behind the end."""
    logp = logits.log_softmax(-1)[language.prefix, language.tokens]
    return torch.where(language.live, logp, 0.0)


def token_rewards(language: Language) -> Tensor:
    """Return rewards [S, LENGTH]: a turn's reward lies on its last token."""
    reward_sum = sum(part[language.prefix, language.tokens] for part in PARTS.values())
    rewards = torch.where(language.live, torch.as_tensor(reward_sum), 0.0)
    two = language.live[:, 1]  # the first turn goes on to the second token
    rewards[two, 1] += rewards[two, 0]
    rewards[two, 0] = 0.0
    return rewards


@dataclass(frozen=True)
class Groups:
    """All multisets of n sequences, [G, n], and the number of ordered groups of each multiset, [G]."""

    members: Tensor
    times: Tensor


@functools.cache
def groups_of(language: Language, n: int) -> Groups:
    sets = list(itertools.combinations_with_replacement(range(len(language)), n))
    times = [math.factorial(n) / math.prod(map(math.factorial, Counter(s).values())) for s in sets]
    return Groups(torch.tensor(sets), torch.tensor(times, dtype=torch.float64))


@dataclass(frozen=True)
class Experiment:
    """An estimate of the gradient: its components, the behaviour policy `mu` and the group size."""

    advantage: str = "rloo"
    rules: Mapping[str, Options] = field(default_factory=dict)
    loss: str = "reinforce"
    mu: float = 0.0
    n: int = 2
    options: tuple[tuple[str, Any], ...] = ()  # options of the advantage
    loss_options: Options = field(default_factory=dict)
    language: Language = FIXED
    values: Tensor = VALUES
    late: bool = False  # the episode landed after the deadline of its group: it is no sibling of itself
    normalise: Callable[[list[np.ndarray]], list[np.ndarray]] | None = (
        None  # normalises the advantages of a batch of one group
    )


def gradient(experiment: Experiment) -> Tensor:
    """Return the expected direction that a batch of one group ascends, per episode: [39]."""
    language = experiment.language
    groups = groups_of(experiment.language, experiment.n)
    logits = PI.clone().requires_grad_()
    chance = groups.times * token_logp(language, older(experiment.mu)).sum(1).exp()[groups.members].prod(1)
    loss = losses.get(experiment.loss).bound(dict(experiment.loss_options), "loss")
    value = loss.of(_loss_input(experiment, loss, logits)).value
    live = language.live[groups.members]
    per_token = torch.zeros(live.shape, dtype=torch.float64).masked_scatter(live, value)
    expected = (chance * per_token.sum((1, 2)) / experiment.n).sum()
    return -torch.autograd.grad(expected, logits)[0].flatten()


def _loss_input(experiment: Experiment, loss: Loss, logits: Tensor) -> LossInput:
    language = experiment.language

    groups = groups_of(experiment.language, experiment.n)
    live = language.live[groups.members]  # [G, n, LENGTH]; what follows is flat over its True places

    def spread(per_sequence: Tensor) -> Tensor:
        return per_sequence[groups.members][live]

    logp = spread(token_logp(language, logits))
    mu = spread(token_logp(language, older(experiment.mu)))
    row, turn = (indices[live] for indices in _live_indices(live))
    advantage = credits(experiment)[live]
    fresh = torch.ones_like(logp, dtype=torch.bool)
    prox = logp.detach()
    rules = select_rules(experiment.rules, "rules")
    correction = correct(rules, CorrectionInput(prox - mu, prox - mu, advantage, row, turn, fresh))
    if any(rule.kind == "scale" for rule in rules):
        correction = _scaled(correction, live)
    reference = spread(token_logp(language, REFERENCE))
    inputs = LossInput(logp, prox, mu, advantage, row, turn, turn * 0, fresh, correction, reference)
    return inputs if loss.prepare is None else _prepared(inputs, loss, live, language)


def _live_indices(live: Tensor) -> tuple[Tensor, Tensor]:
    groups, n, _ = live.shape
    row = torch.arange(groups * n).view(groups, n, 1).expand(live.shape)
    return row, TURN.expand(live.shape)


def _scaled(correction: Correction, live: Tensor) -> Correction:
    """Divide the weights of every group, which is a batch, by the mean of its unmasked weights."""
    group = torch.repeat_interleave(torch.arange(len(live)), live.sum((1, 2)))
    sums = torch.zeros(2, len(live), dtype=torch.float64)
    total, unmasked = sums.index_add(
        1, group, torch.stack([correction.weight, (~correction.masked).double()])
    )
    mean = torch.where(total > 0, total / unmasked, 1.0)
    return dataclasses.replace(correction, weight=correction.weight / mean[group])


def _prepared(inputs: LossInput, loss: Loss, live: Tensor, language: Language) -> LossInput:
    """Add the loss's preparation of each batch of one group."""
    assert loss.prepare is not None and inputs.reference is not None
    sizes = live.sum(2)
    rewards = token_rewards(language).sum(1)
    columns = {name: getattr(inputs, name) for name in ("advantage", "mu", "trainable", "reference")}
    columns["prox"] = inputs.prox.detach()
    cut = (column.split(sizes.flatten().tolist()) for column in columns.values())
    pieces = (dict(zip(columns, map(np.asarray, piece), strict=True)) for piece in zip(*cut, strict=True))

    members = groups_of(language, live.shape[1]).members
    prepared = []
    for group in members.tolist():
        batch = [
            Trace(f"g/{i}", "g", EpisodeResult(float(rewards[sequence])), **next(pieces))
            for i, sequence in enumerate(group)
        ]
        prepared += loss.prepare(batch)

    return dataclasses.replace(inputs, prepared=torch.from_numpy(np.concatenate(prepared)))


def credits(experiment: Experiment) -> Tensor:
    """The advantage of every token of every member of every group, [G, n, LENGTH]."""
    e = experiment
    all_credits = _credits(e.language, e.advantage, e.options, e.n, e.values, e.late)
    return all_credits if e.normalise is None else _normalised(all_credits, e)


def _normalised(all_credits: Tensor, experiment: Experiment) -> Tensor:
    assert experiment.normalise is not None
    live = experiment.language.live[groups_of(experiment.language, experiment.n).members].numpy()
    result = np.zeros(all_credits.shape)
    for g, batch in enumerate(all_credits.numpy()):
        scaled = experiment.normalise([row[alive] for row, alive in zip(batch, live[g], strict=True)])
        result[g][live[g]] = np.concatenate(scaled)
    return torch.from_numpy(result)


@functools.cache
def _credits(
    language: Language, name: str, options: tuple[tuple[str, Any], ...], n: int, values: Tensor, is_late: bool
) -> Tensor:
    estimator = advantages.get(name).bound(dict(options), "advantage")

    groups = groups_of(language, n).members.tolist()
    all_credits = np.zeros((len(groups), n, LENGTH))
    for g, sequences in enumerate(groups):
        traces = [trace(language, sequence, number) for number, sequence in enumerate(sequences)]
        for i, own_trace in enumerate(traces):
            length = len(own_trace.rewards)
            inputs = AdvantageInput(
                own=own_trace.own,
                siblings=[sibling.own for sibling in traces if not (is_late and sibling is own_trace)],
                rewards=own_trace.rewards,
                turn=TURN[:length].numpy(),
                issued=n,
                position=-1 if is_late else i,
                values=values[language.prefix[sequences[i], :length]].numpy() if estimator.critic else None,
                greedy=GREEDY if estimator.greedy else None,
                traces=traces if estimator.whole_group else (),
            )

            all_credits[g, i, :length] = estimator.of(inputs)

    return torch.from_numpy(all_credits)


@functools.cache
def trace(language: Language, sequence: int, number: int) -> Trace:
    """Return a sequence as member `number` of a group."""
    live, prefix, tokens = (x[sequence] for x in (language.live, language.prefix, language.tokens))
    rewards = token_rewards(language)[sequence][live]
    chances = PI.softmax(-1)[prefix[live]]

    member = EpisodeResult(
        reward=math.fsum(rewards.tolist()),
        tokens=int(live.sum()),
        turn_rewards=tuple(
            float(rewards[TURN[: len(rewards)] == k].sum()) for k in range(int(TURN[len(rewards) - 1]) + 1)
        ),
        components={name: float(part[prefix, tokens][live].sum()) for name, part in PARTS.items()},
    )

    logp = token_logp(language, PI)[sequence][live].numpy()
    collision = (chances**2).sum(-1).numpy()
    return Trace(f"g/{number}", "g", member, logp, rewards=rewards.numpy(), collision=collision)


def true_gradient(language: Language = FIXED, best_of: int = 1, beta: float = 0.0) -> Tensor:
    """Of the expected reward under the policy, or of the best reward of `best_of` sequences, less beta times
    the KL to the reference: [39]."""
    logits = PI.clone().requires_grad_()
    groups = groups_of(language, best_of)
    logp = token_logp(language, logits).sum(1)
    chance = groups.times * logp.exp()[groups.members].prod(1)
    best = token_rewards(language).sum(1)[groups.members].amax(1)
    kl = (logp.exp() * (logp - token_logp(language, REFERENCE).sum(1))).sum()
    return torch.autograd.grad((chance * best).sum() - beta * kl, logits)[0].flatten()


def angle(gradient: Tensor, wanted: Tensor) -> float:
    """1 - cosine: 0 for the same direction, 1 for a right angle."""
    return 1 - float(torch.cosine_similarity(gradient, wanted, dim=0))


def error(gradient: Tensor, wanted: Tensor) -> float:
    """Return the distance relative to the norm of the wanted gradient."""
    return float((gradient - wanted).norm() / wanted.norm())
