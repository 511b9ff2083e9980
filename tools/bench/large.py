"""Whether a model of 1B parameters loads, steps, is saved and goes on within the memory of one machine.

    python tools/bench/large.py [--parameters 1e9] [--ranks 1 2] [--limit-gb 24]

The weights are random, in bfloat16 files; the trainer's are float32 with AdamW's moments, computing in
bfloat16. Each number of ranks runs twice: load, step, checkpoint; then, in new processes, load, resume, step.
Memory is the peak of a phase (VmHWM), of all ranks together; a file that is mapped or cached does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common import ROOT, SINGLE_THREAD, table

VOCABULARY = 32_000
BUDGET = 512
EPISODES = 2
# tokens
PROMPT = (130, 240)
ANSWER = (20, 80)


def micro_batches(rng: random.Random, step: int) -> Iterator[list]:
    """A step's episodes with their turn, one in each micro-batch."""
    from asyncrl.types import EpisodeResult, StopReason, Turn, VersionSpan
    from asyncrl.wire.messages.trainer import PlannedTrajectory

    for i in range(EPISODES):
        context, ids = (
            tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(*r))) for r in (PROMPT, ANSWER)
        )
        spans = (VersionSpan(0, len(ids), step, step),)
        turn = Turn(0, context, ids, (-1.0,) * len(ids), spans, StopReason.STOP)
        results = tuple(EpisodeResult(float(won), len(ids)) for won in (0, 1))
        planned = PlannedTrajectory(f"{step}/{i}", f"{i // 2}", 1, results[i % 2], results, i % 2, 2, 1.0)
        yield [(planned, [turn])]


def make_model(path: Path, parameters: float) -> int:
    """Write a Llama of about so many parameters, a tensor at a time; returns how many it has."""
    import torch
    from accelerate import init_empty_weights
    from transformers import LlamaConfig, LlamaForCausalLM

    from asyncrl.weights.manifest import TensorSpec
    from asyncrl.weights.ranges import write_file
    from asyncrl.weights.snapshot import as_bytes

    width = 2048 if parameters > 3e8 else 512 if parameters > 3e7 else 64
    layer = 4 * width**2 + 3 * width * 4 * width
    layers = max(1, round((parameters - 2 * VOCABULARY * width) / layer))
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        vocab_size=VOCABULARY,
        tie_word_embeddings=False,
        dtype=torch.bfloat16,
    )
    with init_empty_weights():
        model = LlamaForCausalLM(config)
    layout = tuple(TensorSpec(name, tuple(p.shape), "bfloat16") for name, p in model.named_parameters())
    values = (as_bytes(torch.randn(spec.shape).mul_(0.02).bfloat16()) for spec in layout)
    path.mkdir(parents=True)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(path)
    with (path / "model.safetensors").open("wb") as file:
        write_file(file, layout, values)
    return sum(p.numel() for p in model.parameters())


def measure(model: str, folder: Path, rank: int, ranks: int, resume: bool) -> dict[str, tuple[float, float]]:
    """One rank: seconds and peak bytes by phase."""
    import torch

    from asyncrl.config import parse
    from asyncrl.trainer.checkpointing import Checkpointing, shared_checkpoints
    from asyncrl.trainer.learner import Learner
    from asyncrl.trainer.memory import trim_heap
    from asyncrl.trainer.world import join_ranks, leave_ranks

    found: dict[str, tuple[float, float]] = {}

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        start = time.monotonic()
        yield
        lines = Path("/proc/self/status").read_text().splitlines()
        peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
        found[name] = (time.monotonic() - start, peak * 1024)

    torch.set_num_threads(1)
    world = join_ranks(rank, ranks, f"{folder}/rendezvous-{ranks}-{resume}", "cpu")
    config = parse(
        {
            "name": f"large-{ranks}",
            "model": {"path": model, "dtype": "bfloat16"},
            "data": {"train": "none"},
            "rollout": {"max_tokens": 512, "max_new_tokens": 128},
            "algorithm": {"correction": {"truncate": {}}},  # the log-probs are made up
            "trainer": {"micro_batch_tokens": BUDGET, "ranks": ranks},
            "checkpoint": {"directory": str(folder)},
        }
    )
    with phase("load"):
        learner = Learner(config, world)
        saving = Checkpointing(config, shared_checkpoints(config, folder, world), learner)
    if resume:
        with phase("resume"):
            saving.resume()
        assert learner.step == 1, "nothing was resumed"
    with phase("step"):
        for micro in micro_batches(random.Random(0), learner.step):
            learner.accumulate(micro)
        metrics = learner.finish()
        trim_heap()  # as a rank does
    assert not metrics["actor/skipped_steps"], metrics
    if not resume:
        with phase("stall"):
            copied = saving.begin_checkpoint(0)
        with phase("checkpoint" if copied else "checkpoint, training waits"):
            while saving.is_writing:
                saving.poll_checkpoint()
                time.sleep(0.01)
        assert not saving.problem, saving.problem
    leave_ranks()
    return found


def run_ranks(model: str, folder: Path, ranks: int, resume: bool) -> list[list[str]]:
    """A line for each phase: the slowest rank's seconds, the sum of all ranks' peaks."""
    command = [sys.executable, __file__, "--measure", model, "--folder", str(folder), "--ranks", str(ranks)]
    command += ["--resume"] if resume else []
    environment = os.environ | SINGLE_THREAD | {"PYTHONPATH": str(ROOT)}
    children = [
        subprocess.Popen([*command, "--rank", str(rank)], stdout=subprocess.PIPE, env=environment, text=True)
        for rank in range(ranks)
    ]
    outputs = [child.communicate(timeout=7200)[0] for child in children]
    if any(child.returncode for child in children):
        raise SystemExit(f"{ranks} ranks: exit codes {[child.returncode for child in children]}")
    found = [json.loads(output.splitlines()[-1]) for output in outputs]
    return [
        [
            str(ranks),
            name,
            f"{max(one[name][0] for one in found):.1f}",
            f"{sum(one[name][1] for one in found) / 1e9:.2f}",
        ]
        for name in found[0]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--parameters", type=float, default=1e9)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--limit-gb", type=float, default=24.0)
    parser.add_argument("--folder", type=Path, help="for model and checkpoints; default: a temporary one")
    parser.add_argument("--measure", help=argparse.SUPPRESS)  # of a rank's process: the model
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--resume", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure, args.folder, args.rank, args.ranks[0], args.resume)))
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        needed = args.parameters * (2 + 12 + 2)  # model; a checkpoint's state and its export
        if shutil.disk_usage(folder).free < 1.1 * needed:
            raise SystemExit(f"{folder} has less than {1.1 * needed / 1e9:.0f} GB free; set --folder")
        count = make_model(folder / "model", args.parameters)
        lines = []
        for ranks in args.ranks:
            for resume in (False, True):
                lines += run_ranks(str(folder / "model"), folder, ranks, resume)
            shutil.rmtree(folder / f"large-{ranks}")
    print(f"{count / 1e6:,.0f} M parameters, one thread per rank")
    print(table(["ranks", "phase", "s", "GB, all ranks"], lines))
    worst = max(float(line[3]) for line in lines)
    print(f"most: {worst:.2f} GB of {args.limit_gb:g}")
    raise SystemExit(worst > args.limit_gb)


if __name__ == "__main__":
    main()
