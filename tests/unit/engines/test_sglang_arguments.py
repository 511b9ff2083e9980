"""Arguments and models whose servers would end at their first update are refused before the start."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncrl.config import RunConfig, parse
from asyncrl.engines.sglang.arguments import check_arguments, draft_warning
from asyncrl.engines.sglang.http import ModelInfo, ServerInfo
from asyncrl.engines.sglang.server import check_engine_server
from asyncrl.errors import ConfigError
from asyncrl.launch.servers import check_servers


def configured(
    directory: Path, arguments: dict[str, Any], architecture: str = "Qwen2ForCausalLM", **sections: Any
) -> RunConfig:
    directory.mkdir(exist_ok=True)
    model = {"model_type": "qwen2", "architectures": [architecture], "vocab_size": 64}
    (directory / "config.json").write_text(json.dumps(model))
    engine = {"name": "sglang", "server_args": arguments, "server_command": [sys.executable]}
    base = {
        "name": "x",
        "model": {"path": str(directory), "lora_rank": sections.pop("lora_rank", 0)},
        "data": {"train": "t.parquet"},
        "engine": engine,
        "launch": {"host": "10.0.0.1"},
    }
    return parse(base | sections)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"quantization": "fp8"}, r"^engine\.server_args: quantization=fp8 crashes .* remove quantization"),
        (
            {"speculative-algorithm": "EAGLE3", "speculative-draft-model-path": "d"},
            r"^engine\.server_args: speculative-algorithm=EAGLE3 .* set weights\.transport=collective",
        ),
        ({"speculative_algorithm": "eagle3"}, r"speculative-algorithm=EAGLE3 crashes a server"),
        ({"speculative-algorithm": "STANDALONE"}, r"speculative-algorithm=STANDALONE crashes a server"),
    ],
)
def test_arguments_that_end_a_server_at_its_first_update_are_refused(
    tmp_path: Path, arguments: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        check_servers(configured(tmp_path, arguments))
    assert "\n" not in str(caught.value)


def test_what_leaves_the_weights_or_the_draft_alone_is_not_refused(tmp_path: Path) -> None:
    for arguments in ({}, {"quantization": "none"}, {"speculative-algorithm": "EAGLE"}):
        check_servers(configured(tmp_path, arguments))
    draft = {"speculative-algorithm": "EAGLE3"}
    check_servers(configured(tmp_path, draft, weights={"transport": "collective"}))
    adapters = configured(tmp_path, {"quantization": "fp8"}, lora_rank=2, weights={"adapters": True})
    check_servers(adapters)
    with pytest.raises(ConfigError, match="quantization=fp8"):  # merged weights
        check_servers(configured(tmp_path, {"quantization": "fp8"}, lora_rank=2))
    sleeping = msgspec.structs.replace(
        adapters, engine=msgspec.structs.replace(adapters.engine, colocated=1), total_steps=1
    )
    with pytest.raises(ConfigError, match="quantization=fp8"):  # waking loads the base
        check_arguments(sleeping, "engine.server_args", sleeping.engine.server_args)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"speculative-algorithm": "EAGLE", "speculative-draft-model-path": "d"},
            "the draft model is not trained",
        ),
        ({"speculative-algorithm": "EAGLE3"}, "the draft model is not trained and becomes stale"),
        ({"speculative-algorithm": "NEXTN"}, "the model's MTP layers stay frozen"),
        ({"speculative_algorithm": "EAGLE"}, "the model's MTP layers stay frozen"),
        ({"speculative-algorithm": "NGRAM"}, None),
        ({}, None),
    ],
)
def test_what_becomes_of_a_draft_is_said(arguments: dict[str, Any], text: str | None) -> None:
    warning_text = draft_warning(arguments)
    assert text in warning_text if text else warning_text == ""


def test_attached_servers_are_refused_for_the_same(tmp_path: Path) -> None:
    config = configured(tmp_path, {})
    info = ServerInfo("0.5.23", config.model.path, quantization="fp8")
    model = ModelInfo(config.model.path, architectures=("Qwen2ForCausalLM",))
    with pytest.raises(ConfigError, match=r"^server http://s: quantization=fp8 crashes a server"):
        check_engine_server(config, "http://s", info, model)
    drafting = msgspec.structs.replace(info, quantization=None, speculative_algorithm="EAGLE3")
    with pytest.raises(ConfigError, match=r"^server http://s: speculative-algorithm=EAGLE3"):
        check_engine_server(config, "http://s", drafting, model)
