"""Servers are processes: stopped by pid, and nothing of them remains. Killed: test_fleet.py."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.sglang.conftest import Shared, Start


def test_a_stopped_server_leaves_nothing(shared_server: Shared):
    server = shared_server("qwen2")  # nobody needs it any more
    assert len(server.processes()) >= 3 and server.ready()  # HTTP, scheduler, detokenizer
    server.stop()
    assert not server.alive and not server.ready()
    assert not server.processes()


def test_a_server_that_cannot_start_says_why_and_leaves_nothing(tmp_path: Path, sglang_server: Start):
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with pytest.raises(RuntimeError, match=r"(?s)ended with \d+; the end of .*nowhere"):
        sglang_server(tmp_path / "nowhere")
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
