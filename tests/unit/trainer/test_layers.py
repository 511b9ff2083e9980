"""Activation checkpointing and compilation change memory and time, and nothing else."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, PreTrainedModel

from asyncrl.config import TrainerConfig
from asyncrl.errors import ConfigError
from asyncrl.trainer.attention import FOREST_ATTENTION
from asyncrl.trainer.layers import layers_of, prepare_layers
from asyncrl.trainer.learner import Learner
from asyncrl.trainer.recompute import Recomputation
from asyncrl.trainer.scores import Selected
from asyncrl.trainer.world import World
from tests.fakes.models import small_model
from tests.fakes.ranks import run_ranks
from tests.fakes.training import (
    Recorder,
    difference,
    final_gradients,
    make_learner,
    plain_model,
    random_cut,
    run_batch,
    save_tiny_qwen,
    tiny_config,
)

pytestmark = pytest.mark.slow

CRITIC: dict[str, Any] = {"algorithm": {"advantage": "gae"}, "buffer": {"filter_zero_variance": False}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_qwen(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def episodes(model: str) -> Any:
    return Recorder(plain_model(model), noise=0.2).groups(3, 3, [0])


def calls_of(layers: list[nn.Module], name: str) -> Counter[int]:
    """How often the submodule `name` of each layer runs from here on."""
    calls = Counter[int]()
    for index, layer in enumerate(layers):
        layer.get_submodule(name).register_forward_pre_hook(lambda *_, index=index: calls.update([index]))
    return calls


def of_four_layers(model: str) -> PreTrainedModel:
    config = AutoModelForCausalLM.from_pretrained(model).config
    config.num_hidden_layers = 4
    config.layer_types = ["full_attention"] * 4
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize(("given", "runs"), [("none", [1, 1, 1, 1]), ("full", [2] * 4), (3, [2, 1, 1, 2])])
def test_every_kth_layer_is_computed_again(model: str, given: Any, runs: list[int]) -> None:
    lm = of_four_layers(model)
    names = list(lm.state_dict())
    prepare_layers(lm, TrainerConfig(activation_checkpointing=given))
    calls = calls_of(layers_of(lm), "mlp")
    lm(input_ids=torch.arange(5)[None], use_cache=False).logits.sum().backward()
    assert [calls[i] for i in range(4)] == runs
    assert list(lm.state_dict()) == names


def test_how_much_is_computed_again_changes_between_micro_batches(model: str) -> None:
    """As after a rank ran out of memory under `auto`, which begins on a CPU with nothing."""
    lm = of_four_layers(model)
    recomputation = Recomputation(TrainerConfig())
    prepare_layers(lm, TrainerConfig(), recomputation)
    calls = calls_of(layers_of(lm), "mlp")
    gradients = list[Tensor]()
    for every, share, then, runs in (
        (0, 0.0, 2, [1, 1, 1, 1]),
        (3, 0.5, 2, [2, 1, 1, 2]),
        (2, 0.5, 1, [2, 1, 2, 1]),
        (1, 1.0, 0, [2, 2, 2, 2]),
        (4, 1.0, 0, [2, 2, 2, 2]),  # never less than before
    ):
        recomputation.recompute_at_least(every)
        calls.clear()
        lm.zero_grad()
        lm(input_ids=torch.arange(5)[None], use_cache=False).logits.sin().sum().backward()
        assert [calls[i] for i in range(4)] == runs
        assert (recomputation.recomputed_fraction, recomputation.next_every) == (share, then)
        gradients.append(torch.cat([p.grad.flatten() for p in lm.parameters() if p.grad is not None]))
    assert all(torch.equal(gradients[0], other) for other in gradients[1:])


@pytest.mark.parametrize(
    ("others", "every"), [([0], 0), ([0, 2], 2), ([8, 3], 3), ([4, 1], 1), (ConfigError("unknown sizes"), 1)]
)
def test_ranks_on_gpus_compute_as_much_again_as_the_one_that_needs_most(
    model: str, monkeypatch: pytest.MonkeyPatch, others: Any, every: int
) -> None:
    properties = SimpleNamespace(total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    least = mock.Mock(side_effect=[others] if isinstance(others, Exception) else others)
    monkeypatch.setattr("asyncrl.trainer.learner.least_recomputation", least)
    gathered = [] if isinstance(others, Exception) else others[1:]
    world = SimpleNamespace(device=torch.device("cuda", 1), gather=lambda own, kind: [own, *gathered])
    rank: Any = SimpleNamespace(config=tiny_config(model), world=world)
    assert Learner._choose_recomputation(rank).every == every
    least.assert_called_once_with(rank.config, 80 * 2**30, 1, 2, 0)


@pytest.mark.parametrize(("given", "share"), [("none", 0.0), ("full", 1.0), (2, 0.5)])
def test_what_the_configuration_chose_stays(model: str, given: Any, share: float) -> None:
    trainer = TrainerConfig(activation_checkpointing=given)
    recomputation = Recomputation(trainer)
    prepare_layers(AutoModelForCausalLM.from_pretrained(model), trainer, recomputation)
    recomputation.recompute_at_least(1)
    assert (recomputation.recomputed_fraction, recomputation.next_every) == (share, 0)


def gradients(world: World, path: str, episodes: Any, memory: Any, **sections: Any) -> dict[str, Tensor]:
    config = tiny_config(path, trainer={"activation_checkpointing": memory}, **sections)
    learner = make_learner(config, world)
    for name, parameter in learner.policy.named_parameters():
        if name.endswith(("lora_a", "lora_b")):  # random, and zero
            nn.init.constant_(parameter, 0.1)
    return final_gradients(learner, random_cut(episodes, world.size, 3, seed=0))


@pytest.mark.parametrize("sections", [{"model": {"lora_rank": 2}}, CRITIC], ids=["lora", "all, and a critic"])
def test_gradients_are_the_same(world: World, model: str, episodes: Any, sections: Any) -> None:
    def of(memory: Any) -> dict[str, Tensor]:
        return gradients(world, model, episodes, memory, **sections)

    assert difference(of("full"), of("none")) < 1e-12


def work(world: World, folder: Path) -> Any:
    """With adapters, in layers of their own."""
    path, episodes = torch.load(folder.parent / "recorded.pt", weights_only=False)
    with mock.patch("asyncrl.trainer.loading.LAYER_MIN_PARAMETERS", 0):
        return gradients(world, path, episodes, 2, model={"lora_rank": 2})


@pytest.mark.long
def test_two_ranks_give_the_gradients_of_one(world: World, model: str, episodes: Any, tmp_path: Path) -> None:
    torch.save((model, episodes), tmp_path / "recorded.pt")
    wanted = gradients(world, model, episodes, "none", model={"lora_rank": 2})
    assert difference(run_ranks(2, work, tmp_path / "two"), wanted) < 1e-12


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("backend", "gap"), [("aot_eager", 1e-12), ("inductor", 1e-6)])
def test_compiled_layers_give_the_same_and_are_compiled_once(
    world: World, model: str, episodes: Any, backend: str, gap: float
) -> None:
    """For all layers and lengths together, with and without gradient. The norms compute in float32, where
    inductor rounds in another order."""
    counters.clear()
    torch.compiler.reset()
    config = tiny_config(model, trainer={"compile": True, "activation_checkpointing": 2})
    with (
        mock.patch("asyncrl.trainer.loading.LAYER_MIN_PARAMETERS", 0),
        mock.patch.object(torch, "compile", partial(torch.compile, backend=backend)),
    ):
        learner = make_learner(config, world)
    computed_gradients = final_gradients(learner, random_cut(episodes, 1, 3, seed=0))
    graphs = counters["stats"]["unique_graphs"]
    assert 0 < graphs <= 12
    metrics = run_batch(learner, random_cut(episodes, 1, 4, seed=1))
    assert counters["stats"]["unique_graphs"] == graphs == metrics["perf/compiled_graphs"]
    assert difference(computed_gradients, gradients(world, model, episodes, "none")) < gap


def test_packed_rows_of_any_number_are_compiled_once(model: str) -> None:
    """torch 2.11 looked into a frozen forest, and compiled again for each number of rows."""
    torch.compiler.reset()
    lm = AutoModelForCausalLM.from_pretrained(model).eval()
    lm.set_attn_implementation(FOREST_ATTENTION)
    with mock.patch.object(torch, "compile", partial(torch.compile, backend="eager")):
        prepare_layers(lm, TrainerConfig(compile=True))
    graphs = []
    one = np.zeros(1, dtype=np.int64)
    for lengths in ([9, 8], [30], [5, 6, 7, 4, 12]):
        rows = [np.arange(length) for length in lengths]
        chosen = Selected.lay_out(rows, one, one + 1, torch.ones(1), "packed")
        lm(**chosen.inputs).logits.sum().backward()
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [graphs[0]] * 3


def test_a_missing_compiler_is_reported(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    lm = AutoModelForCausalLM.from_pretrained(model)
    with pytest.raises(ConfigError, match=r"trainer\.compile: .*no-such-compiler"):
        prepare_layers(lm, TrainerConfig(compile=True))


def test_a_model_that_names_no_layers_is_refused() -> None:
    model = small_model("Llama")
    model._no_split_modules = None
    for keys in ({"activation_checkpointing": "full"}, {"compile": True}):
        with pytest.raises(ConfigError, match=f"trainer.{next(iter(keys))}"):
            prepare_layers(model, TrainerConfig(**keys))
