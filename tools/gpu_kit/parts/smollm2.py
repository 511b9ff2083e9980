"""Does a pretrained model learn to call a tool on this device, as it does on a CPU?

The folder `smollm2` is unpacked, and the model's log-probs are compared with those of the machine that packed
it; then ten steps of `asyncrl train experiment=smollm2`, with 64 held-out questions before and after."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from parts.common import Context, Finding, exact_float32, release

SECONDS = 180
SMALL_SECONDS = 60.0
GOAL = "as on a CPU: 90% sampled after 10 steps"
OPTIONAL = True

STEPS = 10
LEAST, TOKENS = 0.9, 16_384
SPARE_S, LEAST_S = 4.0, 35.0  # for the report of a run that is cut off; that another one needs
NOT_THERE = (
    "not run: the second folder is not there (make gpu-kit-smollm2; copy it into this one, or beside it)"
)
# `asyncrl eval MODEL experiment=smollm2 samples=256` on two cores; of what is unpacked each
# byte is the same.
BEFORE = "original 13.3% sampled, 21.9% greedy; unpacked 14.5% and 22.7%"
TEXT = "The capital of France is Paris. 37 * 58 = 2146; the calculator says so."
MEAN_LOGPROB, TOLERANCE = -3.1941, 1e-3  # of the ids of TEXT but the first, in float32


def run(context: Context) -> Iterator[Finding]:
    places = (context.kit / "smollm2", context.kit.parent / "smollm2")
    folder = next((place for place in places if (place / "index.json").exists()), None)
    if folder is None:
        yield Finding("folder", NOT_THERE)
        return
    model = context.work / "model"
    yield unpacked(folder, model)
    yield mean_logprob(context, model)
    yield Finding("before training, on a CPU", BEFORE, note="of 256 held-out questions")
    if context.small:
        yield from evaluated(context, model)
    else:
        yield from trained(context, model)


def unpacked(folder: Path, model: Path) -> Finding:
    began = time.perf_counter()
    spec = importlib.util.spec_from_file_location("four_bits", folder / "four_bits.py")
    assert spec and spec.loader
    four_bits = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(four_bits)
    index = four_bits.unpack(folder, model)
    size = sum(part.stat().st_size for part in folder.glob("part-*")) / 2**20
    value = f"{size:.1f} MiB in {time.perf_counter() - began:.1f} s; {index['wrong']} weights differ"
    return Finding("unpacked", value, "the original's, bit for bit", index["wrong"] == 0)


def mean_logprob(context: Context, model: Path) -> Finding:
    """Of a text, in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = torch.tensor([AutoTokenizer.from_pretrained(model)(TEXT)["input_ids"]], device=context.device)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(context.device)
    with torch.no_grad(), exact_float32():
        logp = policy(ids).logits[0, :-1].log_softmax(-1)
    mean = float(logp.gather(-1, ids[0, 1:, None]).mean())
    del policy, logp
    release(context)
    goal = f"{MEAN_LOGPROB:.4f}, as on the CPU that packed it; ±{TOLERANCE:g}"
    return Finding("mean log-prob of a text", f"{mean:.4f}", goal, abs(mean - MEAN_LOGPROB) <= TOLERANCE)


def trained(context: Context, model: Path) -> Iterator[Finding]:
    """Batches and slots are as on the CPU, small for a GPU: the curve is to be the same. If it fails, once
    more with padded rows."""
    overrides = [f"total_steps={STEPS}", "validation.samples=64", f"trainer.micro_batch_tokens={TOKENS}"]
    overrides += ["trainer.activation_checkpointing=none", "checkpoint.every=0", f"model.path={model}"]
    for packing in ("tree", "padded"):
        began = time.monotonic()
        code = asyncrl(context, "train", packing, [*overrides, f"trainer.packing={packing}"])
        took, found = time.monotonic() - began, summary(context, packing)
        if not code and found.get("success_after") is not None:
            yield from learned(context, found, took, packing)
            return
        yield failed(context, packing, code)
        if context.left() < LEAST_S:
            return


def learned(context: Context, found: Mapping[str, Any], took: float, packing: str) -> Iterator[Finding]:
    after = found["success_after"]
    was = f"from {found['success_before']:.1%} sampled, {found['greedy_before']:.1%} greedy"
    yield Finding("held out, sampled", f"{after:.1%}; {was}", f"{LEAST:.0%}", context.judged(after >= LEAST))
    yield Finding("held out, greedy", f"{found['greedy_after']:.1%}")
    yield Finding("conserved", str(found["conserved"]), "True", bool(found["conserved"]))
    what = f"{found['steps']} steps, {found['tokens_trained']} tokens, trainer.packing={packing}"
    yield Finding("run", f"{what}; {took:.0f} s with its start and validations")
    gap, compared = found["logprob_diff_max_same_version"], found["logprob_tokens_compared"]
    yield Finding("engine against trainer, one version", f"at most {gap} nats, of {compared} tokens")


def evaluated(context: Context, model: Path) -> Iterator[Finding]:
    """A few questions before training: ten steps take six minutes of two cores."""
    overrides = ["samples=4", "model.device=cpu", "launch.stop_timeout=30"]
    code = asyncrl(context, "eval", "eval", [str(model), *overrides])
    found = summary(context, "eval")
    if code or found.get("success_before") is None:
        yield failed(context, "eval", code)
        return
    yield Finding("4 questions, greedy", f"{found['greedy_before']:.0%}", note="CPU: it is not trained here")
    yield Finding("conserved", str(found["conserved"]), "True", bool(found["conserved"]))


def asyncrl(context: Context, command: str, name: str, arguments: list[str]) -> int:
    """Run the command; its output is the part's. Its exit code, or -9 where it does not end in time."""
    overrides = ["experiment=smollm2", f"name={name}", f"run_dir={context.work}", "observe.console=plain"]
    overrides += [f"data.{split}={context.work / 'model' / split}.jsonl" for split in ("train", "test")]
    line = [sys.executable, "-m", "asyncrl.cli", command, *arguments, *overrides]
    own = {"OMP_NUM_THREADS": "1" if context.small else "4", "TOKENIZERS_PARALLELISM": "false"}
    try:
        return subprocess.run(
            line, cwd=context.work, env=os.environ | own, timeout=max(1.0, context.left() - SPARE_S)
        ).returncode
    except subprocess.TimeoutExpired:
        return -9


def summary(context: Context, name: str) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        found: dict[str, Any] = json.loads((context.work / name / "summary.json").read_text())
        return found
    return {}


def failed(context: Context, name: str, code: int) -> Finding:
    """With the ends of its logs, and its last rows of metrics: how far it came."""
    run = context.work / name
    files = [*sorted((run / "logs").glob("*")), run / "metrics.jsonl"]
    ends = [f"{file.name}: {file.read_text(errors='replace')[-600:]}" for file in files if file.is_file()]
    why = summary(context, name).get("error", "no summary")
    return Finding(f"run {name}", f"ended with {code}: {why}", ok=False, note="\n".join(ends))
