"""`asyncrl doctor`: several errors at once, without a model, without torch. What its checks find in models
and data: tests/integration/test_bad_input.py."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from asyncrl import cli
from asyncrl.config import parse
from asyncrl.config.composition import compose
from asyncrl.episodes import parts
from asyncrl.errors import ConfigError
from asyncrl.launch import machine, preflight
from asyncrl.launch.data import Inputs, RunData
from asyncrl.launch.models import resolve_models
from asyncrl.types import Message, Sample
from tests.fakes.chatml import save_tiny_chat_model
from tests.fakes.data import stored

ROW = {
    "data_source": "d",
    "prompt": [{"role": "user", "content": "1 + 1?"}],
    "reward_model": {"style": "rule", "ground_truth": "2"},
}


@pytest.fixture
def overrides(tmp_path: Path) -> list[str]:
    """Of a good run."""
    pq.write_table(pa.Table.from_pylist([ROW] * 40), tmp_path / "train.parquet")
    model = save_tiny_chat_model(tmp_path / "model")
    return [
        *("name=x", f"run_dir={tmp_path / 'runs'}", f"model.path={model}"),
        *(f"data.train={tmp_path / 'train.parquet'}", "rollout.max_tokens=300", "rollout.max_new_tokens=16"),
    ]


def lines(text: str, level: str) -> dict[str, str]:
    """Texts of one level, by the name of the check."""
    found = (line.split(maxsplit=1) for line in text.splitlines() if line.startswith(f"{level} "))
    return {rest[:14].strip(): rest[15:] for _, rest in found}


def test_errors_are_collected_each_with_what_to_do(
    overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model" / "tokenizer.json").unlink()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert cli.main(["doctor", *overrides, f"launch.port={port}"]) == 2
        errors = lines(text := capsys.readouterr().out, "error")
        assert set(errors) == {"ports", "model"}
        assert str(port) in errors["ports"] and "launch.port=0" in errors["ports"]
        assert "no tokenizer.json; save" in errors["model"]
        assert "model" in lines(text, "skipped")["data"]
        assert cli.main(["train", "--dry-run", *overrides, f"launch.port={port}"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert [line.removeprefix("asyncrl: ") for line in said] == [errors["ports"], errors["model"]]


@pytest.mark.parametrize(("count", "code"), [(8, 0), (1, 2)])
def test_the_dry_run_says_who_gets_which_gpu(
    overrides: list[str],
    count: int,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    given = SimpleNamespace(name="NVIDIA L4", total_memory=24 << 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: given)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    command = f"engine.server_command=[{sys.executable},-m,sglang.launch_server]"
    keys = ["engine=sglang", "engine.servers=4", "trainer.ranks=4", "model.dtype=float32", command]
    assert cli.main(["train", "--dry-run", *overrides, *keys]) == code
    said = capfd.readouterr()
    if count == 1:
        assert "trainer.ranks=4: each needs a GPU of its own, and torch sees 1" in said.err
        return
    rows = {line.split()[0]: line for line in said.out.splitlines() if line.strip()}
    assert rows["engine"].endswith("(GPUs 4, 5, 6, 7)") and rows["trainer"].endswith("cuda (GPUs 0, 1, 2, 3)")
    assert "servers share" not in said.out


def test_of_a_conversation_to_learn_what_precedes_its_first_answer_is_shown(overrides: list[str]) -> None:
    talk = (Message("user", "1 + 1?"), Message("assistant", "It is 2."))
    config = resolve_models(compose(["algorithm=sft", *overrides]))
    data = RunData(stored([Sample(0, "d", talk, "", given=0)]), None, [])
    _, shown = preflight.describe_chat(Inputs(config, data=data))
    assert shown.text.endswith("1 + 1?<|im_end|>\n<|im_start|>assistant\n")


def test_without_a_model_the_machine_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert cli.main(["doctor", f"run_dir={tmp_path / 'file' / 'runs'}"]) == 2
    text = capsys.readouterr().out
    assert "set run_dir=" in lines(text, "error")["disk"] and "Python" in lines(text, "ok")
    assert "data " not in text.replace("model.path and data.train", "")


def test_a_check_is_named_once_in_a_line(overrides: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", *overrides]) == 0
    assert lines(capsys.readouterr().out, "ok")["sample"].startswith("no text as the answer")


def test_a_broken_torch_is_a_line(tmp_path: Path, overrides: list[str]) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libtorch.so: no such file')")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-m", "asyncrl.cli", "doctor", *overrides],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 2 and "Traceback" not in done.stdout + done.stderr, done.stderr
    assert set(lines(done.stdout, "error")) == {"libraries"}
    assert "needs libraries" in lines(done.stdout, "skipped")["model"]


def test_an_sglang_that_is_not_supported(tmp_path: Path) -> None:
    """A Python of its own, as the servers' environment, with another version in it."""
    info = tmp_path / "site" / "sglang-0.0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.0.1\n")
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path / "site"} exec {sys.executable} "$@"\n')
    program.chmod(0o755)
    engine = {"name": "sglang", "server_command": [str(program)]}
    config = parse({"name": "x", "model": {"path": "m"}, "data": {"train": "t"}, "engine": engine})
    with pytest.raises(ConfigError, match=r"has sglang 0\.0\.1; install one of 0\.5"):
        list(machine.check_sglang(Inputs(config)))


def test_tokenizer_tools_and_rewards_are_loaded_once(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever checks of a dry run with held-out data use them."""
    loaded = Counter[str]()

    def counted(name: str, load: Any) -> Any:
        return lambda *given: loaded.update([name]) or load(*given)

    for name in ("load_tokenizer", "load_tools", "load_rewards"):
        monkeypatch.setattr(parts, name, counted(name, getattr(parts, name)))
    keys = (f"data.test={tmp_path / 'train.parquet'}", "rollout.tools=[calculator]")
    assert cli.main(["train", "--dry-run", *overrides, *keys]) == 0
    assert loaded == {"load_tokenizer": 1, "load_tools": 1, "load_rewards": 1}
