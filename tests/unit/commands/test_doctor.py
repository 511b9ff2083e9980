"""`asyncrl doctor` and the dry run: several errors at once, without a model, without torch. What each check
finds: tests/unit/launch/test_checks.py and test_machine_checks.py."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from asyncrl import cli
from asyncrl.episodes import parts
from asyncrl.launch import preflight
from asyncrl.launch.data import RunData
from asyncrl.launch.inputs import Inputs
from asyncrl.types import Message, Sample
from tests.fakes.checked import Given, gpus
from tests.fakes.data import stored


def lines(text: str, level: str) -> dict[str, str]:
    """Texts of one level, by the name of the check."""
    messages = (line.split(maxsplit=1) for line in text.splitlines() if line.startswith(f"{level} "))
    return {rest[:14].strip(): rest[15:] for _, rest in messages}


def test_errors_are_collected_each_with_what_to_do(given: Given, capsys: pytest.CaptureFixture[str]) -> None:
    (given.model / "tokenizer.json").unlink()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert cli.main(["doctor", *given.overrides, f"launch.port={port}"]) == 2
        errors = lines(text := capsys.readouterr().out, "error")
        assert set(errors) == {"ports", "model"}
        assert str(port) in errors["ports"] and "launch.port=0" in errors["ports"]
        assert "no tokenizer.json; save" in errors["model"]
        assert "model" in lines(text, "skipped")["data"]
        assert cli.main(["train", "--dry-run", *given.overrides, f"launch.port={port}"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert [line.removeprefix("asyncrl: ") for line in said] == [errors["ports"], errors["model"]]


@pytest.mark.parametrize(("count", "code"), [(8, 0), (1, 2)])
def test_the_dry_run_says_who_gets_which_gpu(
    given: Given, count: int, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    command = f"engine.server_command=[{sys.executable},-m,sglang.launch_server]"
    given.spoil([gpus(count)])
    keys = ["engine=sglang", "engine.servers=4", "trainer.ranks=4", command]
    assert cli.main(["train", "--dry-run", *given.overrides, *keys]) == code
    said = capfd.readouterr()
    if count == 1:
        assert "trainer.ranks=4: each rank needs its own GPU, but torch sees 1" in said.err
        return
    rows = {line.split()[0]: line for line in said.out.splitlines() if line.strip()}
    assert rows["engine"].endswith("(GPUs 4, 5, 6, 7)") and rows["trainer"].endswith("cuda (GPUs 0, 1, 2, 3)")
    assert "servers share" not in said.out


def test_of_a_conversation_to_learn_what_precedes_its_first_answer_is_shown(given: Given) -> None:
    talk = (Message("user", "1 + 1?"), Message("assistant", "It is 2."))
    data = RunData(stored([Sample(0, "d", talk, "", given=0)]), None, [])
    inputs = Inputs(given.config())
    inputs.run_data = data
    _, shown = preflight.describe_chat(inputs)
    assert shown.text.endswith("1 + 1?<|im_end|>\n<|im_start|>assistant\n")


def test_without_a_model_the_machine_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert cli.main(["doctor", f"run_dir={tmp_path / 'file' / 'runs'}"]) == 2
    text = capsys.readouterr().out
    assert "set run_dir=" in lines(text, "error")["disk"] and "Python" in lines(text, "ok")
    assert "data " not in text.replace("model.path and data.train", "")


def test_the_doctor_shows_what_the_model_reads_and_names_a_check_once_in_a_line(
    given: Given, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", *given.overrides]) == 0
    text = capsys.readouterr().out
    assert lines(text, "ok")["sample"].startswith("as an answer, an empty text scores")
    assert text.endswith(" 0 errors, 0 skipped\n") and "tensors of a trainer rank" in text
    assert "4 samples" in text and "<|im_start|>user" in text and "a turn ends with <|im_end|> (" in text


def test_a_broken_torch_is_a_line(given: Given) -> None:
    (given.folder / "torch.py").write_text("raise OSError('libtorch.so: no such file')")
    path = os.pathsep.join([str(given.folder), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-m", "asyncrl.cli", "doctor", *given.overrides],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 2 and "Traceback" not in done.stdout + done.stderr, done.stderr
    assert set(lines(done.stdout, "error")) == {"libraries"}
    assert "requires libraries" in lines(done.stdout, "skipped")["model"]


def test_tokenizer_tools_and_rewards_are_loaded_once(given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever checks of a dry run with held-out data use them."""
    loaded = Counter[str]()

    def counted(name: str, load: Any) -> Any:
        return lambda *arguments: loaded.update([name]) or load(*arguments)

    for name in ("load_tokenizer", "load_tools", "load_rewards"):
        monkeypatch.setattr(parts, name, counted(name, getattr(parts, name)))
    keys = (f"data.test={given.train}", "rollout.tools=[calculator]")
    assert cli.main(["train", "--dry-run", *given.overrides, *keys]) == 0
    assert loaded == {"load_tokenizer": 1, "load_tools": 1, "load_rewards": 1}
