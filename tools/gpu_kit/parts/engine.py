"""Does the embedded engine record the log-probs that the trainer computes, also across a change of
weights?

Turns of 16 sessions with prompts of different lengths are sampled together, by a model of random weights
in the size of Qwen3 0.6B: greedy, at temperature 1 and at 0.7. The trainer's policy then scores the same
tokens, a row at a time. The noise floor of bfloat16 is the trainer's own rounding: how far its log-probs
of these tokens are from those in float32 with the same weights. Two computations that round independently
differ by at most twice that. For comparison: the trainer's rows one by one and in one padded batch, where
products have other shapes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from msgspec.structs import replace
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from asyncrl.config import ModelConfig
from asyncrl.engines.base import Request, Sampling
from asyncrl.engines.torch.engine import TorchEngine, build
from asyncrl.trainer.model import Policy, PublishedShards, load_policy
from asyncrl.trainer.scores import Selected
from asyncrl.trainer.world import World, join_ranks, leave_ranks
from asyncrl.types import Generation, PolicyVersion
from parts.common import Context, Finding, attempt, exact_float32
from tests.fakes.weights import publish

SECONDS = 180
GOAL = "float32 1e-4; bfloat16 within twice its noise floor"

SESSIONS = 16
MODEL = "qwen3-0.6b"
STEPS = 320  # before weights change: the engine records its steps after 300 of a kind
FLOAT32_GOAL = 1e-4
FLOORS = 2.0


class Sizes(NamedTuple):
    prompts: tuple[int, int]  # shortest and longest
    new: int
    longest: int  # of a slot


class Setup(NamedTuple):
    """Both sides, with the same weights. `exact`: the policy in float32. `temperatures`: of the sessions; 0
    is greedy, recorded as 1."""

    context: Context
    dtype: str
    engine: TorchEngine
    policy: Policy
    exact: Policy
    prompts: list[tuple[int, ...]]
    temperatures: list[float]
    sizes: Sizes

    def request(self, number: int, name: str, new: int) -> Request:
        sampling = Sampling(new, stop_ids=(), temperature=self.temperatures[number])
        return Request(f"{name}-{number}", self.prompts[number], sampling, key=number)

    async def generate(self, name: str, new: int) -> list[Generation]:
        """A turn of every session, together."""
        return await asyncio.gather(
            *(self.engine.generate(self.request(number, name, new)) for number in range(len(self.prompts)))
        )

    @torch.no_grad()
    def score(
        self, policy: Policy, turns: Sequence[Generation], *, together: bool = False
    ) -> list[np.ndarray]:
        """A policy's log-probs of these turns, of all rows in one batch or one by one."""
        rows = [np.array([*prompt, *turn.ids]) for prompt, turn in zip(self.prompts, turns, strict=True)]
        numbers = [[*range(len(rows))]] if together else [[number] for number in range(len(rows))]
        scored_logprobs: list[np.ndarray] = []
        for batch in numbers:
            lengths = [len(turns[number].ids) for number in batch]
            starts = [len(self.prompts[number]) for number in batch]
            spans = zip(starts, lengths, strict=True)
            temperature = [self.temperatures[number] or 1.0 for number in batch]
            chosen = Selected.lay_out(
                [rows[number] for number in batch],
                np.repeat(np.arange(len(batch)), lengths),
                np.concatenate([np.arange(start, start + length) for start, length in spans]),
                torch.tensor(temperature).repeat_interleave(torch.tensor(lengths)),
            )
            logp = policy(chosen.to(self.context.device)).logp.float().cpu().numpy()
            cast(FSDPModule, policy).reshard()  # as after a backward
            scored_logprobs += np.split(logp, np.cumsum(lengths)[:-1])
        return scored_logprobs


def run(context: Context) -> Iterator[Finding]:
    world = join_ranks(0, 1, device=context.device.type)
    path = context.random_model(MODEL, dtype="bfloat16")
    try:
        for dtype in ("float32", "bfloat16"):
            findings: list[Finding] = []
            yield from attempt(
                dtype, lambda d=dtype, f=findings: both_sides(context, world, path, d, f), context
            )
            yield from findings
    finally:
        leave_ranks()


def both_sides(context: Context, world: World, path: Path, dtype: str, more: list[Finding]) -> Finding:
    """Compare them at rest; then, in bfloat16 or on a CPU, while weights change."""
    with exact_float32():
        began = time.monotonic()
        setup = set_up(context, world, path, dtype)
        loaded = time.monotonic() - began

        async def both() -> Finding:
            try:
                finding = await at_rest(setup, loaded)
                if dtype == "bfloat16" or context.small:
                    more.extend(await updated(setup))
                return finding
            finally:
                await setup.engine.close()

        return asyncio.run(both())


def set_up(context: Context, world: World, path: Path, dtype: str) -> Setup:
    sizes = Sizes((5, 30), 24, 1200) if context.small else Sizes((20, 200), 64, 3000)
    engine = build(str(path), dtype, SESSIONS, sizes.longest, device=str(context.device))
    policy = load_policy(ModelConfig(path=str(path), dtype=dtype), world)  # type: ignore[arg-type]
    exact = policy if dtype == "float32" else load_policy(ModelConfig(path=str(path), dtype="float32"), world)
    rng = np.random.default_rng(0)
    lengths = rng.integers(*sizes.prompts, SESSIONS)
    prompts = [tuple(rng.integers(0, policy.vocabulary, length).tolist()) for length in lengths]
    return Setup(
        context, dtype, engine, policy, exact, prompts, [0.0, 1.0, 0.7, 1.0] * (SESSIONS // 4), sizes
    )


async def at_rest(setup: Setup, loaded: float) -> Finding:
    began = time.monotonic()
    turns = await setup.generate("first", setup.sizes.new)
    spent = time.monotonic() - began
    finding = judge(setup, setup.dtype, turns)
    speed = f"{sum(len(turn.ids) for turn in turns) / spent:.0f} tokens/s at {SESSIONS} sessions (first turn)"
    return Finding(**finding.__dict__ | {"note": f"{finding.note}; {speed}; both loaded in {loaded:.1f} s"})


def judge(setup: Setup, name: str, turns: Sequence[Generation]) -> Finding:
    """The largest difference, beside its goal."""
    trainer = setup.score(setup.policy, turns)
    gaps = differences([np.array(turn.logprobs, dtype=np.float32) for turn in turns], trainer)
    gap = np.concatenate(gaps)
    shapes = differences(setup.score(setup.policy, turns, together=True), trainer)
    floor = np.concatenate(differences(setup.score(setup.exact, turns), trainer))
    own_goal = setup.dtype == "float32"
    goal = FLOAT32_GOAL if own_goal else FLOORS * float(floor.max())
    mean_goal = FLOAT32_GOAL if own_goal else FLOORS * float(floor.mean())
    value = f"largest {gap.max():.1e}, mean {gap.mean():.1e}"
    modes = {"greedy": 0.0, "T=1": 1.0, "T=0.7": 0.7}
    largest = {
        mode: max(float(one.max()) for one, t in zip(gaps, setup.temperatures, strict=True) if t == value)
        for mode, value in modes.items()
    }
    parts = [f"{mode} {turn_gaps:.1e}" for mode, turn_gaps in largest.items()]
    scores = np.concatenate(trainer)
    shape_gaps = np.concatenate(shapes)
    return Finding(
        name,
        value + ("" if own_goal else f"; floor: largest {floor.max():.1e}, mean {floor.mean():.1e}"),
        f"≤ {goal:.1e}" if own_goal else f"twice the floor: largest ≤ {goal:.1e}, mean ≤ {mean_goal:.1e}",
        bool(np.isfinite(gap).all() and gap.max() <= goal and gap.mean() <= mean_goal),
        f"{len(gap)} tokens, log-probs from {scores.min():.1f} to {scores.max():.2f}; "
        f"largest gap {', '.join(parts)}; the trainer's own by shape of the batch: "
        f"largest {shape_gaps.max():.1e}, mean {shape_gaps.mean():.1e}",
    )


def differences(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [np.abs(x - y) for x, y in zip(a, b, strict=True)]


async def updated(setup: Setup) -> list[Finding]:
    """Weights change in mid-generation: tokens before are the old policy's, turns after it the new one's."""
    engine = setup.engine
    name = setup.dtype
    most_tokens = setup.sizes.longest - max(map(len, setup.prompts)) - 1
    turning = asyncio.create_task(setup.generate("second", most_tokens))
    await grown(setup, STEPS * SESSIONS, turning)
    old, new = await asyncio.to_thread(changed, setup.policy)
    ref = await asyncio.to_thread(
        publish, as_published(setup), setup.context.work / name, PolicyVersion(0, 1)
    )
    before = engine.tokens
    began = time.monotonic()
    await engine.load(ref)
    loading = (
        f"loaded in {time.monotonic() - began:.2f} s, in which {engine.tokens - before} tokens were sampled"
    )
    await grown(setup, 8 * SESSIONS, turning)
    for number in range(SESSIONS):
        engine.release(f"second-{number}")
    turns = await turning
    fill(setup, old)
    earlier = judge(
        setup, f"{name}: tokens before a change of weights", [first_version(turn) for turn in turns]
    )
    fill(setup, new)
    versions = sorted({tuple(span.version for span in turn.spans) for turn in turns})
    later = await setup.generate("third", setup.sizes.new)
    return [
        earlier,
        Finding(
            f"{name}: versions within those turns", str(versions), "[(0, 1)]", versions == [(0, 1)], loading
        ),
        judge(setup, f"{name}: turns after the change", later),
    ]


async def grown(setup: Setup, tokens: int, turning: asyncio.Task[Any]) -> None:
    """Wait until so many more tokens are sampled, or the turns end."""
    wanted = setup.engine.tokens + tokens
    while setup.engine.tokens < wanted and not turning.done():
        if setup.context.left() < 5:
            raise TimeoutError(f"{setup.engine.tokens} of {wanted} tokens were sampled in time")
        await asyncio.sleep(0.01)


@torch.no_grad()
def changed(policy: Policy) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Its weights before, and after each was scaled by about 1, give or take a tenth."""
    old = [weight.clone() for weight in own(policy)]
    for weight in own(policy):
        weight.copy_((weight * (1 + 0.1 * torch.randn_like(weight))).bfloat16())  # as exact in each dtype
    return old, [weight.clone() for weight in own(policy)]


@torch.no_grad()
def fill(setup: Setup, values: list[torch.Tensor]) -> None:
    for policy in (setup.policy, setup.exact):
        for weight, value in zip(own(policy), values, strict=True):
            weight.copy_(value)


def own(policy: Policy) -> list[torch.Tensor]:
    """The only rank's shards of its weights: all of each."""
    return [cast(DTensor, weight).to_local() for weight in policy.parameters()]


def as_published(setup: Setup) -> dict[str, torch.Tensor]:
    kept_dtype = getattr(torch, setup.dtype)
    return {name: shard.to_local().to(kept_dtype) for name, shard in PublishedShards(setup.policy).items()}


def first_version(turn: Generation) -> Generation:
    end = turn.spans[0].end
    return replace(turn, ids=turn.ids[:end], logprobs=turn.logprobs[:end])
