"""What distillation leaves of a teacher: exact divergences, on held-out states of the student.

    python tools/bench/distill.py --out distill.jsonl --seeds 0 1 2      # about 20 s an arm and seed
    python tools/bench/distill.py --out distill.jsonl --table

The teacher is the calculator demo's model after a step of RL, which succeeds sometimes. Each arm distils it
into the model before it, at a forced lag (lagged.py), with nothing else to learn from. Then the student
plays held-out questions, each sampled once, and both models are compared in every state that it came to, over
the whole vocabulary. A sum over an episode's tokens is in expectation the divergence of whole episodes (chain
rule), and bounds what any statistic of episodes may differ by: KL(π, T) is at least that of two coins with
the success rates of the two.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import table, wilson
from lagged import Ask, Player, _batch, _rows, _train, samples, snapshot, world

from asyncrl.buffer.prompts import Prompts, shuffled
from asyncrl.config import RunConfig
from asyncrl.config.composition import compose
from asyncrl.conversation.episode import Episode
from asyncrl.coordinator.workers import sampling_key
from asyncrl.trainer.batch import collate, training_sample
from asyncrl.trainer.learner import Learner

TASK = [
    "name=distill",
    "experiment=calculator",
    "buffer.groups_per_batch=8",
    "buffer.episodes_per_group=8",
    "trainer.lr=4e-4",
    "trainer.lr_schedule=linear",
    "trainer.micro_batch_tokens=4096",
    "model.device=cpu",
]
STEPS = 12
TESTS = 512
OPERATIONS = 6
MASKED = "+algorithm.correction.mask={}"
SLOW = ["trainer.lr=1e-4", f"total_steps={4 * STEPS}"]
ARMS: dict[str, tuple[int, list[str]]] = {  # lag, and what differs from algorithm=distill
    "k2, lag 2, masked": (2, [MASKED]),
    "k2, masked": (0, [MASKED]),
    "k2, lag 2": (2, []),
    "k2": (0, []),
    "k2, lr/4, 4x steps": (0, SLOW),
    "k2, lr/4": (0, ["trainer.lr=1e-4"]),
    "reverse, lag 2": (2, ["kl.estimator=reverse"]),
    "reverse": (0, ["kl.estimator=reverse"]),
    "reverse, lr/4, 4x steps": (0, ["kl.estimator=reverse", *SLOW]),
    "js": (0, ["kl.estimator=js"]),
    "js, lag 2": (2, ["kl.estimator=js"]),
    "forward": (0, ["kl.estimator=forward"]),
    "forward, lag 2": (2, ["kl.estimator=forward"]),
    "js, top_k=4": (0, ["kl.estimator=js", "kl.top_k=4"]),
    "k3": (0, ["kl.estimator=k3"]),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="finished runs, which are not run again")
    parser.add_argument(
        "--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM", help=str([*ARMS])
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--teacher", type=int, default=1, help="its steps of RL")
    parser.add_argument("--tests", type=int, default=TESTS)
    parser.add_argument("--table", action="store_true", help="print --out; run nothing")
    options = parser.parse_args()

    if not options.table:
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as folder:
            work(options, Path(folder))

    print(report(read(options.out)))


def work(options: argparse.Namespace, folder: Path) -> None:
    config = compose([*TASK, "total_steps=120", "buffer.max_staleness=0"])
    player = Player(config)
    done = {(row["arm"], row["seed"]) for row in read(options.out)}

    learner, _ = trained(config, player, 0, options.teacher)
    path = save(player, learner, folder)
    for seed in options.seeds:
        for arm in ("teacher", "start", *options.arms):
            once = arm in ARMS or seed == options.seeds[0]
            if once and (arm, seed) not in done:
                lag, arm_overrides = ARMS.get(arm, (0, ["trainer.lr=1e-9", "total_steps=1"]))
                begin = [f"model.path={path}"] if arm == "teacher" else []

                keys = [
                    "algorithm=distill",
                    f"kl.reference={path}",
                    f"buffer.max_staleness={lag}",
                    f"seed={seed}",
                ]

                config = compose([*TASK, f"total_steps={STEPS}", *keys, *arm_overrides, *begin])
                learner, metrics = trained(config, player, lag, config.total_steps if arm in ARMS else 0)
                row = {"arm": arm, "seed": seed, **compared(learner, player, options.tests)}
                row["ref_kl"] = metrics.get("actor/ref_kl", math.nan)
                row["masked"] = metrics["masked"]
                with options.out.open("a") as out:
                    out.write(json.dumps(row) + "\n")

                print(row, flush=True)


def trained(config: RunConfig, player: Player, lag: int, steps: int) -> tuple[Learner, dict[str, float]]:
    """Return a learner after so many batches, which the weights of `lag` steps before sampled, and the
    metrics of the last batch, with the largest share of masked tokens of all batches."""
    metrics = dict[str, float]()
    masked = [0.0]
    train = samples(config.data.train, OPERATIONS)
    prompts = Prompts(len(train), lambda epoch: shuffled(range(len(train)), f"{config.seed}/{epoch}"))

    torch.manual_seed(config.seed)
    learner = Learner(config, world())
    learner.max_staleness = lag
    versions = [snapshot(learner)]

    for step in range(steps):
        asks = _batch(config, train, prompts, step)
        version = max(0, step - lag)
        episodes = player.play(versions[version], version, asks)
        earned = [0.0] * len(asks) if learner.reference else [reward_of(episode) for episode in episodes]
        metrics = _train(learner, asks, episodes, earned)
        masked.append(metrics.get("rollout_corr/rollout_rs_masked_fraction", 0.0))
        versions.append(snapshot(learner))

    return learner, metrics | {"masked": max(masked)}


def reward_of(episode: Episode) -> float:
    return episode.command.result.reward  # type: ignore[union-attr]


def save(player: Player, learner: Learner, folder: Path) -> str:
    """A model directory with the learner's weights."""
    source = Path(player.config.model.path)
    path = folder / "teacher"
    player.model.load_state_dict(snapshot(learner), strict=False)
    player.model.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((source / name).read_bytes())
    return str(path)


@torch.no_grad()
def compared(learner: Learner, player: Player, tests: int) -> dict[str, Any]:
    """Success on held-out questions, and the two models in the states that the student came to."""
    config = learner.config
    reference = learner.reference
    assert reference is not None
    held_out = samples(config.data.test, OPERATIONS)
    asks = [Ask(f"t{i}/0", held_out[i % len(held_out)], sampling_key(0, f"t{i}", 0)) for i in range(tests)]
    episodes = player.play(snapshot(learner), 1, asks)
    rewards = [reward_of(episode) for episode in episodes]
    rows = _rows(asks, episodes, rewards, config.rollout.temperature)
    examples = [
        training_sample(row, episode.turns, 0, 10**6, learner.recipe.aggregate)
        for row, episode in zip(rows, episodes, strict=True)
    ]

    sums = dict.fromkeys(("reverse", "forward", "entropy", "teacher_entropy"), 0.0)
    for part in (examples[i : i + 32] for i in range(0, len(examples), 32)):
        tokens = collate(part, learner.dtype, learner.packing).selected
        for name in ("reverse", "forward"):
            scores = learner.policy(tokens, teacher=reference.teacher(tokens, name, 0))
            sums[name] += scores.divergence.sum().item()
        sums["entropy"] += scores.entropy.sum().item()
        sums["teacher_entropy"] += reference.policy(tokens).entropy.sum().item()

    count = sum(e.model_tokens for e in examples)
    return {
        "success": sum(reward == 1.0 for reward in rewards),
        "tests": tests,
        "tokens": count / tests,
        **{name: total / tests for name, total in sums.items()},
    }


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def coins(p: float, q: float) -> float:
    """Return the KL divergence of a coin of probability p from a coin of probability q."""
    parts = ((p, q), (1 - p, 1 - q))
    return sum(a * math.log(a / b) for a, b in parts if a)


def report(results: list[dict[str, Any]]) -> str:
    """All seeds of an arm together; divergences and entropies in nats per episode."""
    teacher = [row for row in results if row["arm"] == "teacher"]

    rate = sum(row["success"] for row in teacher) / max(1, sum(row["tests"] for row in teacher))
    rows = []
    for arm in dict.fromkeys(row["arm"] for row in results):
        arm_rows = [row for row in results if row["arm"] == arm]
        mean = {
            key: statistics.fmean(row[key] for row in arm_rows)
            for key in arm_rows[0]
            if key not in ("arm", "seed")
        }

        successes, tests = (sum(row[key] for row in arm_rows) for key in ("success", "tests"))
        low, high = wilson(successes, tests)
        least = coins(successes / tests, rate) if 0 < rate < 1 else math.nan
        rows.append(
            [
                arm,
                f"{successes / tests:.1%} ({low:.0%}–{high:.0%})",
                f"{mean['tokens']:.1f}",
                f"{least:.3f}",
                *(f"{mean[key]:.3f}" for key in ("reverse", "forward", "entropy", "teacher_entropy")),
                f"{mean['ref_kl']:.4f}",
                f"{mean['masked']:.3f}",
            ]
        )

    head = (
        "arm, success, tokens, least KL, KL(π T), KL(T π), entropy of π, of T, reported ref_kl, most masked"
    )
    return table(head.split(", "), rows)


if __name__ == "__main__":
    main()
