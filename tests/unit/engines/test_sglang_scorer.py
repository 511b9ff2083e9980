"""Servers of frozen models: what they are asked, what comes back, and which are refused."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from transformers import Qwen2Config

from asyncrl.config import RunConfig, parse
from asyncrl.engines.sglang.client import SGLangClient
from asyncrl.engines.sglang.http import ModelInfo, ServerApi, ServerInfo
from asyncrl.engines.sglang.process import base_gpu, server_command
from asyncrl.engines.sglang.server import check_scorer
from asyncrl.errors import ConfigError, EngineError
from asyncrl.launch.servers import check_servers
from asyncrl.wire.messages.worker import EngineUse
from tests.fakes.sglang import scripted, sglang_config

VOCABULARY = {"a": 0, "b": 1}
URL = "http://h:1"


def saved(directory: Path, tokens: dict[str, int] | None = None, size: int = 64) -> str:
    Qwen2Config(vocab_size=size, hidden_size=32, architectures=["Qwen2ForCausalLM"]).save_pretrained(
        directory
    )
    if tokens is not None:
        text = {"model": {"vocab": tokens}, "added_tokens": [{"id": 9, "content": "<end>"}]}
        (directory / "tokenizer.json").write_bytes(msgspec.json.encode(text))
    return str(directory)


def config(tmp_path: Path, **scorers: dict[str, Any]) -> RunConfig:
    return parse(
        {
            "name": "x",
            "model": {"path": saved(tmp_path / "own", VOCABULARY)},
            "data": {"train": "t.parquet"},
            "rollout": {"max_tokens": 256, "max_new_tokens": 64},
            "engine": {"server_command": ["env"]},
            "scorers": scorers,
        }
    )


async def test_a_turn_is_read_from_where_it_begins_and_its_prefix_is_in_the_cache() -> None:
    """An SGLang server calls the last id of its vocabulary 0."""
    answer = {
        "prompt_tokens": 6,
        "cached_tokens": 3,
        "input_token_logprobs": [[None, 6, None], [-0.5, 7, None], [None, 0, None]],
        "input_top_logprobs": [None, [[-0.5, 7, None], [-2, 4, None]], [[-1, 5, None], [-1.5, 9, None]]],
    }
    async with scripted() as script:
        script.says("/generate", 200, msgspec.json.encode({"meta_info": answer}))
        use = EngineUse("s")
        client = SGLangClient(ServerApi(script.url), sglang_config(64), 10, use, salt="one")
        for _ in range(2):
            scores = await client.read((3, 4, 5, 6, 7, 9), 2, 2)
        assert np.frombuffer(scores.logprobs, "<f4").tolist() == pytest.approx([-0.5, np.nan], nan_ok=True)
        assert np.frombuffer(scores.ids, "<i4").tolist() == [7, 4, 5, 9]
        assert np.frombuffer(scores.top, "<f4").tolist() == [-0.5, -2.0, -1.0, -1.5]
        bodies = [body for _, body, _ in script.requests]
        assert [body["cache_salt"] for body in bodies] == ["one", "one"]
        assert {(body["logprob_start_len"], body["top_logprobs_num"]) for body in bodies} == {(3, 2)}
        assert (use.requests, use.prompt_tokens, use.cached_tokens, use.tokens) == (2, 12, 6, 0)
        with pytest.raises(EngineError, match="did not score the token IDs"):
            await client.read((3, 4, 5, 6, 8, 9), 2, 2)
        with pytest.raises(EngineError, match="token ID 10 is outside the scorer's vocabulary"):
            await client.read((3, 10), 1, 0)  # the server would die
        assert len(script.requests) == 3
        await client.close()


def test_a_scorer_has_the_policys_vocabulary(tmp_path: Path) -> None:
    def check(name: str, path: str, theirs: str, **changes: Any) -> None:
        info = msgspec.structs.replace(ServerInfo("0.5.23", theirs, max_req_input_len=256), **changes)
        scorer_config = config(tmp_path, **{name: {"path": path, "urls": [URL]}})
        check_scorer(scorer_config, name, URL, info, ModelInfo(theirs, architectures=("Qwen2ForCausalLM",)))

    same = saved(tmp_path / "same", VOCABULARY, 72)
    other_model = saved(tmp_path / "other", {"a": 0, "c": 1})
    check("reference", "", same)
    check("reference", same, same)
    check("reference", "", saved(tmp_path / "bare"))  # no tokenizer.json: the sizes are the same
    check("reward", other_model, other_model, max_req_input_len=1)  # it has a tokenizer of its own
    for path, theirs in (
        ("", other_model),
        (other_model, other_model),
        ("", saved(tmp_path / "wide", size=65)),
    ):
        with pytest.raises(ConfigError, match="a different vocabulary from the policy") as caught:
            check("teacher", path, theirs)
        assert "\n" not in str(caught.value)
    with pytest.raises(
        ConfigError, match=r"a different model from scorers\.teacher\.path: vocab_size 64 instead"
    ):
        check("teacher", same, other_model)
    with pytest.raises(ConfigError, match="room for 255 tokens"):
        check("teacher", same, same, max_req_input_len=255)


def test_what_a_scorer_lacks_is_one_line_before_the_start(tmp_path: Path) -> None:
    with socket.socket() as bound_socket:  # nobody listens there
        bound_socket.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound_socket.getsockname()[1]}"
        with pytest.raises(ConfigError, match=rf"^scorers\.reference\.urls: .*{url}") as caught:
            check_servers(config(tmp_path, reference={"urls": [url]}))
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"^scorers\.teacher\.path: .* no model\.safetensors"):
        check_servers(config(tmp_path, teacher={"path": str(tmp_path / "own")}))
    other_model = saved(tmp_path / "other", {"z": 0})
    (tmp_path / "other/model.safetensors").touch()
    with pytest.raises(ConfigError, match=r"^scorers\.teacher: .* a different vocabulary"):
        check_servers(config(tmp_path, teacher={"path": other_model}))


def test_a_server_of_a_scorer_gets_its_model_and_the_next_gpus(tmp_path: Path) -> None:
    scorer_config = config(
        tmp_path,
        teacher={"path": "r"},
        teacher_b={"urls": [URL], "sources": ["b"]},
        reward={"path": "w", "tp": 2, "servers": 2},
    )
    firsts = [base_gpu(scorer_config, i, 8, name) for i, (name, _) in enumerate(scorer_config.scorer_places)]
    assert scorer_config.scorer_places == [("teacher", 0), ("teacher_b", 0), ("reward", 0), ("reward", 1)]
    assert firsts == [1, 2, 2, 4]  # after the rank; who is attached to has none here
    command = server_command(scorer_config, 3, "h", 1, 8, "reward")
    after = {
        name: command[command.index(name) + 1] for name in ("--model-path", "--tp-size", "--base-gpu-id")
    }
    assert after == {"--model-path": str(Path("w").resolve()), "--tp-size": "2", "--base-gpu-id": "4"}
