"""What a supervisor checks before its server gets work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import LlamaConfig, Qwen2Config

from asyncrl.config import RunConfig, parse
from asyncrl.engines.sglang.http import ModelInfo, ServerInfo
from asyncrl.engines.sglang.server import check_engine_server, vocabulary_size_of
from asyncrl.errors import ConfigError

URL = "http://server"


def model(directory: Path, kind: Any = Qwen2Config, **changes: Any) -> str:
    config = kind(vocab_size=64, hidden_size=32, num_hidden_layers=2, **changes)
    config.architectures = [kind.__name__.replace("Config", "ForCausalLM")]
    config.save_pretrained(directory)
    return str(directory)


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return parse(
        {
            "name": "x",
            "model": {"path": model(tmp_path / "own")},
            "data": {"train": "t.parquet"},
            "rollout": {"max_tokens": 256, "max_new_tokens": 64},
        }
    )


def served(path: str, architecture: str = "Qwen2ForCausalLM", **changes: Any) -> tuple[ServerInfo, ModelInfo]:
    info = ServerInfo("0.5.23", path, max_req_input_len=256)
    return msgspec.structs.replace(info, **changes), ModelInfo(path, architectures=(architecture,))


def test_the_runs_model_with_room_is_fine(config: RunConfig, caplog: pytest.LogCaptureFixture):
    check_engine_server(config, URL, *served(config.model.path))
    assert not caplog.messages
    check_engine_server(config, URL, *served("/nowhere/to/be/read"))  # the first load will tell
    assert (
        "cannot compare the dimensions of its model" in caplog.text and "/nowhere/to/be/read" in caplog.text
    )
    assert vocabulary_size_of(config.model.path) == 64


def test_too_little_room_is_refused(config: RunConfig):
    text = r"room for 255 tokens, but rollout\.max_tokens is 256; lower rollout\.max_tokens"
    with pytest.raises(ConfigError, match=text):
        check_engine_server(config, URL, *served(config.model.path, max_req_input_len=255))


def test_who_scores_with_the_base_was_started_with_it_and_has_room_for_a_teachers_prompt(tmp_path: Path):
    """Another server has other weights after a restart, until its supervisor has seen it."""
    own_model = model(tmp_path / "own")
    teacher = {"scorers": {"teacher": {"urls": ["engines"]}}}
    lent = parse(
        {
            "name": "x",
            "model": {"path": own_model, "lora_rank": 2},
            "data": {"train": "t.parquet"},
            "rollout": {"max_tokens": 256, "max_new_tokens": 64},
            "weights": {"adapters": True},
            "kl": {"where": "loss", "prompt": "Be brief."},
            **teacher,
        }
    )
    able = {"enable_lora": True, "max_loras_per_batch": 16, "max_req_input_len": 265}
    check_engine_server(lent, URL, *served(own_model, **able))
    with pytest.raises(
        ConfigError, match=r"max_tokens is 256 and kl\.prompt may add 9; lower rollout\.max_tokens"
    ):
        check_engine_server(lent, URL, *served(own_model, **able | {"max_req_input_len": 264}))
    with pytest.raises(ConfigError, match=r"was started with \S+other, .*start it with model\.path"):
        check_engine_server(lent, URL, *served(model(tmp_path / "other"), **able))


def test_replicas_within_a_server_cannot_be_broadcast_to(config: RunConfig):
    replicas = served(config.model.path, dp_size=2)
    check_engine_server(config, URL, *replicas)
    weights = msgspec.structs.replace(config.weights, transport="collective")
    with pytest.raises(ConfigError, match=r"--dp-size 2.*set weights\.transport=disk"):
        check_engine_server(msgspec.structs.replace(config, weights=weights), URL, *replicas)


def test_a_server_that_tells_no_routes_is_refused_where_they_are_replayed(config: RunConfig):
    config = msgspec.structs.replace(
        config, trainer=msgspec.structs.replace(config.trainer, router_replay=True)
    )
    check_engine_server(config, URL, *served(config.model.path, enable_return_routed_experts=True))
    with pytest.raises(ConfigError, match="start it with --enable-return-routed-experts"):
        check_engine_server(config, URL, *served(config.model.path))


def test_a_server_that_cannot_sleep_is_refused_where_engines_do(config: RunConfig):
    engine = msgspec.structs.replace(config.engine, colocated=1)
    config = msgspec.structs.replace(config, engine=engine, total_steps=1)
    check_engine_server(
        config, URL, *served(config.model.path, enable_memory_saver=True, max_total_num_tokens=4096)
    )
    with pytest.raises(ConfigError, match=r"cannot sleep.* it lacks --enable-memory-saver"):
        check_engine_server(config, URL, *served(config.model.path))
    with pytest.raises(ConfigError, match=r"cannot sleep.* it lacks max_total_num_tokens in /server_info"):
        check_engine_server(config, URL, *served(config.model.path, enable_memory_saver=True))


def test_another_model_is_refused_by_what_differs(config: RunConfig, tmp_path: Path):
    other_model = model(tmp_path / "other", intermediate_size=48, num_attention_heads=8)
    with pytest.raises(ConfigError, match=r"intermediate_size 48 instead of \d+; num_attention_heads 8 inst"):
        check_engine_server(config, URL, *served(other_model))
    llama = model(tmp_path / "llama", LlamaConfig)
    with pytest.raises(ConfigError, match="architecture LlamaForCausalLM instead of Qwen2ForCausalLM"):
        check_engine_server(config, URL, *served(llama, "LlamaForCausalLM"))
    broken = msgspec.structs.replace(config.model, path=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"none has no usable config\.json"):
        vocabulary_size_of(broken.path)
