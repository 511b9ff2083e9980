"""Whole runs of composite checkpoints: from demonstrations to a model that calls the calculator, and back to
files that transformers reads under the original class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from asyncrl import cli
from asyncrl.weights.checkpoint_match import trained_shapes
from tests.fakes.sglang_process import PYTHON
from tests.fakes.taught_families import build_taught_family, write_demonstrations
from tests.fakes.tiny_families import FAMILIES, VISION_PREFIXES
from tests.integration.runs import Run

GAP = 1e-4  # nats between the engine's log-probs and the trainer's, in float32
SFT_STEPS = {"mistral3": 20, "ministral3": 20, "qwen3_vl": 40, "gemma3": 60}
RL_STEPS = 10
SGLANG_KEYS = ("engine=sglang_cpu", "engine.servers=1", "launch.start_timeout=300")
needs_sglang = pytest.mark.skipif(not PYTHON.exists(), reason="needs `make sglang-cpu`")


@pytest.mark.slow
def test_a_composite_checkpoint_trains_and_keeps_what_does_not(tmp_path: Path) -> None:
    source = build_taught_family("mistral3", tmp_path / "model")
    with Run(tmp_path, f"model.path={source}", "total_steps=2", "data.test=''", "trainer.lr=1e-3") as run:
        summary = run.completed(2)
    assert_same_logprobs(summary)
    assert_text_part_alone_changed(source, run.path / "checkpoints/step-2/hf", "mistral3")


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("family", "engine_keys"),
    [
        ("mistral3", ()),
        ("ministral3", ()),
        ("qwen3_vl", ()),
        pytest.param("gemma3", SGLANG_KEYS, marks=needs_sglang),
    ],
)
def test_a_family_learns_the_calculator(family: str, engine_keys: tuple[str, ...], tmp_path: Path) -> None:
    source = build_taught_family(family, tmp_path / "model")
    warm = warm_start(family, source, tmp_path)

    keys = [f"model.path={warm}", f"total_steps={RL_STEPS}", "trainer.lr=2e-4", *engine_keys]
    keys += ["buffer.groups_per_batch=8", "buffer.episodes_per_group=8", "buffer.max_staleness=1"]
    keys += ["validation.samples=96", "validation.every=0", "validation.greedy=false"]
    with Run(tmp_path, *keys, name="rl") as run:
        summary = run.completed(RL_STEPS)
    assert_same_logprobs(summary)
    assert 0 < summary["success_before"] < summary["success_after"] - 0.05

    merged = tmp_path / "merged"
    assert cli.main(["merge", str(run.path), str(merged)]) == 0
    for exported in (warm, run.path / f"checkpoints/step-{RL_STEPS}/hf", merged):
        assert_text_part_alone_changed(source, exported, family)

    scoring = ["samples=64", "validation.greedy=false", *engine_keys]
    with Run(tmp_path, *scoring, name="scored", command=f"eval {merged}") as evaluation:
        assert evaluation.wait() == 0, f"{evaluation.text()}\n{evaluation.logs()}"
    scores = json.loads((evaluation.path / "evaluation.json").read_text())
    success = scores["val-core/all/sampled/mean@1"]["mean"]
    assert success > summary["success_before"]


def warm_start(family: str, source: Path, directory: Path) -> Path:
    """Train a checkpoint on demonstrations, and return the export."""
    steps = SFT_STEPS[family]
    data = write_demonstrations(directory / "demonstrations.jsonl", 32 * steps)
    keys = [f"model.path={source}", f"data.train={data}", "data.test=''", f"total_steps={steps}"]
    keys += ["trainer.lr=2e-3", "checkpoint.every=1000", "weights.every=1000", "buffer.max_staleness=1000"]
    keys += ["buffer.groups_per_batch=32", "buffer.episodes_per_group=1"]
    with Run(directory, *keys, name="warm", command="sft") as run:
        run.completed(steps)
    return run.path / f"checkpoints/step-{steps}/hf"


def assert_same_logprobs(summary: dict[str, Any]) -> None:
    assert summary["logprob_tokens_compared"] > 0 and summary["probe_tokens_compared"] >= 64
    assert summary["logprob_diff_max_same_version"] <= GAP
    assert summary["probe_logprob_diff_max"] <= GAP


def assert_text_part_alone_changed(source: Path, exported: Path, family: str) -> None:
    """Fails unless the files have the same names, other bits where a tensor trains and the same elsewhere,
    and transformers reads all of them under the class in config.json."""
    source_tensors = load_file(source / "model.safetensors")
    exported_tensors = load_file(exported / "model.safetensors")
    trained_names = set(trained_shapes(str(source)))
    assert exported_tensors.keys() == source_tensors.keys()
    for name, tensor in source_tensors.items():
        assert torch.equal(exported_tensors[name], tensor) == (name not in trained_names), name

    vision_names = {name for name in source_tensors if name.startswith(VISION_PREFIXES)}
    assert vision_names == source_tensors.keys() - trained_names
    assert bool(vision_names) == FAMILIES[family].composite

    config = json.loads((exported / "config.json").read_text())
    assert config == json.loads((source / "config.json").read_text())
    model_class = getattr(transformers, config["architectures"][0])
    _, report = model_class.from_pretrained(exported, output_loading_info=True)
    assert not any(report.values()), report
