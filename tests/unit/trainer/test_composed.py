"""Whole recipes in the learner against the formulas written out, in float64."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from asyncrl.trainer.barrier import partition_groups
from asyncrl.trainer.batch import collate
from asyncrl.trainer.learner import Learner
from asyncrl.trainer.teacher import Teacher
from asyncrl.trainer.world import World
from asyncrl.types import TokenScores, Turn
from tests.fakes.recipes import COMPARING, RECIPES, UNFILTERED, trained
from tests.fakes.reference import gradients, token_log_probs
from tests.fakes.training import (
    BuildLearner,
    Episode,
    Recorder,
    difference,
    final_gradients,
    full_state,
    gradient_gap,
    random_cut,
    run_batch,
    with_generation,
)

pytestmark = pytest.mark.slow

TOLERANCE = 1e-9


@pytest.fixture
def episodes(model: Any) -> list[Episode]:
    return Recorder(model, seed=11, noise=0.2).groups(4, 3, [0])


def logp(model: Any, episode: Episode) -> tuple[Tensor, Tensor]:
    """(log pi with gradient, mu) of the model tokens of an episode."""
    tokens = token_log_probs(model, episode)
    return torch.stack([t[0] for t in tokens]), torch.tensor([t[1] for t in tokens], dtype=torch.float64)


def centred(episode: Episode) -> float:
    row, _ = episode
    return row.own.reward - sum(m.reward for m in row.siblings) / len(row.siblings)


def truncated(log_ratio: Tensor, advantage: Tensor) -> Tensor:
    rho = log_ratio.detach().exp()
    cap = torch.where(advantage < 0, 2.0, 5.0).double()
    return torch.where((rho >= 0.5) & (rho <= 5), torch.minimum(rho, cap), 0.0)


def policy_gradient(model: Any, episode: Episode, advantage: Tensor | float) -> Tensor:
    pi, mu = logp(model, episode)
    a = torch.as_tensor(advantage, dtype=torch.float64).expand(len(pi))
    return -(truncated(pi - mu, a) * a * pi).sum()


def tokens_of(episodes: list[Episode]) -> int:
    return sum(len(turn.generation.ids) for _, turns in episodes for turn in turns)


@pytest.mark.parametrize("estimator", ["k2", "k3", "straight_through"])
def test_kl_in_the_loss(
    build_learner: BuildLearner, model: Any, episodes: list[Episode], estimator: str
) -> None:
    """The reference is the initial policy; the learner has moved away from it."""
    learner = build_learner(kl={"where": "loss", "coef": 0.3, "estimator": estimator})
    run_batch(learner, [[episodes]])
    learner.step = 0
    initial = copy.deepcopy(model)
    moved = full_state(learner.policy)
    model.load_state_dict({**model.state_dict(), **moved})
    total = torch.zeros((), dtype=torch.float64)
    for episode in episodes:
        pi, mu = logp(model, episode)
        ref = logp(initial, episode)[0].detach()
        a = torch.full_like(pi, centred(episode)).detach()
        d = pi - ref
        k = {
            "k2": d**2 / 2,
            "k3": (-d).exp() - 1 + d,
            "straight_through": d**2 / 2,  # its gradient
        }[estimator]
        total = total + policy_gradient(model, episode, a) + 0.3 * (truncated(pi - mu, a) * k).sum()
    wanted = gradients(model, total / tokens_of(episodes))
    assert gradient_gap(learner, episodes, wanted) < TOLERANCE


def tables(model: Any, episode: Episode) -> Tensor:
    """Log-probs of the whole vocabulary at the temperature of sampling, of each model token."""
    row, turns = episode
    ids = [token for turn in turns for token in (*turn.context, *turn.generation.ids)]
    table = torch.log_softmax(model(torch.tensor([ids])).logits[0] / row.temperature, -1)
    found = []
    position = 0
    for turn in turns:
        start = position + len(turn.context)
        position = start + len(turn.generation.ids)
        found.append(table[start - 1 : position - 1])
    return torch.cat(found)


def entropy(model: Any, episode: Episode) -> Tensor:
    """Summed over the model tokens."""
    table = tables(model, episode)
    return -(table.exp() * table).sum()


def with_taught(turn: Turn, index: int = 3) -> Turn:
    """It has another prompt for a teacher, longer by `index`."""
    return msgspec.structs.replace(turn, taught=(*range(index), 5, *turn.context[1:]))


def with_prompt(turns: list[Turn], taught: tuple[int, ...]) -> list[Turn]:
    return [msgspec.structs.replace(turns[0], context=taught), *turns[1:]]


@pytest.mark.parametrize("steps", [{}, {"loss": "cispo_scalerl", "prox": "recompute"}])
@pytest.mark.parametrize(
    ("estimator", "prompted"),
    [("forward", False), ("reverse", False), ("js", False), ("js", True), ("k2", True)],
)
def test_what_distils(
    build_learner: BuildLearner,
    model: Any,
    episodes: list[Episode],
    estimator: str,
    prompted: bool,
    steps: dict[str, Any],
) -> None:
    """In a divergence every model token counts, however far its own ratio is off: streamed and behind a
    barrier. `prompted`: the teacher reads another prompt, of another length in each episode."""
    kl = {"where": "loss", "coef": 0.3, "estimator": estimator, "prompt": "Think." if prompted else ""}
    if prompted:
        own = [(row, list(turns)) for row, turns in episodes]
        for i, (_, turns) in enumerate(own):
            turns[0] = with_taught(turns[0], i)
        episodes = own
    learner = build_learner(kl=kl, algorithm=steps, buffer=UNFILTERED)
    without = build_learner(algorithm=steps)
    run_batch(learner, [[episodes]])
    learner.step = 0
    initial = copy.deepcopy(model)
    moved = full_state(learner.policy)
    model.load_state_dict({**model.state_dict(), **moved})
    for name, parameter in without.policy.lm.named_parameters():
        parameter.data.copy_(next(p for n, p in learner.policy.lm.named_parameters() if n == name).data)
    total = torch.zeros((), dtype=torch.float64)
    for episode in episodes:
        row, turns = episode
        read = (row, with_prompt(turns, turns[0].taught)) if prompted else episode
        p = tables(model, episode)
        t = tables(initial, read).detach()
        if estimator == "k2":
            pi, mu = logp(model, episode)
            rho = (pi - mu).detach().exp()
            weight = (
                rho.clamp(max=2.0) if steps else truncated(pi - mu, torch.full_like(pi, centred(episode)))
            )
            total = total + (weight * (pi - logp(initial, read)[0].detach()) ** 2 / 2).sum()
            continue
        m = ((p.exp() + t.exp()) / 2).log()
        total = (
            total
            + {
                "forward": t.exp() * (t - p),
                "reverse": p.exp() * (p - t),
                "js": (t.exp() * (t - m) + p.exp() * (p - m)) / 2,
            }[estimator].sum()
        )
    wanted = gradients(model, 0.3 * total / tokens_of(episodes))
    policy = final_gradients(without, [[episodes]])
    assert all(wanted[name].norm() > 1e-4 for name in wanted)
    together = {name: gradient + policy[name] for name, gradient in wanted.items()}
    assert gradient_gap(learner, episodes, together) < TOLERANCE


@pytest.mark.parametrize(
    ("steps", "prompted"), [({}, False), ({}, True), ({"loss": "ppo", "steps_per_batch": 2}, False)]
)
def test_a_teacher_on_servers_teaches_what_one_in_the_trainer_does(
    build_learner: BuildLearner,
    model: Any,
    model_path: str,
    episodes: list[Episode],
    steps: dict[str, Any],
    prompted: bool,
) -> None:
    """By its likeliest tokens, as they come with the turns. A turn that no scorer has read is left out.
    `prompted`: either reads another prompt."""
    kl = {"where": "loss", "coef": 1.0, "estimator": "js", "top_k": 4, "prompt": "Think." * prompted}
    if prompted:
        episodes = [(row, [with_taught(turns[0]), *turns[1:]]) for row, turns in episodes]
    here = build_learner(kl={**kl, "reference": model_path}, algorithm=steps, buffer=UNFILTERED)
    there = build_learner(
        kl=kl, scorers={"teacher": {"urls": ["http://t"]}}, algorithm=steps, buffer=UNFILTERED
    )
    assert there.reference is None
    scored = [(row, read(model, (row, turns), 4)) for row, turns in episodes]
    for learner in (here, there):
        change(learner)
    wanted = final_gradients(here, [[episodes[:5]], [episodes[5:]]])
    assert difference(final_gradients(there, [[scored[:5]], [[]], [scored[5:]]]), wanted) < 1e-6  # float32
    idle = collate([], torch.float64, there.packing)
    divergence = there.policy(idle.selected, teacher=Teacher("js", 4)).divergence
    assert divergence is not None and divergence.isfinite().all()  # of a rank that has no episode
    unread = [(row, [with_generation(turns[0], scores=None), *turns[1:]]) for row, turns in scored]
    partly = final_gradients(there, [[unread]])
    assert difference(partly, wanted) > 1e-4 and all(g.isfinite().all() for g in partly.values())


def change(learner: Learner) -> None:
    with torch.no_grad():
        for i, parameter in enumerate(learner.policy.parameters()):
            parameter += 0.03 * (i % 3 - 1)


@torch.no_grad()
def read(model: Any, episode: Episode, top: int) -> list[Turn]:
    """The turns with the scores of a server of `model`, behind the prompt of a teacher."""
    planned, turns = episode
    sizes = [len(turn.generation.ids) for turn in turns]
    found = []
    theirs = (planned, with_prompt(turns, turns[0].taught or turns[0].context))
    for turn, table in zip(turns, tables(model, theirs).split(sizes), strict=True):
        logs, ids = table.topk(top)
        own = table.gather(1, torch.tensor(turn.generation.ids)[:, None])
        parts = (own.numpy().astype("<f4"), ids.numpy().astype("<i4"), logs.numpy().astype("<f4"))
        scores = TokenScores(*(part.tobytes() for part in parts))
        found.append(with_generation(turn, scores=scores))
    return found


def std_of(episodes: list[Episode]) -> float:
    return float(np.std([centred(e) for e in episodes], ddof=1)) + 1e-6


def plain(model: Any, episodes: list[Episode]) -> Tensor:
    return torch.stack([policy_gradient(model, e, centred(e)) for e in episodes]).sum()


def with_entropy(model: Any, episodes: list[Episode]) -> Tensor:
    return plain(model, episodes) - 0.1 * torch.stack([entropy(model, e) for e in episodes]).sum()


def whitened(model: Any, episodes: list[Episode]) -> Tensor:
    joined = torch.tensor([centred(e) for e in episodes for _ in range(tokens_of([e]))], dtype=torch.float64)
    mean = joined.mean()
    std = joined.std() + 1e-6
    return torch.stack([policy_gradient(model, e, (centred(e) - mean) / std) for e in episodes]).sum()


def divided(model: Any, episodes: list[Episode]) -> Tensor:
    return plain(model, episodes) / std_of(episodes)


def dro(model: Any, episodes: list[Episode]) -> Tensor:
    """Not proportional to A: dividing its gradient by the std would divide the pull to mu as well."""
    total = torch.zeros((), dtype=torch.float64)
    for e in episodes:
        pi, mu = logp(model, e)
        total = total - (centred(e) / std_of(episodes) * pi - (pi - mu) ** 2 / 2).sum()
    return total


def batch_mean(model: Any, episodes: list[Episode]) -> Tensor:
    """The weights are divided by their mean."""
    weights = []
    for e in episodes:
        pi, mu = logp(model, e)
        weights.append(truncated(pi - mu, torch.full_like(pi, centred(e))))
    joined = torch.cat(weights)
    return plain(model, episodes) / joined[joined > 0].mean()


def penalised(model: Any, episodes: list[Episode]) -> Tensor:
    """R_i - beta·Σ(log mu - log ref), for the siblings too; the model of now is the reference."""
    found: dict[tuple[str, int], float] = {}
    for e in episodes:
        ref, mu = logp(model, e)
        found[e[0].group, e[0].place] = e[0].own.reward - 0.2 * float((mu - ref.detach()).sum())
    total = torch.zeros((), dtype=torch.float64)
    for e in episodes:
        group = [found[e[0].group, place] for place in range(len(e[0].siblings))]
        total = total + policy_gradient(model, e, found[e[0].group, e[0].place] - sum(group) / len(group))
    return total


def clipped_around_mu(model: Any, episodes: list[Episode]) -> Tensor:
    """One step, no barrier: u = pi/mu is not 1 for stale data, and the clip acts."""
    total = torch.zeros((), dtype=torch.float64)
    cut = 0
    for e in episodes:
        pi, mu = logp(model, e)
        a = torch.full_like(mu, centred(e))
        u = (pi - mu).exp()
        ppo = torch.maximum(-u * a, -u.clamp(0.8, 1.2) * a)
        total = total + ppo.sum()
        cut = cut + int((ppo > -u * a).sum())
    assert cut
    return total


STD = {"normalise": "batch_std"}
MEAN = {"mask": {}, "truncate": {}, "batch_mean": {}}
# Sections, the sum over all tokens that is minimised, the tolerance, and whether the learner waits for all.
FORMULAS: dict[str, tuple[dict[str, Any], Callable[[Any, list[Episode]], Tensor], float, bool | None]] = {
    "entropy": ({"algorithm": {"entropy_coef": 0.1}}, with_entropy, TOLERANCE, None),
    "whitened": (
        {"algorithm": {"advantage": "reinforce_pp_baseline"}, "buffer": UNFILTERED},
        *(whitened, 1e-7, True),
    ),
    "batch_std in a stream": ({"algorithm": STD}, divided, 1e-5, False),
    "batch_std behind a barrier": ({"algorithm": {**STD, "entropy_coef": 1e-9}}, divided, 1e-5, True),
    "batch_std of dro": ({"algorithm": {**STD, "loss": {"dro": {"beta": 1.0}}}}, dro, TOLERANCE, None),
    "batch_mean": ({"algorithm": {"correction": MEAN}}, batch_mean, TOLERANCE, None),
    "kl in the reward": (
        {"kl": {"where": "reward", "coef": 0.2}, "buffer": UNFILTERED},
        *(penalised, TOLERANCE, None),
    ),
    "a clip around mu": (
        {"algorithm": {"loss": {"ppo": {"dual_clip": 0}}, "prox": "mu"}},
        *(clipped_around_mu, TOLERANCE, False),
    ),
}


@pytest.mark.parametrize("case", FORMULAS)
def test_gradients_are_those_of_the_formula(
    case: str, build_learner: BuildLearner, model: Any, episodes: list[Episode]
) -> None:
    sections, formula, tolerance, waits = FORMULAS[case]
    learner = build_learner(**sections)
    assert waits in (None, learner.behind_barrier)
    wanted = gradients(model, formula(model, episodes) / tokens_of(episodes))
    assert gradient_gap(learner, episodes, wanted) < tolerance


@pytest.mark.parametrize(
    "algorithm",
    [
        {"advantage": "reinforce_pp_baseline"},
        {"normalise": "batch_std"},
        {"normalise": "batch_std", "entropy_coef": 1e-9},  # behind a barrier
        {"advantage": "gpg"},
        {},
    ],
)
def test_advantages_are_reported_as_they_are_trained(
    build_learner: BuildLearner, episodes: list[Episode], algorithm: dict[str, Any]
) -> None:
    learner = build_learner(algorithm=algorithm, buffer=UNFILTERED)
    metrics = run_batch(learner, random_cut(episodes, 1, 3, seed=0))
    by_episode = torch.tensor([centred(e) for e in episodes], dtype=torch.float64)
    sizes = torch.tensor([sum(len(turn.generation.ids) for turn in turns) for _, turns in episodes])
    by_token = by_episode.repeat_interleave(sizes)
    if algorithm.get("advantage") == "reinforce_pp_baseline":
        by_token = (by_token - by_token.mean()) / (by_token.std() + 1e-6)
    elif "normalise" in algorithm:
        by_token = by_token / (by_episode.std() + 1e-6)
    elif algorithm:
        varied = [len({member.reward for member in row.siblings}) > 1 for row, _ in episodes]
        assert 0 < sum(varied) < len(varied)
        by_token = by_token * len(varied) / sum(varied)
    wanted = {"mean": by_token.mean(), "max": by_token.max(), "min": by_token.min()}
    advantage_metrics = {name: metrics[f"critic/advantages/{name}"] for name in wanted}
    if algorithm.get("normalise") == "batch_std":
        held = build_learner(algorithm=algorithm | {"prox": "recompute"})
        again = run_batch(held, random_cut(episodes, 1, 3, seed=0))
        assert held.behind_barrier and again["actor/pg_loss"] == pytest.approx(
            metrics["actor/pg_loss"], rel=1e-9
        )
    assert advantage_metrics == pytest.approx(
        {name: float(x) for name, x in wanted.items()}, rel=1e-9, abs=1e-12
    )


def test_what_a_loss_with_its_own_ratio_drops_and_bounds_is_reported(
    build_learner: BuildLearner, model: Any
) -> None:
    """m2po masks, cispo_scalerl caps: both show where a correction's masks and caps would."""
    noisy = Recorder(model, seed=3, noise=0.8).groups(4, 3, [0])
    reports = {}
    for name, options in (("m2po", {}), ("cispo_scalerl", {"cap": 2})):
        learner = build_learner(algorithm={"loss": {name: options}})
        reports[name] = run_batch(learner, [[noisy]])
    ratios = torch.cat([(pi - mu).detach().exp() for pi, mu in (logp(model, e) for e in noisy)])
    capped = reports["cispo_scalerl"]
    m2po = reports["m2po"]
    assert capped["rollout_corr/truncated_fraction"] == pytest.approx(float((ratios > 2).double().mean()))
    assert capped["rollout_corr/rollout_is_mean"] == pytest.approx(float(ratios.clamp(max=2).mean()))
    squares = ratios.log().square().sort().values
    kept = int((squares.cumsum(0) / torch.arange(1, len(squares) + 1) < 0.04).sum())
    assert 0 < kept < len(squares) and m2po["trainer/kept_tokens"] == kept
    assert m2po["rollout_corr/by_lag/0/masked_frac"] == pytest.approx(1 - kept / len(squares))
    assert m2po["actor/pg_clipfrac"] == pytest.approx(
        1 - kept / len(squares)
    )  # dropped tokens are clipped ones


def test_running_whitening_uses_the_batches_before(
    build_learner: BuildLearner, model: Any, episodes: list[Episode]
) -> None:
    """The first batch waits and is whitened by itself; the second streams, whitened by the first."""
    algorithm = {"advantage": "reinforce_pp_baseline", "normalise": "whiten_running"}
    learner = build_learner(algorithm=algorithm, buffer=UNFILTERED, trainer={"lr": 1e-12})
    assert learner.behind_barrier
    run_batch(learner, [[episodes]])
    learner.step = 0
    assert not learner.behind_barrier and learner.state.keys() > {"kl_coef"}
    sizes = [sum(len(turn.generation.ids) for turn in turns) for _, turns in episodes]
    raw = [torch.full((n,), centred(e), dtype=torch.float64) for n, e in zip(sizes, episodes, strict=True)]
    other = Recorder(model, seed=12, noise=0.2).groups(4, 3, [0], name="h")
    joined = torch.cat(raw)
    mean = joined.mean()
    std = joined.std() + 1e-6
    loss = sum(policy_gradient(model, e, (centred(e) - mean) / std) for e in other)
    wanted = gradients(model, loss / tokens_of(other))
    assert gradient_gap(learner, other, wanted) < 1e-6


def test_epochs_repeat_the_mini_batches_around_one_prox(build_learner: BuildLearner, model: Any) -> None:
    algorithm = {"loss": {"ppo": {"clip_high": 0.28, "dual_clip": 0}}, "steps_per_batch": 2, "epochs": 2}
    learner = build_learner(algorithm=algorithm, trainer={"lr": 0.5})
    episodes = Recorder(model, seed=7, noise=0.3).groups(4, 3, [0])
    learner.optimizer = torch.optim.SGD(learner.policy.parameters(), lr=0.5)
    metrics = run_batch(learner, random_cut(episodes, 1, 3, seed=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    prox = copy.deepcopy(model)
    for step in range(4):
        part_of = partition_groups({e[0].group for e in episodes}, 2, f"0/0/{step // 2}")
        part = [e for e in episodes if part_of[e[0].group] == step % 2]
        loss = torch.zeros((), dtype=torch.float64)
        for e in part:
            pi, mu = logp(model, e)
            old = logp(prox, e)[0].detach()
            a = torch.full_like(old, centred(e))
            u = (pi - old).exp()
            ppo = torch.maximum(-u * a, -u.clamp(0.8, 1.28) * a)
            loss = loss + (truncated(old - mu, a) * ppo).sum()
        optimizer.zero_grad()
        (loss / tokens_of(part)).backward()
        optimizer.step()
    wanted = {name: p.detach() for name, p in model.named_parameters()}
    assert difference(full_state(learner.policy), wanted) < TOLERANCE
    assert learner.step == 1 and metrics["actor/pg_clipfrac"] > 0


def test_on_policy_a_clip_around_mu_is_that_around_prox(build_learner: BuildLearner, model: Any) -> None:
    """Four steps, without the forward that computes prox."""
    algorithm = {"loss": "ppo", "steps_per_batch": 2, "epochs": 2, "correction": {}}
    same = Recorder(model, seed=7).groups(4, 3, [0])
    found = []
    for around in ("mu", "recompute"):
        options = {"algorithm": {**algorithm, "prox": around}, "buffer": {"max_staleness": 0}}
        learner = build_learner(**options)
        learner.optimizer = torch.optim.SGD(learner.policy.parameters(), lr=0.5)
        metrics = run_batch(learner, random_cut(same, 1, 3, seed=1))
        found.append(full_state(learner.policy))
        assert metrics["actor/pg_clipfrac"] > 0
    assert difference(*found) < TOLERANCE


def test_groups_are_drawn_anew_in_every_epoch_and_evenly() -> None:
    groups = {str(i) for i in range(9)}
    cuts = [partition_groups(groups, 4, f"0/0/{epoch}") for epoch in range(5)]
    for cut in cuts:
        assert cut.keys() == groups and sorted(Counter(cut.values()).values()) == [2, 2, 2, 3]
    assert len({tuple(sorted(cut.items())) for cut in cuts}) == 5
    assert partition_groups(sorted(groups), 4, "0/0/1") == cuts[1]


def test_what_a_skipped_step_left_does_not_reach_the_next_batch(
    build_learner: BuildLearner, episodes: list[Episode]
) -> None:
    """All tokens are masked by the correction, but the entropy has a gradient with its own."""
    learner = build_learner(algorithm={"entropy_coef": 0.1})
    far = [
        (row, [with_generation(t, logprobs=(-30.0,) * len(t.generation.ids)) for t in turns])
        for row, turns in episodes
    ]
    metrics = run_batch(learner, [[far]])
    assert metrics["trainer/kept_tokens"] == 0 and metrics["actor/grad_norm"] > 0
    assert all(p.grad is None or not p.grad.full_tensor().any() for p in learner.policy.parameters())


def test_the_learning_rate_follows_the_effective_sample_size(
    build_learner: BuildLearner, model: Any, episodes: list[Episode]
) -> None:
    learner = build_learner(algorithm={"ess_lr": True})
    metrics = run_batch(learner, [[episodes]])
    weights = []
    for e in episodes:
        pi, mu = logp(model, e)
        weights.append(math.exp(min(8.0, float((pi - mu).sum().detach()))))
    share = sum(weights) ** 2 / sum(w * w for w in weights) / len(weights)
    assert share < 0.95
    assert metrics["actor/lr"] == pytest.approx(1e-2 * math.sqrt(share), rel=1e-6)


@pytest.mark.parametrize("name", [name for name in RECIPES if "kl in reward" not in name])
def test_what_the_engine_said_of_a_stale_token_changes_nothing(
    world: World, model_path: str, model: Any, name: str
) -> None:
    """Only a KL in the reward reads it: that is part of what the episode earned."""
    # at V = 6 and a bound of 4, versions 0 and 1 are stale
    step = 6
    versions = (0, 1, 5, 6)
    episodes = Recorder(model, seed=1, noise=0.1).groups(4, 3, versions)

    def garble(turn: Turn) -> Turn:
        old = {p for s in turn.generation.spans if s.version < 2 for p in range(s.start, s.end)}
        changed = tuple(-9.0 if i in old else p for i, p in enumerate(turn.generation.logprobs))
        return with_generation(turn, logprobs=changed)

    garbled = [(row, [garble(turn) for turn in turns]) for row, turns in episodes]
    assert garbled != episodes
    wanted = trained(world, model_path, name, [[episodes]], step)
    assert difference(trained(world, model_path, name, [[garbled]], step), wanted) == 0.0


@pytest.mark.parametrize("name", COMPARING)
def test_an_empty_batch_is_legal(build_learner: BuildLearner, name: str) -> None:
    learner = build_learner(**RECIPES[name])
    metrics = run_batch(learner, [[[]], [[]]])
    assert learner.step == 1 and metrics["actor/skipped_steps"] == learner.recipe.optimizer_steps


def test_a_critic_that_warms_up_moves_alone(build_learner: BuildLearner, episodes: list[Episode]) -> None:
    learner = build_learner(**RECIPES["gae"], critic={"warmup_steps": 1, "lr": 1e-2})
    before = full_state(learner.policy)
    metrics = run_batch(learner, [[episodes]])
    after = full_state(learner.policy)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert metrics["critic/grad_norm"] > 0 and "actor/grad_norm" not in metrics
    run_batch(learner, [[episodes]])
    assert difference(full_state(learner.policy), before) > 0


def test_the_critic_learns_the_returns(build_learner: BuildLearner, episodes: list[Episode]) -> None:
    learner = build_learner(**RECIPES["gae"], critic={"warmup_steps": 100, "lr": 1e-2, "clip": 0.0})
    losses = [run_batch(learner, [[episodes]])["critic/vf_loss"] for _ in range(30)]
    assert losses[-1] < losses[0] / 3
