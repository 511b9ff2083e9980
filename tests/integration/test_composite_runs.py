"""Whole runs of composite checkpoints: from demonstrations to a model that calls the calculator, and back to
files that transformers reads under the original class."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
import transformers
from safetensors.torch import load_file

from asyncrl import cli
from asyncrl.weights.checkpoint_match import trained_shapes
from tests.fakes.plain_loop import plain_loop
from tests.fakes.sglang_process import PYTHON
from tests.fakes.taught_families import build_taught_family, write_demonstrations
from tests.fakes.tiny_families import FAMILIES, VISION_PREFIXES
from tests.integration.runs import Run, once

GAP = 1e-4  # nats between the engine's log-probs and the trainer's, in float32
SFT_STEPS = {"mistral3": 20, "ministral3": 20, "qwen3_vl": 40, "gemma3": 60, "qwen3_5": 60}
RL_STEPS = 10
SGLANG_KEYS = ("engine=sglang_cpu", "engine.servers=1", "launch.start_timeout=300")
needs_sglang = pytest.mark.skipif(not PYTHON.exists(), reason="needs `make sglang-cpu`")


WarmCheckpoints = Callable[[str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def warm_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> WarmCheckpoints:
    """Returns a family's taught checkpoint, and the checkpoint that demonstrations make of it."""

    @functools.cache
    def checkpoints_of(family: str) -> tuple[Path, Path]:
        directory = tmp_path_factory.mktemp(family)
        source = build_taught_family(family, directory / "model")
        return source, warm_start(family, source, directory)

    return checkpoints_of


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
        ("qwen3_5", ()),
        pytest.param("gemma3", SGLANG_KEYS, marks=needs_sglang),
    ],
)
def test_a_family_learns_the_calculator(
    family: str, engine_keys: tuple[str, ...], warm_checkpoints: WarmCheckpoints, tmp_path: Path
) -> None:
    source, warm = warm_checkpoints(family)
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


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_killed_worker_costs_a_model_with_states_nothing(
    warm_checkpoints: WarmCheckpoints, tmp_path: Path
) -> None:
    """Parts of turns are stored while they are sampled, and go on in another process, whose log-probs are
    still those of the trainer."""
    _, warm = warm_checkpoints("qwen3_5")
    keys = [f"model.path={warm}", "total_steps=4", "data.test=''", "rollout.part_seconds=0.05"]
    keys += ["buffer.groups_per_batch=4", "buffer.episodes_per_group=4"]
    with Run(tmp_path, *keys) as run:
        for step in (1, 2):
            run.until_step(step)
            run.kill("rollout-0")
        summary = run.completed(4)
    assert_same_logprobs(summary)
    once(run.path, 4)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_demonstrations_teach_layers_of_the_gated_delta_rule(warm_checkpoints: WarmCheckpoints) -> None:
    """Random layers of a taught checkpoint learn with the others: without them the skill is lost."""
    source, warm = warm_checkpoints("qwen3_5")
    model = transformers.AutoModelForImageTextToText.from_pretrained(warm, dtype=torch.float32)
    success = plain_success(model)
    for name, parameter in model.named_parameters():
        if name.endswith("linear_attn.out_proj.weight"):
            parameter.data.zero_()

    assert plain_success(transformers.AutoModelForImageTextToText.from_pretrained(source)) < 0.05
    assert 0.15 < success < 0.6
    assert plain_success(model) < success / 2


def plain_success(model: Any) -> float:
    """Return the success of sampled episodes that transformers' own `generate` writes."""
    loop = plain_loop()
    questions = pyarrow.parquet.read_table(loop.CALCULATOR / "data/test.parquet").to_pylist()[:96]
    tokenizer = transformers.AutoTokenizer.from_pretrained(loop.CALCULATOR / "model")
    torch.manual_seed(0)
    episodes = loop.play(model, tokenizer, questions)
    return sum(episode.reward for episode in episodes) / len(episodes)


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
