"""Layers of which SGLang servers take adapters; tests/sglang/test_families.py asks real servers."""

from __future__ import annotations

from pathlib import Path

from asyncrl.engines.sglang.served_layers import kinds_not_served
from tests.fakes.tiny_families import build_family

QUERIES_KEYS_VALUES = {"q_proj", "k_proj", "v_proj"}


def test_a_gate_that_servers_do_not_know_keeps_the_fused_kinds_from_them(tmp_path: Path) -> None:
    unserved = kinds_not_served(str(build_family("qwen3_next", tmp_path / "next")))
    assert unserved.keys() >= QUERIES_KEYS_VALUES
    assert unserved["q_proj"] == "servers expect queries without an output gate"
    assert "o_proj" not in unserved


def test_a_gate_that_servers_know_does_not(tmp_path: Path) -> None:
    unserved = kinds_not_served(str(build_family("qwen3_5", tmp_path / "model")))
    assert not unserved.keys() & {*QUERIES_KEYS_VALUES, "o_proj"}
