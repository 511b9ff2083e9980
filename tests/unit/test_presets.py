"""The presets: each composes, holds the components it is named for, and trains through the learner."""

from __future__ import annotations

import math
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from asyncrl.algorithms.recipe import compose
from asyncrl.config import RunConfig, composition
from asyncrl.trainer.learner import Learner
from asyncrl.trainer.world import World
from tests.fakes.training import Episode, Recorder, full_state, plain_model, run_batch, save_tiny_model

PRESETS = Path(__file__).resolve().parents[2] / "configs" / "algorithm"


class Parts(NamedTuple):
    """What a preset is made of. `rules`: of its correction; None: the default, mask and truncate."""

    advantage: str
    loss: str
    rules: tuple[str, ...] | None = None
    aggregation: str = "token_mean"
    optimizer_steps: int = 1
    scale: str = "none"


EXPECTED = {
    "aipo": Parts("dr_grpo", "cispo_scalerl", ()),
    "cispo_scalerl": Parts("dr_grpo", "cispo_scalerl", (), "prompt_mean", 1, "batch_std"),
    "dapo": Parts("grpo", "ppo", optimizer_steps=2),
    "decoupled_ppo": Parts("dr_grpo", "ppo", optimizer_steps=2),
    "distill": Parts("dr_grpo", "reinforce", ("truncate",)),
    "dr_grpo": Parts("dr_grpo", "reinforce"),
    "gkd": Parts("dr_grpo", "reinforce"),
    "gpg": Parts("gpg", "reinforce", scale="nonzero"),
    "grpo": Parts("grpo", "reinforce", aggregation="seq_mean_token_mean"),
    "gspo": Parts("grpo", "gspo", ("truncate",), "seq_mean_token_mean", 4),
    "icepop": Parts("dr_grpo", "reinforce", ("mask", "ratio")),
    "m2po": Parts("dr_grpo", "m2po", ()),
    "ppo_critic": Parts("gae", "ppo", optimizer_steps=2, scale="whiten"),
    "reinforce_pp": Parts("reinforce_pp", "ppo", optimizer_steps=2, scale="whiten"),
    "rloo": Parts("rloo", "reinforce"),
    "sft": Parts("constant", "sft", ()),
}
UNFILTERED = {"buffer.filter_zero_variance": False}
OUTSIDE: dict[str, dict[str, object]] = {
    **dict.fromkeys(
        ("aipo", "decoupled_ppo", "gpg", "grpo", "gspo", "m2po", "reinforce_pp", "rloo"), UNFILTERED
    ),
    "cispo_scalerl": {
        "model.fp32_head": True,
        "buffer.filter_zero_variance": True,
        "buffer.retire_pass_rate": 0.9,
    },
    "dapo": {"buffer.filter_zero_variance": True},
    **{
        name: {
            "kl.where": "loss",
            "kl.estimator": estimator,
            "kl.coef": 1.0,
            "rollout.reward": "none",
            **UNFILTERED,
        }
        for name, estimator in (("distill", "k2"), ("gkd", "js"))
    },
    "ppo_critic": {"critic.warmup_steps": 5, **UNFILTERED},
    "sft": {"buffer.episodes_per_group": 1, "buffer.max_staleness": 1000, "rollout.retries": 0, **UNFILTERED},
}
"""Keys outside `algorithm` that a preset sets."""


@cache
def configured(preset: str, model: str = "m", *overrides: str) -> RunConfig:
    base = ["name=p", f"model.path={model}", "model.dtype=float32", "data.train=t"]
    taught = [f"kl.reference={model}"] if preset in ("distill", "gkd") else []
    return composition.compose([*base, *taught, f"algorithm={preset}", *overrides])


def test_every_preset_is_expected_here() -> None:
    assert {path.stem for path in PRESETS.glob("*.yaml")} == set(EXPECTED)


@pytest.mark.parametrize("preset", EXPECTED)
def test_a_preset_says_what_it_is_and_when_to_use_it(preset: str) -> None:
    lines = (PRESETS / f"{preset}.yaml").read_text().splitlines()
    comments = [line for line in lines if line.startswith("# ") and "@package" not in line]
    differs, use = ([line for line in comments if line.startswith(f"# {w}: ")] for w in ("Differs", "Use"))
    assert len(use) == len(differs) == 1
    assert 0 < comments.index(differs[0]) < comments.index(use[0])
    assert "staleness" in " ".join(comments[comments.index(use[0]) :]).lower()


@pytest.mark.parametrize("preset", EXPECTED)
def test_a_preset_holds_the_components_it_is_named_for(preset: str) -> None:
    config = configured(preset)
    parts = EXPECTED[preset]
    recipe = compose(config)
    algorithm = config.algorithm
    preset_parts = Parts(
        recipe.advantage_name,
        recipe.loss_name,
        parts.rules if algorithm.correction is None else tuple(algorithm.correction),
        algorithm.aggregation,
        recipe.optimizer_steps,
        recipe.scale,
    )
    assert preset_parts == parts
    assert len(recipe.rules) == (2 if parts.rules is None else len(parts.rules))
    assert recipe.weighted is (recipe.loss.ratio == "prox")  # stale data is corrected exactly once
    assert recipe.critic is (preset == "ppo_critic")


@pytest.mark.parametrize("preset", OUTSIDE)
def test_keys_outside_of_the_algorithm(preset: str) -> None:
    config = configured(preset)
    assert {key: attrgetter(key)(config) for key in OUTSIDE[preset]} == OUTSIDE[preset]


def test_numbers_are_those_of_the_published_runs() -> None:
    """Of the papers and their code, where these say."""
    bound: dict[str, Any] = {p: compose(configured(p)).loss.of.keywords for p in EXPECTED}  # type: ignore[attr-defined]
    assert bound["decoupled_ppo"] == {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 0}
    assert bound["dapo"] == {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 10}
    assert bound["gspo"] == {"clip_low": 3e-4, "clip_high": 4e-4} and bound["m2po"] == {"tau": 0.04}
    dapo = configured("dapo").algorithm
    assert dapo.shaping == {"overlong": {}} and not dapo.mask_truncated


def test_keys_of_a_preset_can_be_overridden() -> None:
    config = configured("dapo", "m", "algorithm.loss.ppo.clip_high=0.3", "algorithm.steps_per_batch=4")
    assert config.algorithm.loss == {"ppo": {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 10}}
    assert config.algorithm.steps_per_batch == 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("presets"))


@pytest.fixture(scope="module")
def episodes(model: str) -> list[Episode]:
    """Four groups with tokens of up to four steps before; no preset changes them."""
    return Recorder(plain_model(model, torch.float32), noise=0.05).groups(4, 4, (0, 2, 4))


@pytest.mark.parametrize("preset", EXPECTED)
def test_a_preset_trains(preset: str, model: str, episodes: list[Episode], world: World) -> None:
    """Numbers stay finite, and a batch moves the weights."""
    torch.manual_seed(0)
    config = configured(preset, model, "trainer.lr=1e-3", "critic.warmup_steps=0", "model.device=cpu")
    learner = Learner(config, world)
    learner.step = 4
    before = weights(learner)
    metrics = run_batch(learner, [[episodes[:7]], [episodes[7:]]])
    after = weights(learner)
    assert math.isfinite(metrics["actor/pg_loss"]) and metrics["actor/grad_norm"] > 0
    assert after.isfinite().all() and (after - before).abs().max() > 1e-5
    assert learner.step == 5


def weights(learner: Learner) -> Tensor:
    """All of the policy's, flat, copied."""
    return torch.cat([tensor.flatten() for tensor in full_state(learner.policy).values()])


@pytest.mark.parametrize(
    ("preset", "overrides"),
    [
        ("reinforce_pp", ("buffer.episodes_per_group=1",)),
        ("ppo_critic", ("buffer.episodes_per_group=1",)),
        ("rloo", ("buffer.group_policy=partial",)),
        ("icepop", ("algorithm.correction.mask.high=2",)),
        ("icepop", ("algorithm.advantage=grpo", "algorithm.loss=ppo", "algorithm.steps_per_batch=2")),
        ("grpo", ("kl.where=loss_unweighted", "kl.estimator=k3", "kl.coef=0.04")),
        ("rloo", ("kl.where=reward",)),
        ("reinforce_pp", ("kl.where=reward",)),
        ("m2po", ("buffer.max_staleness=64",)),
        ("distill", ("kl.where=reward", "kl.estimator=k1", "buffer.group_policy=complete")),
        ("distill", ("rollout.reward=final_number", "kl.coef=0.3")),
        ("gkd", ("kl.estimator=forward", "kl.top_k=32")),
        ("dapo", ("algorithm.advantage=dr_grpo", "algorithm.normalise=batch_std")),
        ("gspo", ("algorithm.advantage=dr_grpo", "algorithm.normalise=batch_std")),
        ("dapo", ("~algorithm.shaping", "algorithm.mask_truncated=true")),
    ],
)
def test_what_the_comments_promise_composes(preset: str, overrides: tuple[str, ...]) -> None:
    assert compose(configured(preset, "m", *overrides)).loss is not None
