"""What the dry run says of model, disk, learning rate and threads."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncrl.config import RunConfig, parse
from asyncrl.launch import estimates, memory
from asyncrl.launch.estimates import (
    checkpoint_bytes,
    cost_warnings,
    cpu_speed,
    describe_costs,
    describe_time,
    describe_work,
    learning_rates,
)
from asyncrl.launch.memory import describe_memory
from asyncrl.launch.placement import describe_plan, plan_units
from asyncrl.observe.metrics import duration_text
from asyncrl.runtime.process import MainMemory
from asyncrl.trainer.footprint import (
    Footprint,
    footprint,
    least_recomputation,
    static_bytes,
)
from asyncrl.weights.snapshot import Buffers
from asyncrl.weights.trained_tensors import parameter_count
from tests.fakes.checked import write_header

CRITIC: dict[str, Any] = {"algorithm": {"advantage": "gae"}, "buffer": {"filter_zero_variance": False}}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """100,000,001 parameters in two files, and the publisher's own copy of them."""
    matrix = {"a.weight": [1000, 50_000]}
    write_header(tmp_path / "model-1.safetensors", **matrix)
    write_header(tmp_path / "model-2.safetensors", b=[50_000_000], scalar=[])
    write_header(tmp_path / "consolidated.safetensors", **matrix, b=[50_000_000], scalar=[])
    index = {"a.weight": "model-1.safetensors", "b": "model-2.safetensors", "scalar": "model-2.safetensors"}
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return tmp_path


def config(at: Path, **keys: Any) -> RunConfig:
    given = {"name": "x", "run_dir": str(at / "runs"), "data": {"train": "t"}, "trainer": {"lr": 2e-5}}
    return parse(given | {"model": {"path": str(at), **keys.pop("model", {})}} | keys)


def test_parameters_are_those_of_all_files(model: Path) -> None:
    assert parameter_count(str(model)) == 100_000_001  # a scalar is one


def write_8b(folder: Path) -> None:
    """The shapes of Qwen3-8B, 8.19e9 parameters, in a file without numbers."""
    layer = {
        "self_attn.q_proj": [4096, 4096],
        "self_attn.k_proj": [1024, 4096],
        "self_attn.v_proj": [1024, 4096],
        "self_attn.o_proj": [4096, 4096],
        "mlp.gate_proj": [12288, 4096],
        "mlp.up_proj": [12288, 4096],
        "mlp.down_proj": [4096, 12288],
    }
    shapes = {"model.embed_tokens.weight": [151936, 4096], "lm_head.weight": [151936, 4096]}
    for index in range(36):
        shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    write_header(folder / "model.safetensors", **shapes)
    (folder / "config.json").write_text(json.dumps({"hidden_size": 4096, "vocab_size": 151936}))


@pytest.mark.parametrize(
    ("keys", "static"),
    [
        ({"lora_rank": 32}, 17.8),  # 2 bytes of each parameter, 16 of each of the adapters' 87.3M
        ({"lora_rank": 32, "dtype": "float32"}, 34.2),
    ],
)
def test_adapters_of_8b_parameters(tmp_path: Path, keys: dict[str, Any], static: float) -> None:
    write_8b(tmp_path)
    assert footprint(config(tmp_path, model=keys)).static / 1e9 == pytest.approx(static, abs=0.05)


@pytest.mark.parametrize(
    ("keys", "gigabytes", "every"),
    [
        ({}, 141, 0),
        ({}, 118, 8),
        ({}, 110, 4),
        ({}, 100, 3),
        ({}, 86, 2),
        ({}, 80, 1),
        ({}, 24, 1),  # nothing less fits, nor does this
        ({"trainer": {"offload_optimizer": True}}, 80, 3),  # weights rest in main memory
        ({"trainer": {"ranks": 2}}, 80, 2),
        ({"engine": {"name": "sglang"}}, 86, 1),  # the server shares the only GPU
        ({"engine": {"name": "sglang", "server_args": {"mem-fraction-static": 0.4}}}, 141, 2),
        ({"engine": {"name": "sglang"}, "launch": {"kind": "ray"}}, 86, 2),  # Ray has others for it
        ({"engine": {"name": "sglang", "colocated": 1}}, 86, 2),  # they take turns
        ({"engine": {"name": "sglang", "urls": ["http://a:1"]}}, 86, 2),
    ],
)
def test_as_few_layers_are_computed_again_as_fit(
    tmp_path: Path, keys: dict[str, Any], gigabytes: int, every: int
) -> None:
    """LoRA for 8B parameters: estimated at 112 GB without recomputation, 73 with half, 33 with all of it."""
    write_8b(tmp_path)
    trainer = {"lr": 2e-5, "micro_batch_tokens": 16_384} | keys.get("trainer", {})
    rollout = {"max_tokens": 16_384, "max_new_tokens": 1024}
    model = {"lora_rank": 32, "dtype": "bfloat16"}
    settings = config(tmp_path, **keys | {"model": model, "rollout": rollout, "trainer": trainer})
    assert least_recomputation(settings, gigabytes * 10**9, gpu=0, gpus=1) == every


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each GPU that torch sees."""
    sizes = [80 * 2**30, 80 * 2**30]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(sizes))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda gpu: SimpleNamespace(total_memory=sizes[gpu])
    )
    return sizes


def lora_8b(folder: Path, **trainer: Any) -> RunConfig:
    write_8b(folder)
    model = {"lora_rank": 32, "dtype": "bfloat16"}
    rollout = {"max_tokens": 16_384, "max_new_tokens": 1024}
    return config(folder, model=model, rollout=rollout, trainer={"micro_batch_tokens": 16_384} | trainer)


def test_the_dry_run_says_how_much_is_computed_again(tmp_path: Path, gpus: list[int]) -> None:
    memory_line, recomputation, *_ = describe_memory(lora_8b(tmp_path), has_gpu=True)
    assert "1 layer in 2 is recomputed" in recomputation.text and "77.3 GB" in recomputation.text
    assert "73.0 GB in total" in memory_line.text and recomputation.level == "ok"

    stated = lora_8b(tmp_path, activation_checkpointing="none")
    texts = [note.text for note in describe_memory(stated, has_gpu=True)]
    assert not any("recomputed" in text for text in texts)
    assert any("trainer.activation_checkpointing=full" in text for text in texts), "it does not fit"


def test_the_dry_run_looks_at_the_gpus_of_all_ranks(tmp_path: Path, gpus: list[int]) -> None:
    gpus[:] = [141 * 10**9, 100 * 10**9]
    alone = [note.text for note in describe_memory(lora_8b(tmp_path), has_gpu=True)]
    both = [note.text for note in describe_memory(lora_8b(tmp_path, ranks=2), has_gpu=True)]
    assert any("no layers are recomputed" in text for text in alone)
    assert any("1 layer in 4 is recomputed" in text for text in both)


def test_the_dry_run_warns_where_not_even_recomputation_makes_room(tmp_path: Path, gpus: list[int]) -> None:
    gpus[:] = [24 * 10**9]
    notes = [
        note for note in describe_memory(lora_8b(tmp_path), has_gpu=True) if "recomputation" in note.text
    ]
    assert [note.level for note in notes] == ["warning"]
    assert (
        "a rank still needs 33.2 GB and has only 21.6 GB; set a smaller trainer.micro_batch_tokens"
        in notes[0].text
    )
    assert "activation_checkpointing" not in notes[0].text


@pytest.fixture(autouse=True)
def bfloat16(monkeypatch: pytest.MonkeyPatch) -> dict[bool | None, bool]:
    """By a GPU's being there, whether it or the CPU has instructions for bfloat16."""
    has = {False: True, True: True, None: True}
    monkeypatch.setattr(estimates, "multiplies_bfloat16", lambda gpu=False: has[gpu])
    return has


@pytest.mark.parametrize("gpu", [False, True])
def test_advice_on_the_type_is_what_the_machine_multiplies(
    model: Path, bfloat16: dict[bool | None, bool], gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU without such instructions, advised to use bfloat16, took no step in ten minutes with it."""
    single = config(model, model={"dtype": "float32"})
    assert not list(cost_warnings(config(model), gpu)) and not list(cost_warnings(single, gpu))
    monkeypatch.setattr(estimates, "cpu_speed", lambda dtype, rows: 1e11 * (1 + 2 * (dtype == "bfloat16")))
    assert ("bfloat16 would be 3.0 times as fast" in describe_costs(single, gpu)[0]) == (not gpu)
    bfloat16[gpu] = False
    monkeypatch.setattr(estimates, "cpu_speed", lambda dtype, rows: 1e11 / (1 + 5 * (dtype == "bfloat16")))
    (line,) = cost_warnings(config(model), gpu)
    assert (
        "model.dtype=bfloat16 is many times slower than float32" in line and "set model.dtype=float" in line
    )
    assert "multiplies" not in describe_costs(single, gpu)[0] and not list(cost_warnings(single, gpu))
    bfloat16[False] = False  # with a GPU that is left aside, the CPU counts
    assert len(list(cost_warnings(config(model, model={"device": "cpu"}), gpu))) == 1


def test_what_the_keys_together_mean_is_said(model: Path) -> None:
    critic = {"critic": {"warmup_steps": 5}, "validation": {"samples": 256, "every": 10}, **CRITIC}
    trainer = {"lr": 2e-5, "warmup_steps": 3}
    more = config(model, **critic, trainer=trainer, data={"train": "t", "epochs": 1})
    text = "\n".join(describe_work(more, train_count=640, test_count=1319, prompt_tokens=77))
    for said in (
        "640 samples, 32 per step: 5 passes in 100 steps",
        "data.epochs=1 stops the run early, at step 20",
        "1024 for each turn (rollout.max_new_tokens); the first prompt has ",
        "256 of 1,319 held-out samples (validation.samples), 1 x sampled and greedy, every 10 steps",
        "learning rate: 3 steps (trainer.warmup_steps)",
        "before the policy trains: 5 steps (critic.warmup_steps)",
    ):
        assert said in text
    plain = "\n".join(describe_work(config(model), train_count=640, test_count=0, prompt_tokens=1))
    assert not {"epochs", "validation", "warm"} & set(re.findall(r"\w+", plain))


def test_the_time_of_a_run_follows_from_what_the_cpu_multiplies(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 groups of 8 with 100 tokens of prompt and 300 more: 4·100 + 32·300 = 10,000 tokens a step, of 2·10^8
    operations forward. At 10^11 a second, in trainer and engine: 60 s (and 20 s recomputed), 20 s."""
    monkeypatch.setattr(estimates, "cpu_speed", lambda dtype, rows: 1e11)
    more: dict[str, Any] = {
        "buffer": {"groups_per_batch": 4},
        "rollout": {"max_tokens": 400, "max_new_tokens": 9},
    }
    more |= {"total_steps": 3, "validation": {"samples": 16}}
    (line,) = describe_time(config(model, **more), 100, 100)
    assert (
        "about 3.7 minutes: per step, 60 s of training and 20 s of sampling in parallel" in line
    )  # 3·60 + 2·20
    recomputed = {"lr": 1e-5, "activation_checkpointing": "full"}
    assert "80 s of training" in next(describe_time(config(model, **more, trainer=recomputed), 0, 100))
    assert not list(describe_time(config(model, engine={"name": "sglang"}), 0, 100))


def test_the_speed_of_products_is_measured() -> None:
    assert 1e7 < cpu_speed("float32", 16) < 1e14


@pytest.mark.parametrize(
    ("keys", "bytes_each"),
    [
        ({}, 4 + 8 + 2),
        ({"model": {"dtype": "float32"}}, 4 + 8 + 4),
        ({"model": {"lora_rank": 8}}, 2 + 2),
        ({"model": {"lora_rank": 8, "dtype": "float32"}}, 4 + 4),
        (CRITIC, 2 * (4 + 8) + 2),
    ],
)
def test_the_size_of_a_checkpoint(model: Path, keys: dict[str, Any], bytes_each: int) -> None:
    assert checkpoint_bytes(config(model, **keys)) == 100_000_001 * bytes_each


def test_the_plan_says_what_checkpoints_take(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimates.shutil, "disk_usage", lambda path: SimpleNamespace(free=4_000_000_000))
    lines = describe_costs(config(model, model={"dtype": "float32"}), has_gpu=False)
    assert "100.0 M parameters, all weights trained, float32" in lines[0]
    assert "1.6 GB each, every 50 steps; at most 3 at once: 4.8 GB of the 4.0 GB free" in lines[1]
    assert "adapters of rank 4" in describe_costs(config(model, model={"lora_rank": 4}), has_gpu=True)[0]


@pytest.mark.parametrize(
    ("parameters", "lr", "lora", "far"),
    [
        (160_000, 4e-4, False, False),  # the demo
        (134_515_008, 2e-5, False, False),
        (134_515_008, 1e-6, False, True),  # the default, on which a small model learns nothing in an hour
        (134_515_008, 1e-3, False, True),
        (500_000_000, 1e-6, False, False),  # verl's examples, TRL's default
        (7_000_000_000, 1e-6, False, False),
        (9_000_000_000, 5e-6, False, False),  # NeMo RL
        (32_000_000_000, 1e-6, False, False),  # DAPO
        (7_000_000_000, 1e-4, False, True),
        (7_000_000_000, 1e-4, True, False),
        (7_000_000_000, 1e-6, True, True),
    ],
)
def test_learning_rates_of_published_runs_are_not_far(
    parameters: int, lr: float, lora: bool, far: bool
) -> None:
    low, _, high = learning_rates(parameters, lora)
    assert (not low <= lr <= high) == far


@pytest.mark.parametrize(
    ("engine", "gpu", "trainer", "server"),
    [
        ({"name": "sglang"}, False, "on cpu", "a server, supervised"),
        ({"name": "sglang"}, True, "on cuda", "a server on 1 GPU, supervised"),
        ({"name": "sglang"}, None, "on auto", "a server on 1 GPU, supervised"),
        ({"name": "sglang", "server_command": ["launch"]}, None, "on auto", "a server, supervised"),
    ],
)
def test_the_plan_names_gpus_only_where_there_may_be_some(
    model: Path, engine: dict[str, Any], gpu: bool | None, trainer: str, server: str
) -> None:
    run = config(model, engine=engine)
    lines = describe_plan(run, plan_units(run), gpu)
    assert next(line for line in lines if line.startswith("trainer")).endswith(trainer)
    assert next(line for line in lines if line.startswith("engine")).endswith(f" {server}")


@pytest.mark.parametrize(
    ("keys", "bytes_each"),
    [
        ({}, 4 + 4 + 8),
        ({"model": {"lora_rank": 8}}, 2 + 16 * 8 * 51_000 / 100_000_001),
        ({"trainer": {"optimizer": {"adamw": {"amsgrad": True}}}}, 4 + 4 + 12),
        ({"trainer": {"optimizer": {"adamw": {}}}}, 4 + 4 + 8),
        ({"trainer": {"optimizer": "sgd"}}, 4 + 4),
        ({"trainer": {"optimizer": {"sgd": {"momentum": 0.9}}}}, 4 + 4 + 4),
        (CRITIC, 2 * (4 + 4 + 8)),
        ({"kl": {"where": "loss"}}, 4 + 4 + 8 + 2),
        ({"kl": {"where": "loss"}, "model": {"dtype": "float32"}}, 4 + 4 + 8 + 4),
        ({"trainer": {"ranks": 4, "replicas": 2}}, 2 * (4 + 4 + 8)),
    ],
)
def test_what_stays_in_memory(
    model: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], bytes_each: int
) -> None:
    run = config(model, **keys)
    if run.trainer.optimizer == "adamw":  # to make one takes a second: torch imports its compiler
        monkeypatch.setattr("asyncrl.trainer.optimizer.make_optimizer", None)
    of_all_ranks = run.trainer.ranks * sum(static_bytes(run))
    assert of_all_ranks == pytest.approx(100_000_001 * bytes_each, rel=0.01)


def test_the_dry_run_warns_of_what_a_micro_batch_takes(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Footprint(2 * 10**8, 2 * 10**8, 4 * 10**8, 3 * 10**8, rows=4, length=512)
    monkeypatch.setattr(memory, "footprint", lambda config, _: found)
    monkeypatch.setattr(memory, "main_memory", lambda: MainMemory(2_000_000_000, 0))
    (line,) = describe_memory(config(model), has_gpu=False)
    assert "optimizer 400.0 MB, a micro-batch of 4 x 512 tokens 300.0 MB, 1.1 GB in total" in line.text
    assert line.level == "ok" and "versions being published take 400.0 MB of main memory" in line.text
    _, short = describe_memory(config(model, trainer={"ranks": 2}), has_gpu=False)
    assert (
        "trainer's ranks (2) need 2.6 GB, but only 2.0 GB is available" in short.text
        and "activation_check" in short.text
    )
    assert short.level == "warning"
    deltas = {"trainer": {"ranks": 2}, "weights": {"full_every": 4}}
    line, short = describe_memory(config(model, **deltas), has_gpu=False)
    assert "versions being published take 300.0 MB of main memory" in line.text, "three copies of half of it"
    assert "trainer's ranks (2) need 2.8 GB" in short.text


def test_the_dry_run_says_what_adapters_take_of_a_server(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "footprint", lambda config, _: Footprint(0, 0, 0, 0, rows=1, length=1))
    agents = {"planner": {"lora_rank": 16}, "coder": {"lora_rank": 8}}
    keys: dict[str, Any] = {"agents": agents, "rollout": {"agent": "a:b"}}
    assert len([*describe_memory(config(model, **keys), has_gpu=False)]) == 2, (
        "the embedded engine has one version"
    )
    *_, line = describe_memory(config(model, engine={"name": "sglang"}, **keys), has_gpu=False)
    # 51,000 numbers of each rank, two bytes each; 6 versions of two agents, and the base, all as of rank 16
    assert "version takes 2.4 MB; besides its weights, a server has room for 13 adapters: 21" in line.text


@pytest.mark.parametrize(
    ("transport", "servers", "full_every", "copies"),
    [
        ("disk", 8, 1, 2),
        ("disk", 8, 4, 3),
        ("collective", 1, 1, 2),
        ("collective", 3, 1, 4),
        ("collective", 9, 1, 5),
    ],
)
def test_a_rank_may_hold_a_copy_for_each_sender_and_one_more(
    model: Path, transport: str, servers: int, full_every: int, copies: int
) -> None:
    """Each reads another version, while the next one is copied; 4 ranks, of which each has a quarter. To be
    broadcast, a bucket is put together while the one before is sent; this model is smaller than two."""
    keys = {"transport": transport, "full_every": full_every}
    engine = {"name": "sglang", "servers": servers}
    run_config = config(model, weights=keys, trainer={"ranks": 4}, engine=engine)
    buckets = 2 if transport == "collective" else 0
    wanted = (copies / 4 + buckets) * 100_000_001 * 2
    assert memory.version_bytes(run_config) == pytest.approx(wanted, rel=0.01)
    buffers = Buffers(20, page_locked=False)
    readers = copies - 1 - (full_every > 1)
    with ExitStack() as reading:
        for copied in range(1, 2 * readers + 3):
            index = buffers.claim_buffer(buffers.begin_claim())
            buffers.copy_tensors(index, [(torch.zeros(10), torch.bfloat16)])
            if copied <= readers:
                reading.enter_context(buffers.reading(index, copied, wait_seconds=0))
    assert len(buffers._buffers) == readers + 1


def test_a_model_that_cannot_be_estimated_ends_nothing(model: Path) -> None:
    (model / "config.json").write_text("{}")
    (line,) = describe_memory(config(model), has_gpu=False)
    assert line.level == "warning" and line.text.startswith("cannot estimate a trainer rank's memory: ")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"), (119.4, "119 s"), (130, "2.2 minutes"), (1500, "25 minutes"), (7199, "120 minutes"),
        (7200, "2.0 hours"), (100_000, "28 hours"), (259_200, "3.0 days"), (28878.3 * 60, "20 days"),
        (1e8 * 86400, "100,000,000 days"),
    ],
)  # fmt: skip
def test_a_duration_is_in_units_that_suit_it(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
