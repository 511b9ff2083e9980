"""Servers are processes: two side by side, stopped by pid, killed by pid, and nothing of them remains."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.sglang.conftest import Start


def test_two_servers_one_killed_one_stopped(tiny_models: dict[str, Path], sglang_server: Start):
    servers = [sglang_server(tiny_models[family], wait=False) for family in ("qwen2", "llama")]
    for server in servers:
        server.wait_ready()
    killed, stopped = servers
    families = [server.processes() for server in servers]
    assert all(len(family) >= 3 for family in families)  # HTTP, scheduler, detokenizer
    assert not {process.pid for process in families[0]} & {process.pid for process in families[1]}

    killed.process.kill()  # the first process only: its children notice by themselves
    assert killed.gone()
    assert stopped.ready() and not killed.ready()

    stopped.stop()
    assert not stopped.alive and not stopped.ready()
    assert not stopped.processes()


def test_a_server_that_cannot_start_says_why_and_leaves_nothing(tmp_path: Path, sglang_server: Start):
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with pytest.raises(RuntimeError, match=r"(?s)ended with \d+; the end of .*nowhere"):
        sglang_server(tmp_path / "nowhere")
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
