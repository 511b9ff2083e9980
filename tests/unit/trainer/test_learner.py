"""One optimizer batch against the plain reference, in float64."""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from asyncrl.algorithms.recipe import compose
from asyncrl.observe.transcripts import read_ratios
from asyncrl.trainer import learner as learning
from asyncrl.trainer.batch import collate
from asyncrl.trainer.model import score_ids
from asyncrl.trainer.optimizer import LEAST_NORMS, SpikeError, record_norm
from asyncrl.trainer.report import RatioRecorder
from asyncrl.trainer.world import World
from asyncrl.types import EpisodeResult
from tests.fakes import reference
from tests.fakes.training import (
    BuildLearner,
    Episode,
    Recorder,
    difference,
    final_gradients,
    full_state,
    random_cut,
    run_batch,
    tiny_config,
    with_generation,
)

pytestmark = pytest.mark.slow

STEP = 6
VERSIONS = (0, 1, 2, 3, 5, 6)  # at V = 6 and a bound of 4, versions 0 and 1 are stale
TOLERANCE = 1e-10


@pytest.fixture
def episodes(model: Any) -> list[Episode]:
    """Noise large enough that the mask and both caps act."""
    return Recorder(model, seed=1, noise=0.8, temperature=0.9).groups(4, 4, VERSIONS)


def whole(episodes: list[Episode]) -> list[list[list[Episode]]]:
    return [[episodes]]


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "prompt_mean"])
@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo"])
def test_gradient_is_the_reference(
    build_learner: BuildLearner, model: Any, episodes: list[Episode], aggregation: str, advantage: str
) -> None:
    learner = build_learner(STEP, algorithm={"aggregation": aggregation, "advantage": advantage})
    wanted = reference.gradients(model, reference.batch_loss(model, episodes, STEP, learner.config))
    gradients = final_gradients(learner, random_cut(episodes, 1, 3, seed=0))
    assert difference(gradients, wanted) < TOLERANCE


@pytest.mark.parametrize("packing", ["padded", "packed", "tree"])
def test_a_shared_prompt_changes_no_gradient(build_learner: BuildLearner, model: Any, packing: str) -> None:
    """Micro-batches are cut again where they exceed the budget, groups too."""
    episodes = Recorder(model, seed=2, noise=0.8, temperature=0.9, prompt=20).groups(4, 4, VERSIONS)
    limits = {"max_tokens": 64, "max_new_tokens": 40}
    learner = build_learner(STEP, trainer={"packing": packing, "micro_batch_tokens": 70}, rollout=limits)
    wanted = reference.gradients(model, reference.batch_loss(model, episodes, STEP, learner.config))
    assert difference(final_gradients(learner, whole(episodes)), wanted) < TOLERANCE
    learner.step = STEP
    metrics = run_batch(learner, whole(episodes))
    computed = metrics["perf/computed_tokens"]
    rows = metrics["perf/total_num_tokens"]
    assert computed < (0.9 if packing == "tree" else 1.1) * rows


def test_ratios_of_transcribed_episodes_are_kept(
    build_learner: BuildLearner, model: Any, tmp_path: Path
) -> None:
    """log pi - log mu of the policy before the step, over the same tokens as a plain forward has them."""
    episodes = Recorder(model, seed=1, noise=0.8, temperature=0.9).groups(4, 4, VERSIONS, name="")
    learner = build_learner(STEP)
    learner.recipe = dataclasses.replace(learner.recipe, skips_inert=False)
    learner.ratio_recorder = RatioRecorder(tmp_path, rank=0, groups_per_batch=2)
    wanted = {row.uid: reference.token_log_probs(model, (row, turns)) for row, turns in episodes}
    run_batch(learner, whole(episodes))
    learner.ratio_recorder.save_step(learner.step)
    ratios_by_uid = {uid: read_ratios(tmp_path, STEP + 1, uid) for uid in wanted}
    assert {uid[0] for uid, known in ratios_by_uid.items() if known is not None} == {"0", "2"}
    for uid, known in ratios_by_uid.items():
        if known is not None:
            assert known.log_ratio == pytest.approx([pi.item() - mu for pi, mu, _ in wanted[uid]], abs=1e-5)
    assert any(known is not None and any(known.dropped) for known in ratios_by_uid.values())


def test_loss_and_counts_are_reported(
    build_learner: BuildLearner, model: Any, episodes: list[Episode]
) -> None:
    learner = build_learner(STEP)
    learner.recipe = dataclasses.replace(learner.recipe, skips_inert=False)  # all episodes are scored
    metrics = run_batch(learner, whole(episodes))
    tokens = [t for e in episodes for t in reference.token_log_probs(model, e)]
    fresh = [(math.exp(p.item() - mu), v) for p, mu, v in tokens if STEP - v <= 4]
    kept = [rho for rho, _ in fresh if 0.5 <= rho <= 5]
    lags = sorted(STEP - v for rho, v in fresh if 0.5 <= rho <= 5)
    loss = reference.batch_loss(model, episodes, STEP, learner.config).item()
    assert metrics["actor/pg_loss"] == pytest.approx(loss, rel=1e-9)
    assert metrics["trainer/model_tokens"] == len(tokens)
    assert metrics["trainer/kept_tokens"] == len(kept) < len(fresh) < len(tokens)
    assert metrics["staleness/masked_token_frac"] == pytest.approx(1 - len(fresh) / len(tokens))
    assert metrics["staleness/lag/mean"] == pytest.approx(sum(lags) / len(lags))
    assert metrics["staleness/lag/p50"] == lags[(len(lags) - 1) // 2]
    assert metrics["staleness/lag/max"] == 4 and metrics["staleness/lag_taken/max"] == 6
    assert metrics["rollout_corr/rho_mean"] == pytest.approx(sum(r for r, _ in fresh) / len(fresh))
    assert metrics["rollout_corr/rho_max"] == pytest.approx(max(r for r, _ in fresh))
    exact = sum(v == STEP for _, v in fresh)
    assert metrics["rollout_corr/logprob_diff_tokens"] == exact > 0
    same = [rho - 1 - math.log(rho) for rho in (math.exp(p.item() - mu) for p, mu, v in tokens if v == STEP)]
    assert metrics["rollout_corr/k3_kl_same_version"] == pytest.approx(sum(same) / exact)


class DeviceReads(TorchDispatchMode):
    """Notes the events of a step, and each time that numbers of a tensor with gradient are needed here, for
    which one waits on a GPU."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.events.append("read")
        return func(*args, **(kwargs or {}))


def test_nothing_waits_for_the_device_between_forward_and_backward(
    build_learner: BuildLearner, episodes: list[Episode], monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = build_learner(STEP, trainer={"micro_batch_tokens": 64})
    events = list[str]()

    def noted(owner: Any, name: str, event: str) -> None:
        function = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            events.append(event)
            return function(*args, **options)

        monkeypatch.setattr(owner, name, call)

    for name in ("tolist", "item", "numpy", "__float__", "__bool__", "__int__"):
        noted(Tensor, name, "read")
    noted(learner.policy, "forward", "forward")
    noted(Tensor, "backward", "backward")
    noted(learning, "collate", "collate")
    with DeviceReads(events):
        run_batch(learner, whole(episodes))
    steps = "".join(event[0] for event in events)
    assert steps.count("fb") == steps.count("f") == steps.count("b") > 1, steps
    # The next one is collated while the device computes; what is counted is read after that.
    assert re.fullmatch(r"[cr]*(fbc[cr]*)+fbr[cr]*", steps), steps


def test_a_learner_that_masks_nothing_is_seen_in_the_lag(
    build_learner: BuildLearner, episodes: list[Episode], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`staleness/lag/max` is measured on what entered the loss, not derived from the bound."""

    def careless(*args: Any) -> Any:
        micro = collate(*args)
        return dataclasses.replace(micro, within_staleness=torch.ones_like(micro.within_staleness))

    monkeypatch.setattr(learning, "collate", careless)
    metrics = run_batch(build_learner(STEP), whole(episodes))
    assert metrics["staleness/lag/max"] == 6 > 4


def test_gradient_does_not_depend_on_the_cut(
    build_learner: BuildLearner, world: World, episodes: list[Episode]
) -> None:
    """Nor on the probe, which is scored between two micro-batches."""
    learner = build_learner(STEP)
    one = final_gradients(learner, whole(episodes))
    probed = list[tuple[float, ...]]()
    for parts in (1, 2, 3, 7):
        cut = random_cut(episodes, 1, parts, seed=parts)
        learner.note_work = lambda: probed.append(score_ids(learner.policy, (1, 2, 3), world.device))
        assert difference(final_gradients(learner, cut), one) < TOLERANCE, parts
    assert len(probed) >= 3 and len(set(probed)) == 1


def test_a_batch_without_a_kept_token_moves_nothing_but_the_step(
    build_learner: BuildLearner, episodes: list[Episode]
) -> None:
    learner = build_learner(STEP, trainer={"weight_decay": 0.1})
    run_batch(learner, whole(episodes))  # so that Adam has momentum
    before = full_state(learner.policy)
    moments = copy.deepcopy(learner.optimizer.state_dict()["state"][0]["exp_avg"].full_tensor())
    learner.step = 100  # now every token is over the bound
    metrics = run_batch(learner, random_cut(episodes, 1, 2, seed=0))
    assert metrics["actor/skipped_steps"] == 1 and learner.step == 101
    assert metrics["staleness/masked_token_frac"] == 1.0
    assert "actor/grad_norm" not in metrics
    after = full_state(learner.policy)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(moments, learner.optimizer.state_dict()["state"][0]["exp_avg"].full_tensor())


def test_a_singleton_group_has_no_gradient(build_learner: BuildLearner, model: Any) -> None:
    alone = Recorder(model, seed=3).groups(1, 1, [0])
    gradients = final_gradients(build_learner(), whole(alone))
    assert all(not gradient.any() for gradient in gradients.values())


def test_episodes_without_advantage_are_not_scored(
    build_learner: BuildLearner, episodes: list[Episode]
) -> None:
    """But the first of each group. Gradient and counts are those of a backward over all of them, and no count
    depends on the cut."""
    learner, other = (build_learner(STEP, algorithm={"correction": {"truncate": {}}}) for _ in range(2))
    other.recipe = dataclasses.replace(learner.recipe, skips_inert=False)
    equal = [(with_rewards(row, lambda reward: 0.5), turns) for row, turns in episodes[:8]]
    batch, again = (random_cut([*equal, *episodes[8:]], 1, 3, seed=seed) for seed in (0, 1))
    assert difference(final_gradients(learner, batch), final_gradients(other, batch)) < TOLERANCE
    metrics = run_batch(learner, batch)
    whole_metrics = run_batch(other, batch)
    learner.step = STEP
    recut = run_batch(learner, again)
    assert metrics["critic/zero_advantage_frac"] >= 0.5
    assert metrics["perf/computed_tokens"] < 0.7 * whole_metrics["perf/computed_tokens"]
    assert metrics["actor/entropy"] != whole_metrics["actor/entropy"]
    for name in ("trainer/kept_tokens", "staleness/lag/mean", "rollout_corr/logprob_diff_tokens"):
        assert metrics[name] == recut[name], name
    same = ("trainer/", "staleness/", "critic/", "actor/pg_loss", "actor/grad_norm", "response_length/")
    lean, full = (
        {n: v for n, v in found.items() if n.startswith(same)} for found in (metrics, whole_metrics)
    )
    assert "staleness/lag/mean" in lean and lean == pytest.approx(full, rel=1e-9, abs=1e-12)


def test_a_batch_without_any_advantage_shows_its_log_prob_gap(
    build_learner: BuildLearner, model: Any
) -> None:
    """One episode of each group is scored, and the step is taken, as with Adam's moments of before."""
    equal = [
        (with_rewards(row, lambda reward: 0.5), t) for row, t in Recorder(model, seed=6).groups(2, 4, [0])
    ]
    metrics = run_batch(build_learner(), random_cut(equal, 1, 2, seed=0))
    assert metrics["rollout_corr/logprob_diff_tokens"] > 0 and metrics["actor/skipped_steps"] == 0
    assert metrics["actor/grad_norm"] == 0 and metrics["trainer/kept_tokens"] > 20


@pytest.mark.parametrize(
    "sections",
    [
        {"algorithm": {"entropy_coef": 0.01}},
        {"kl": {"where": "loss"}},
        {"algorithm": {"advantage": "gae"}, "buffer": {"filter_zero_variance": False}},
        {"algorithm": {"ess_lr": True}},
        {"algorithm": {"correction": {"truncate": {}, "batch_mean": {}}}},
    ],
)
def test_all_episodes_are_scored_where_something_reads_them(sections: Any, model_path: str) -> None:
    assert compose(tiny_config(model_path)).skips_inert
    assert not compose(tiny_config(model_path, **sections)).skips_inert


def test_extreme_log_probs_stay_finite(build_learner: BuildLearner, model: Any) -> None:
    row, turns = Recorder(model, seed=4).groups(1, 2, [0])[0]
    good = Recorder(model, seed=5).groups(2, 4, [0], name="h")
    learner = build_learner()
    for bad in (-1e4, 1e4, math.nan, math.inf, -math.inf):
        spoiled = [with_generation(turn, logprobs=(bad,) * len(turn.generation.ids)) for turn in turns]
        learner.step = 0
        metrics = run_batch(learner, whole([(row, spoiled), *good]))
        assert all(math.isfinite(value) for value in metrics.values()), metrics
        assert metrics["actor/grad_norm"] > 0
        assert (metrics["rollout_corr/nonfinite_tokens"] > 0) == (not math.isfinite(bad))


def test_clipping_keeps_the_direction(build_learner: BuildLearner, episodes: list[Episode]) -> None:
    free = final_gradients(build_learner(STEP), whole(episodes))
    held = final_gradients(build_learner(STEP, trainer={"grad_clip": 0.01}), whole(episodes))
    norm = torch.stack([gradient.norm() for gradient in free.values()]).norm()
    assert norm > 0.01
    assert (
        difference(held, {name: g * (0.01 / norm) for name, g in free.items()}) < 1e-3
    )  # clip's own epsilon


def with_rewards(row: Any, change: Callable[[float], float]) -> Any:
    """The planned trajectory with other rewards of its group, and so other gradients."""

    def changed(result: EpisodeResult) -> EpisodeResult:
        by_turn = tuple(map(change, result.turn_rewards))
        return msgspec.structs.replace(result, reward=change(result.reward), turn_rewards=by_turn)

    siblings = tuple(map(changed, row.siblings))
    return msgspec.structs.replace(row, own=changed(row.own), siblings=siblings)


@pytest.mark.parametrize(("factor", "spikes"), [(9.0, False), (11.0, True), (math.nan, True)])
@pytest.mark.parametrize("on_spike", ["skip", "rollback"])
def test_a_spike_takes_no_step(
    build_learner: BuildLearner, episodes: list[Episode], factor: float, spikes: bool, on_spike: str
) -> None:
    """A norm over ten times the median of eight batches; one that is not finite even without them."""
    learner = build_learner(STEP, trainer={"on_spike": on_spike, "spike_factor": 10.0, "lr": 1e-9})
    norm = run_batch(learner, whole(episodes))["actor/grad_norm"]
    assert norm in learner.state.values()
    for place in range(LEAST_NORMS if math.isfinite(factor) else 0):
        record_norm(learner.state, place, norm)
    learner.step = STEP  # for the same lags
    before = full_state(learner.policy)
    norms = dict(learner.state)
    batch = whole([(with_rewards(row, lambda reward: factor * reward), turns) for row, turns in episodes])
    if spikes and on_spike == "rollback":
        with pytest.raises(SpikeError, match=rf"step {STEP + 1} spiked: its gradient norm is (nan|\d)"):
            run_batch(learner, batch)
    else:
        assert run_batch(learner, batch)["actor/skipped_steps"] == spikes
    after = full_state(learner.policy)
    assert all(torch.equal(before[name], after[name]) for name in before) is spikes
    assert (learner.state == norms) is spikes
