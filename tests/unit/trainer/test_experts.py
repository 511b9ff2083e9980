"""Mixtures of experts: what transformers stacks in one tensor, others know expert by expert."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from asyncrl.config import ModelConfig, TrainerConfig, parse
from asyncrl.errors import ConfigError
from asyncrl.launch.memory import describe_coverage
from asyncrl.launch.models import resolve_models
from asyncrl.store.checkpoints import CheckpointManifest
from asyncrl.trainer.attention import FOREST_ATTENTION
from asyncrl.trainer.batch import sequence_routes
from asyncrl.trainer.forced_routes import ForcedRoutes
from asyncrl.trainer.loading import locate_tensors
from asyncrl.trainer.model import Policy, PublishedShards, load_critic, load_policy
from asyncrl.trainer.packing import packing_for
from asyncrl.trainer.scores import Selected
from asyncrl.trainer.world import World
from asyncrl.types import Generation, PolicyVersion, Routes, StopReason, Turn
from asyncrl.weights.adapters import Adapters
from asyncrl.weights.model_files import stored_tensors
from asyncrl.weights.shards import HostShards
from asyncrl.weights.trained_tensors import linear_shapes
from tests.fakes.models import save_small
from tests.fakes.ranks import run_ranks
from tests.fakes.traced import LiveBytes
from tests.fakes.training import (
    export,
    full_state,
    load_checkpoint,
    make_learner,
    save_checkpoint,
    tiny_config,
)
from tests.fakes.weights import buckets
from tests.unit.trainer.test_packing import distance, learned, make, rows, select

pytestmark = pytest.mark.slow

FAMILIES = ("Qwen3Moe", "Mixtral")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The families' models as `save_pretrained` writes them."""
    folder = tmp_path_factory.mktemp("experts")
    for family in FAMILIES:
        make(family).save_pretrained(folder / family)
    return folder


def gradients(policy: Policy, world: World) -> dict[str, Tensor]:
    """Of the rows of all ranks, which have different ones, as trees; each token has a weight of its own."""
    mine = rows()[world.rank :: world.size]
    tokens = replace(select(mine, "tree"), temperature=torch.ones(sum(map(len, mine)) - len(mine)))
    weights = torch.cat([torch.linspace(0.1, 1, len(row) - 1, dtype=torch.float64) for row in mine])
    (policy(tokens).logp * weights).sum().backward()
    named = policy.named_parameters()
    return {name: p.grad.full_tensor() * world.size for name, p in named if p.grad is not None}


def published(policy: Policy, world: World) -> dict[str, Tensor]:
    """What rank 0 collects of a version, in small buckets, from host memory."""
    host = HostShards(PublishedShards(policy), policy.published, torch.float32, 60.0)
    snapshot = host.copy_version(PolicyVersion(0, 1), PublishedShards(policy), lambda busy: [busy])
    found: dict[str, Tensor] = {}
    if world.rank == 0:
        found = {name: t.clone() for bucket in buckets(snapshot, 3000) for name, t in bucket.items()}
    world.gather(0, int)
    host.close(60.0)
    return found


def through_all(world: World, folder: Path) -> dict[str, Any]:
    """Each family loaded, differentiated, published, exported; with layers that are sharded one by one."""
    results = {}
    for family in FAMILIES:
        path = str(folder.parent / family)
        with patch("asyncrl.trainer.loading.LAYER_MIN_PARAMETERS", 0):
            exact = ModelConfig(path=path, dtype="float64")  # type: ignore[arg-type]
            policy = load_policy(exact, world, trainer=TrainerConfig(activation_checkpointing="full"))
            policy.lm.set_attn_implementation(FOREST_ATTENTION)
            found = {"gradients": gradients(policy, world)}
            # A forward that follows gathers parameters, as any does.
            with patch("asyncrl.trainer.model._decide_split"), LiveBytes() as counted:
                policy = load_policy(ModelConfig(path=path, dtype="float32"), world)
        found["published"] = published(policy, world)
        found["exported"] = export(folder / family, policy, world, path)
        shard = sum(p.to_local().nbytes for p in policy.parameters())
        results[family] = found | {"peak": counted.peak, "shard": shard}
    return results


@pytest.fixture(scope="module")
def one(world: World, saved: Path) -> dict[str, Any]:
    return through_all(world, saved / "one")


@pytest.fixture(scope="module")
def two(saved: Path) -> dict[str, Any]:
    return run_ranks(2, through_all, saved / "two")


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_have_the_gradients_of_one(family: str, one: dict[str, Any], two: dict[str, Any]) -> None:
    family_gradients = two[family]["gradients"]
    wanted = one[family]["gradients"]
    assert sum("experts" in name for name in wanted) == 6, "stacks of three layers"
    assert all(gradient.any() for name, gradient in wanted.items() if "experts" in name or "gate" in name)
    assert (
        distance(family_gradients, wanted) < 1e-6
    )  # norms and routers compute in float32, whatever the dtype


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ranks", ["one", "two"])
def test_others_get_what_save_pretrained_writes(
    family: str, ranks: str, saved: Path, request: pytest.FixtureRequest
) -> None:
    wanted = load_file(saved / family / "model.safetensors")
    rank_result = request.getfixturevalue(ranks)[family]
    assert any(".experts.3." in name for name in wanted)
    for what in (rank_result["published"], load_file(Path(rank_result["exported"]) / "model.safetensors")):
        assert what.keys() == wanted.keys()
        assert all(torch.equal(what[name], tensor) for name, tensor in wanted.items())
    read, plain = (
        AutoModelForCausalLM.from_pretrained(path) for path in (rank_result["exported"], saved / family)
    )
    assert all(map(torch.equal, read.parameters(), plain.parameters()))


@pytest.mark.parametrize("family", FAMILIES)
def test_each_rank_reads_the_experts_that_it_holds(family: str, two: dict[str, Any]) -> None:
    shard = two[family]["shard"]
    peak = two[family]["peak"]
    assert shard <= peak < 1.2 * shard, "its part of the model, and one piece of a file after another"


def test_stacks_in_the_files_are_read_in_slices_too(world: World, saved: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(saved / "Mixtral")
    model.save_pretrained(tmp_path, save_original_format=False)
    assert locate_tensors(model, str(tmp_path), stored_tensors(str(tmp_path)))
    weights = full_state(load_policy(ModelConfig(path=str(tmp_path), dtype="float32"), world))
    assert all(torch.equal(weights[name], p) for name, p in model.named_parameters())


def test_a_conversion_that_is_not_known_is_left_to_transformers(
    world: World, saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(saved / "Mixtral")
    plain = AutoModelForCausalLM.from_pretrained(path)
    unknown = {"SplitModulelist": tuple, "MergeModulelist": tuple}
    with patch.multiple("asyncrl.weights.names", **unknown):
        policy = load_policy(ModelConfig(path=path, dtype="float32"), world)
    assert "rank 0 reads all" in caplog.text

    with patch("asyncrl.trainer.export.FILE_BYTES", 6000):
        exported = export(tmp_path, policy, world, path)
    exported_files = sorted(Path(exported).glob("model-*-of-*.safetensors"))
    exported_names = [name for file in exported_files for name in load_file(file)]
    assert len(exported_files) > 1 and "model.layers.0.mlp.experts.down_proj" in exported_names
    read = AutoModelForCausalLM.from_pretrained(exported)
    assert all(map(torch.equal, read.parameters(), plain.parameters()))


def test_a_critic_reads_them_under_a_backbones_names(world: World, saved: Path) -> None:
    for family in FAMILIES:
        config = tiny_config(str(saved / family))
        critic = load_critic(config, world)
        plain = dict(AutoModelForCausalLM.from_pretrained(saved / family).model.named_parameters())
        full_parameters = {
            n: p.full_tensor() for n, p in critic.backbone.named_parameters() if "value_head" not in n
        }
        assert full_parameters.keys() == plain.keys()
        assert all(torch.equal(full_parameters[name], p) for name, p in plain.items())


def test_in_bfloat16_they_are_trained_too(world: World, saved: Path) -> None:
    for family in FAMILIES:
        policy = load_policy(ModelConfig(path=str(saved / family), dtype="bfloat16"), world)
        assert packing_for([policy], "tree", "bfloat16", world) == "tree"
        computed_gradients = gradients(policy, world)
        assert all(gradient.isfinite().all() for gradient in computed_gradients.values())
        assert all(computed_gradients[name].any() for name in computed_gradients if "experts" in name)


def test_a_checkpoint_goes_on(world: World, saved: Path, tmp_path: Path) -> None:
    config = tiny_config(str(saved / "Qwen3Moe"))
    learner, other = (make_learner(config, world, "float32") for _ in range(2))
    with torch.no_grad():
        for parameter in learner.policy.parameters():
            parameter.mul_(1.5)
    save_checkpoint(tmp_path, learner, CheckpointManifest(step=0, trainer_epoch=0, parent=-1, trained=()))
    load_checkpoint(tmp_path / "step-0", other)
    wanted = full_state(learner.policy)
    weights = full_state(other.policy)
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "step-0" / "hf")
    assert all(torch.equal(p, wanted[name]) for name, p in exported.named_parameters())


def test_the_plan_says_that_adapters_leave_experts_out(saved: Path) -> None:
    model = {"path": str(saved / "Qwen3Moe"), "lora_rank": 2}
    config = resolve_models(parse({"name": "x", "data": {"train": "d"}, "model": model}))
    adapted, left = describe_coverage(config).split("; not adapted: ")
    assert "3 x self_attn.q_proj (" in adapted and "experts" not in adapted
    assert "3 x mlp.gate (" in left and "1 x model.embed_tokens (" in left and "x experts." in left


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("Qwen2Moe", {"num_experts": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}),
        ("DeepseekV3", {"first_k_dense_replace": 1, "n_routed_experts": 8, "moe_intermediate_size": 8}),
    ],
)
def test_the_plan_knows_what_adapters_adapt_beside_experts(
    tmp_path: Path, family: str, sizes: dict[str, int]
) -> None:
    """Shared experts are linear layers."""
    path = save_small(tmp_path, family, **sizes)
    adapters = Adapters(AutoModelForCausalLM.from_pretrained(path), {"": (2, 4.0)})
    shapes_by_name = linear_shapes(path)
    assert {name.removesuffix(".weight") for name in shapes_by_name} == set(adapters.specs[""].layers)
    assert any("shared_expert" in name for name in shapes_by_name)


def replaying(path: Path, world: World, every: Any = "none") -> Policy:
    trainer = TrainerConfig(router_replay=True, activation_checkpointing=every)
    exact = ModelConfig(path=str(path), dtype="float64")  # type: ignore[arg-type]
    policy = load_policy(exact, world, trainer=trainer)
    policy.lm.set_attn_implementation(FOREST_ATTENTION)
    return policy


def chosen(policy: Policy, given: list[np.ndarray]) -> list[np.ndarray]:
    """What the policy's own routers choose for all tokens of each row but the last."""
    seen: list[Tensor] = []
    hooks = [
        module.register_forward_hook(lambda module, args, output: seen.append(output[2]))
        for module in policy.lm.modules()
        if type(module).__name__.endswith("TopKRouter")
    ]
    found = []
    for row in given:
        seen.clear()
        with torch.no_grad():
            policy(select([row], "packed"))
        found.append(torch.stack(seen, 1).flatten(1).numpy().astype(np.int32)[:-1])
    for hook in hooks:
        hook.remove()
    return found


def routed(given: list[np.ndarray], how: Any, routes: list[np.ndarray]) -> Selected:
    row = np.repeat(np.arange(len(given)), [len(one) - 1 for one in given])
    position = np.concatenate([np.arange(1, len(one)) for one in given])
    return Selected.lay_out(given, row, position, torch.ones(len(row), dtype=torch.float64), how, routes)


def shifted(routes: np.ndarray) -> np.ndarray:
    """Other experts than these."""
    return (routes + 1) % 4


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_go_where_the_server_sent_them(family: str, world: World, saved: Path) -> None:
    """Whatever the layout: by the routers' own choice nothing changes, by another one everything is as in a
    model whose routers choose so; and what they choose has gradients, recomputed or not."""
    policy = replaying(saved / family, world)
    given = rows()
    own = chosen(policy, given)
    plain, _ = learned(policy, [routed(given, "packed", [])])
    logp, wanted = learned(policy, [routed(given, "packed", [shifted(one) for one in own])])
    assert not torch.allclose(logp, plain, atol=0.1)
    for how in ("padded", "packed", "tree"):
        policy.lm.set_attn_implementation("eager" if how == "padded" else FOREST_ATTENTION)
        same, _ = learned(policy, [routed(given, how, own)])
        assert torch.allclose(same, plain, atol=1e-5)
        scored_logprobs, gradients = learned(policy, [routed(given, how, [shifted(one) for one in own])])
        assert torch.allclose(scored_logprobs, logp, atol=1e-5)
        assert distance(gradients, wanted) < 1e-5
    again = replaying(saved / family, world, "full")
    scored_logprobs, gradients = learned(again, [routed(given, "tree", [shifted(one) for one in own])])
    assert torch.allclose(scored_logprobs, logp, atol=1e-5) and distance(gradients, wanted) < 1e-5
    assert all(gradients[name].any() for name in gradients if "mlp.gate" in name)


def test_the_others_go_as_the_trainer_chooses(world: World, saved: Path) -> None:
    policy = replaying(saved / "Mixtral", world)
    given = rows()[3:5]
    own = chosen(policy, given)
    logp, _ = learned(policy, [routed(given, "packed", [])])
    short = own[0][:20]
    none = np.empty((0, 0), dtype=np.int32)
    scored_logprobs, _ = learned(policy, [routed(given, "packed", [short, none])])
    assert torch.allclose(scored_logprobs, logp, atol=1e-5)
    short = np.concatenate([np.full_like(short, -1)[:5], shifted(short[5:])])
    scored_logprobs, _ = learned(policy, [routed(given, "packed", [short, none])])
    assert torch.allclose(scored_logprobs[:5], logp[:5], atol=1e-5) and not torch.allclose(
        scored_logprobs[5:20], logp[5:20], atol=0.1
    )
    assert torch.allclose(scored_logprobs[len(given[0]) - 1 :], logp[len(given[0]) - 1 :], atol=1e-5)


def test_experts_that_the_model_does_not_have_are_not_chosen(world: World, saved: Path) -> None:
    policy = replaying(saved / "Mixtral", world)
    given = rows()[4:5]
    logp, _ = learned(policy, [routed(given, "packed", [])])
    scored_logprobs, _ = learned(policy, [routed(given, "packed", [np.full((10, 6), 99, dtype=np.int32)])])
    assert policy.forced_routes is not None and policy.forced_routes.choices_per_token == 6
    assert torch.allclose(scored_logprobs, logp, atol=1e-5)


def test_a_model_without_routers_is_refused() -> None:
    with pytest.raises(ConfigError, match="router_replay: LlamaForCausalLM"):
        ForcedRoutes(make("Llama"))


def turn(index: int, context: int, count: int, routes: Routes | None, row: int = 0) -> Turn:
    return Turn(
        index, (1,) * context, Generation((2,) * count, (), (), StopReason.STOP, routes=routes), row=row
    )


def test_turns_tell_of_what_no_turn_before_reported() -> None:
    """Two rows; the second turn's worker knew the first one's routes, the third one's did not; the fifth's
    server was lost before it told."""

    def routes_from(start: int, *experts: int) -> Routes:
        return Routes(start, len(experts), np.array(experts, "<u2").tobytes())

    turns = [
        turn(0, 2, 2, routes_from(0, 10, 11, 12)),
        turn(1, 1, 1, routes_from(3, 13, 14)),
        turn(2, 1, 2, routes_from(0, 0, 0, 0, 0, 0, 15, 16, 17)),
        turn(3, 2, 1, routes_from(0, 20, 21), row=1),
        turn(4, 1, 2, None, row=1),
        turn(5, 1, 1, routes_from(5, 25, 26), row=1),
    ]
    first, second, third = sequence_routes(turns, [9, 8, 4], 1)
    assert first[:, 0].tolist() == [10, 11, 12, 13, 14, 15, 16, 17]
    assert second[:, 0].tolist() == [20, 21, -1, -1, -1, 25, 26]
    assert not len(third)
    (wrong,) = sequence_routes([turn(0, 2, 2, routes_from(1 << 60, 1, 2, 3))], [4], 1)
    assert wrong[:, 0].tolist() == [-1] * 4, "what is beyond the row is no route"
    assert not len(sequence_routes([turn(0, 2, 2, routes_from(0, 1, 2))], [4], 2)[0]), (
        "of a model with other layers"
    )
