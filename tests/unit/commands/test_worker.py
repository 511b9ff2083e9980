"""The configuration of a process that joins a run."""

from __future__ import annotations

import sys

import pytest
from msgspec.structs import replace

from asyncrl.commands.worker import with_server
from asyncrl.config import RunConfig, ScorerConfig, parse
from asyncrl.errors import ConfigError

OWN = "http://127.0.0.1:9"


def configured(**engine: object) -> RunConfig:
    base = {"name": "t", "model": {"path": "m"}, "data": {"train": "d"}}
    return parse(base | {"engine": {"name": "sglang"} | engine})


def test_a_supervisor_that_joins_has_one_server_which_no_other_has() -> None:
    started = with_server(configured(urls=[OWN], server_command=[sys.executable]), "")
    assert started.engine.urls == [] and started.engine.server_count == 1
    scored = replace(started, scorers={"reference": ScorerConfig(path="/not/here")})
    assert with_server(scored, "").scorers == scored.scorers
    with pytest.raises(ConfigError, match=f"--url: the run already uses the server {OWN}/"):
        with_server(configured(urls=[OWN]), OWN + "/")


def test_a_server_that_cannot_be_used_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"engine.server_command: no such program: '/nowhere/python'"):
        with_server(configured(server_command=["/nowhere/python"]), "")
    with pytest.raises(ConfigError, match=OWN):
        with_server(configured(), OWN)
    monkeypatch.delenv("KEY", raising=False)
    with pytest.raises(ConfigError, match="KEY is not set"):
        with_server(configured(api_key_env="KEY"), OWN)
