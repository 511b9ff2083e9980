"""Steps of end_to_end that need no pretrained model: what an engine and a rank give up on the device when
they take turns (`engine.colocated`), and the calculator demo by shifts, whose trainer is killed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import torch
import xxhash
from torch.utils._pytree import tree_leaves

from asyncrl.engines.base import Request, Sampling
from asyncrl.engines.torch.engine import build
from asyncrl.observe.timeline import Timeline, merge_spans, timeline_files
from asyncrl.trainer.device_offload import DeviceOffload
from asyncrl.trainer.learner import Learner
from asyncrl.trainer.model import PublishedShards
from asyncrl.trainer.world import join_ranks, leave_ranks
from asyncrl.types import PolicyVersion
from parts.common import FREED, MB, Context, Finding, failure, release, synchronize, used_memory
from parts.runs import STOP_S, account, ends_of_logs, mean_of, step_rows, stop_run, summary
from parts.steps import episodes, make_learner, train
from tests.fakes.weights import publish

LEARNED = 0.9  # sampled success of the demo
DEMO_GAP = 1e-3  # nats, in float32
CLOCKS_S = 0.02  # by which the stamps of two processes differ
CHECKPOINT_EVERY = 8  # steps
SPARE_S = STOP_S + 5.0  # for the end and the report of a run that is not over in time


# -- what each side gives up -------------------------------------------------------------------------------


def sides_alone(context: Context) -> Iterator[Finding]:
    """A rank rests after a step, an embedded engine falls asleep in the midst of turns, the rank wakes and
    publishes, and the engine wakes with that version."""
    world = join_ranks(0, 1, device=context.kind)
    try:
        learner = make_learner(context, world, "qwen3-0.6b", 64 if context.small else 4096, packing="padded")
        yield from asyncio.run(_take_turns(context, learner))
    except Exception as error:
        yield failure("engine and rank", error)
    finally:
        leave_ranks()
        release(context)


async def _take_turns(context: Context, learner: Learner) -> list[Finding]:
    sessions = 4 if context.small else 16
    tokens = 32 if context.small else 512
    took = list[str]()

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        synchronize(context)
        took.append(f"{name} {time.perf_counter() - began:.2f}")

    def alone(name: str) -> None:
        """In place of a meeting of ranks."""

    train(learner, episodes(learner, [64, 64]))
    resting = DeviceOffload(learner, Timeline(context.work / "timeline"), context.work)
    before = _digest(learner)
    full = _used(context)
    with timed("the first rest, which pins memory"):
        resting.offload(alone)
    held_bytes = sum(tensor.nbytes for tensor in _state(learner))
    findings = [_freed("rank at rest", full, held_bytes, context)]

    path = context.random_model("qwen3-0.6b", dtype="bfloat16")
    release(context)
    empty = _used(context)
    engine = build(str(path), "bfloat16", sessions, 2 * tokens, device=context.kind)
    turns = [
        asyncio.create_task(engine.generate(Request(f"{n}", (n + 1, n + 2), Sampling(tokens, ()), n)))
        for n in range(sessions)
    ]
    while engine.tokens < 4 * sessions and not any(turn.done() for turn in turns):  # noqa: ASYNC110
        await asyncio.sleep(0.002)
    full = _used(context)
    with timed("sleep"):
        await engine.sleep()
    findings.append(_freed("engine asleep", full, full - empty, context))

    with timed("wake of the rank"):
        resting.onload()
    same = _digest(learner) == before
    findings.append(Finding("weights and moments of the rank", str(same), "as before", same))
    tensors = {
        name: shard.to_local().to("cpu", torch.bfloat16, copy=True)
        for name, shard in PublishedShards(learner.policy).items()
    }
    ref = publish(tensors, context.work / "published", PolicyVersion(0, 1))
    with timed("rest"):
        resting.offload(alone)
    with timed("load"):
        await engine.load(ref)
    finished = await asyncio.gather(*turns)
    await engine.close()
    versions = {tuple(span.version for span in turn.spans) for turn in finished}
    finished_turns = sum(len(turn.ids) == tokens for turn in finished)
    value = f"{finished_turns} of {sessions} came to their end, with tokens of versions {versions}"
    fine = finished_turns == sessions and versions == {(0, 1)}
    findings.append(Finding("turns around the sleep", value, "all, of versions 0 and 1", fine))
    return [*findings, Finding("changes, s", ", ".join(took))]


def _used(context: Context) -> float:
    """Return the bytes in use on the device; on a CPU those of this process."""
    return used_memory(context, [psutil.Process()])


def _freed(name: str, full: float, held_bytes: float, context: Context) -> Finding:
    """Judge what is free by now of so many bytes that were held."""
    freed = full - _used(context)
    value = f"{freed / MB:,.0f} of {held_bytes / MB:,.0f} MB"
    return Finding(name, value, f"{FREED:.0%} freed", context.judged(freed >= FREED * held_bytes))


def _state(learner: Learner) -> list[torch.Tensor]:
    """Local tensors of weights and moments."""
    leaves = [*learner.policy.parameters(), *tree_leaves([*learner.optimizer.state.values()])]
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return [getattr(tensor, "_local_tensor", tensor).detach() for tensor in tensors]


def _digest(learner: Learner) -> list[str]:
    return [xxhash.xxh3_64_hexdigest(tensor.to("cpu", copy=True).numpy()) for tensor in _state(learner)]


# -- the demo ----------------------------------------------------------------------------------------------


def demo(context: Context) -> Iterator[Finding]:
    """`asyncrl train experiment=calculator engine.colocated=1` with fewer steps, on one device. After some
    steps the trainer is killed; the launcher starts another, which goes on from the newest checkpoint."""
    began = time.monotonic()
    console = context.work / "console.txt"
    run_dir = context.work / "runs" / "demo"
    with console.open("wb") as output:
        process = subprocess.Popen(_command(context), cwd=context.work, stdout=output, stderr=output)
    try:
        yield from _kill(context, process, run_dir, began)
        code = process.wait(max(1.0, context.left() - SPARE_S))
        if code:
            yield Finding("demo: run", f"exit code {code}", "0", False, ends_of_logs(run_dir, console))
        yield from _reached(run_dir)
    except (TimeoutError, subprocess.TimeoutExpired) as error:
        value = f"{error}; {len(step_rows(run_dir))} steps"
        yield Finding("demo: run", value, ok=False, note=ends_of_logs(run_dir, console))
    finally:
        stop_run(process)


def _command(context: Context) -> list[str]:
    data = context.kit / "examples/multiturn/calculator/data"
    steps = 40 if context.small else 60
    samples = 64 if context.small else 128
    return [
        *(sys.executable, "-m", "asyncrl.cli", "train", "experiment=calculator", "name=demo"),
        *(f"data.train={data / 'train.jsonl'}", f"data.test={data / 'test.jsonl'}", "engine.colocated=1"),
        *(f"total_steps={steps}", f"validation.samples={samples}", f"checkpoint.every={CHECKPOINT_EVERY}"),
        f"model.device={context.kind}",
    ]


def _kill(
    context: Context, process: subprocess.Popen[bytes], run_dir: Path, began: float
) -> Iterator[Finding]:
    """Kill the trainer once a checkpoint is well behind it; wait until another one has made steps."""
    _await(context, process, lambda: len(step_rows(run_dir)) >= 1, "the first step")
    yield Finding("demo: first step after", f"{time.monotonic() - began:.1f} s")
    _await(
        context, process, lambda: len(step_rows(run_dir)) >= CHECKPOINT_EVERY + 2, "enough steps to kill it"
    )
    victim = _trainer(process.pid)
    victim.kill()
    killed_at = time.monotonic()
    reached = _newest(run_dir)
    _await(context, process, lambda: _newest(run_dir) > reached, "a step after the kill")
    value = f"at step {reached:.0f}; {time.monotonic() - killed_at:.1f} s later another one was past it"
    another = _trainer(process.pid).pid != victim.pid
    yield Finding("demo: kill -9 of the trainer", value, "goes on by itself", another)


def _await(
    context: Context, process: subprocess.Popen[bytes], is_there: Callable[[], bool], awaited_thing: str
) -> None:
    while not is_there():
        if process.poll() is not None:
            raise TimeoutError(f"it ended with exit code {process.returncode} before {awaited_thing}")
        if context.left() < SPARE_S:
            raise TimeoutError(f"no time left before {awaited_thing}")
        time.sleep(0.1)


def _trainer(launcher: int) -> psutil.Process:
    for child in psutil.Process(launcher).children(recursive=True):
        with suppress(psutil.Error):
            words = child.cmdline()
            if "asyncrl.launch.role" in words and "trainer" in words:
                return child
    raise TimeoutError("no process of a trainer was found")


def _newest(run_dir: Path) -> float:
    """The newest step; 0 before the first one."""
    step: float = max((row["training/step"] for row in step_rows(run_dir)[-1:]), default=0.0)
    return step


def _reached(run_dir: Path) -> Iterator[Finding]:
    written = summary(run_dir)
    before = written["success_before"]
    after = written["success_after"]
    learned = after >= LEARNED
    yield Finding("demo: sampled success", f"{before:.1%} → {after:.1%}", f"{LEARNED:.0%}", learned)
    yield Finding("demo: account of episodes", account(written["flow"]), "exact", written["conserved"])
    gap = written["logprob_diff_max_same_version"]
    compared = written["logprob_tokens_compared"]
    value = f"at most {gap:.1e} nats, of {compared} tokens"
    yield Finding("demo: log-probs, trainer against engine", value, f"{DEMO_GAP:g}", gap <= DEMO_GAP)

    trained = _spans(run_dir, "trainer", "train", "step")
    decoded = _spans(run_dir, "rollout", "decode")
    both = sum(max(0.0, min(b, d) - max(a, c) - CLOCKS_S) for a, b in trained for c, d in decoded)
    never = both == 0 < len(trained) * len(decoded)
    yield Finding("demo: both sides at once", f"{both:.2f} s", "0", never)
    rows = step_rows(run_dir)
    changes = ", ".join(f"{key} {mean_of(rows, key) or 0.0:.2f}" for key in ("shift/sleep_s", "shift/wake_s"))
    value = f"{written['steps']} steps in {written['seconds']:.0f} s, start and recovery included; "
    value += f"{written['tokens_per_s']:.0f} tokens/s; {changes}"
    yield Finding("demo: run", value)


def _spans(run_dir: Path, role: str, *names: str) -> Sequence[tuple[float, float]]:
    lines: Any = (line for file in timeline_files(run_dir) if file.role == role for line in file.read_added())
    return merge_spans((line.start, line.end) for line in lines if line.name in names)
