"""The server as a child: its command line, its keys, its end with the supervisor's."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from asyncrl.config import RunConfig, parse
from asyncrl.engines.sglang.process import (
    ServerProcess,
    base_gpu,
    server_command,
    server_environment,
)
from asyncrl.errors import EngineError

SLEEP = "import time; time.sleep(600)"


def configured(launch: str = "local", ranks: int = 1, **engine: Any) -> RunConfig:
    return parse(
        {
            "name": "t",
            "model": {"path": "m"},
            "data": {"train": "d"},
            "engine": {"name": "sglang", **engine},
            "trainer": {"ranks": ranks},
            "launch": {"kind": launch},
        }
    )


def flags(command: list[str]) -> dict[str, str]:
    """Each flag with the word after it."""
    return {word: after for word, after in zip(command, [*command[1:], ""], strict=True) if word[:2] == "--"}


def test_the_command_line_says_what_the_configuration_says() -> None:
    config = configured(tp=2)
    command_flags = flags(server_command(config, 0, "10.0.0.1", 30000, gpus=8))
    assert command_flags["--host"] == "10.0.0.1" and command_flags["--port"] == "30000"
    assert command_flags["--tp-size"] == "2" and command_flags["--mem-fraction-static"] == "0.85"
    assert (
        command_flags["--model-path"] == str(Path("m").resolve()) and command_flags["--dtype"] == "bfloat16"
    )
    assert server_command(config, 0, "h", 1, 8)[:3] == [sys.executable, "-m", "sglang.launch_server"]


def test_engines_that_sleep_have_the_trainers_gpus_and_later_servers_as_much_kv_cache_as_the_first() -> None:
    config = msgspec.structs.replace(configured(ranks=2, servers=2, colocated=2), total_steps=1)
    for index, tokens in ((0, 0), (1, 4096)):
        command = server_command(config, index, "h", 1, 8, tokens=tokens)
        assert "--enable-memory-saver" in command and flags(command)["--base-gpu-id"] == str(index)
        assert flags(command).get("--max-total-tokens", "0") == str(tokens)
    assert "--enable-memory-saver" not in server_command(configured(), 0, "h", 1, 8)


def test_further_arguments_win_and_switches_can_be_turned_off() -> None:
    extra = {"stream-interval": 1, "enable-metrics": True, "skip-server-warmup": False}
    command = server_command(configured(server_args=extra, server_command=["serve"]), 0, "h", 1, 0)
    assert command[0] == "serve" and flags(command)["--stream-interval"] == "1"
    assert "--enable-metrics" in command and "--skip-server-warmup" not in command


@pytest.mark.parametrize(
    ("launch", "ranks", "tp", "gpus", "first"),
    [
        ("local", 2, 2, 8, [2, 4, 6]),  # after the trainer's
        ("local", 1, 1, 1, [0, 0, 0]),  # one GPU for all
        ("local", 4, 2, 4, [0, 2, 1]),  # none left: shared with the trainer
        ("ray", 4, 2, 2, [0, 0, 0]),  # Ray shows each only its own
        ("local", 1, 1, 0, [0, 0, 0]),  # a CPU
    ],
)
def test_the_first_gpu_of_each_server(launch: str, ranks: int, tp: int, gpus: int, first: list[int]) -> None:
    config = configured(launch, ranks, tp=tp)
    assert [base_gpu(config, index, gpus) for index in range(3)] == first


async def test_keys_are_in_a_private_file_and_not_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY", "sesame")
    monkeypatch.setenv("ADMIN", "barley")
    out = tmp_path / "argv"
    (tmp_path / "run").mkdir()
    left = tmp_path / "run" / "keys-0.yaml"  # by a supervisor that was killed
    left.write_text("api-key: old, and longer than both of the new ones together")
    left.chmod(0o644)
    show = f"import sys; open({str(out)!r}, 'w').write(repr(sys.argv) + open(sys.argv[-1]).read())"
    config = configured(server_command=[sys.executable, "-c", show], api_key_env="KEY", admin_key_env="ADMIN")
    process = await ServerProcess.start(config, 0, "127.0.0.1", tmp_path / "run")
    (path,) = (tmp_path / "run").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert await asyncio.wait_for(process.wait_ended(), 60) == 0
    await process.stop()
    assert not path.exists()
    argv, _, file = out.read_text().partition("]")
    assert "sesame" not in argv and "barley" not in argv
    assert "api-key: sesame" in file and "admin-api-key: barley" in file


def test_a_command_that_is_not_there(tmp_path: Path) -> None:
    config = configured(server_command=["/no/such/program"])
    with pytest.raises(EngineError, match="no such program: '/no/such/program'"):
        asyncio.run(ServerProcess.start(config, 0, "127.0.0.1", tmp_path))


def test_a_server_that_ignores_the_word_to_end_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.engines.sglang.process.STOP_SECONDS", 0.2)
    deaf = f"import signal; signal.signal(15, signal.SIG_IGN); open('{tmp_path}/up', 'w'); {SLEEP}"
    config = configured(server_command=[sys.executable, "-c", deaf])

    async def main() -> int | None:
        process = await ServerProcess.start(config, 0, "127.0.0.1", tmp_path)
        async with asyncio.timeout(60):
            while not (tmp_path / "up").exists():  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await process.stop()
        return process.exit_code

    assert asyncio.run(main()) == -signal.SIGKILL


async def test_children_of_a_server_that_died_are_ended(tmp_path: Path) -> None:
    spawn = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {SLEEP!r}]); "
    config = configured(
        server_command=[sys.executable, "-c", spawn + f"open('{tmp_path}/pid', 'w').write(str(p.pid))"]
    )
    process = await ServerProcess.start(config, 0, "127.0.0.1", tmp_path)
    assert await asyncio.wait_for(process.wait_ended(), 60) == 0
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_states_of_convolutions_are_in_the_models_type_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SGLANG_MAMBA_CONV_DTYPE", raising=False)
    assert server_environment(configured())["SGLANG_MAMBA_CONV_DTYPE"] == configured().model.dtype
    assert server_environment(configured())["PATH"] == os.environ["PATH"]
    monkeypatch.setenv("SGLANG_MAMBA_CONV_DTYPE", "float16")
    assert server_environment(configured())["SGLANG_MAMBA_CONV_DTYPE"] == "float16"


@pytest.mark.parametrize("train_vision", [False, True])
def test_outputs_of_a_tower_that_trains_are_not_cached_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, train_vision: bool
) -> None:
    """A server would use outputs of earlier versions: tests/sglang/test_images.py."""
    monkeypatch.delenv("SGLANG_VLM_CACHE_SIZE_MB", raising=False)
    config = configured()
    model = msgspec.structs.replace(config.model, train_vision=train_vision)
    config = msgspec.structs.replace(config, model=model)
    expected_size = "0" if train_vision else None
    assert server_environment(config).get("SGLANG_VLM_CACHE_SIZE_MB") == expected_size

    monkeypatch.setenv("SGLANG_VLM_CACHE_SIZE_MB", "50")
    assert server_environment(config)["SGLANG_VLM_CACHE_SIZE_MB"] == "50"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_server_in_float32_may_not_round_to_tf32_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    variables = ("NVIDIA_TF32_OVERRIDE", "TRITON_F32_DEFAULT")
    for name in variables:
        monkeypatch.delenv(name, raising=False)
    config = configured()
    config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, dtype=dtype))
    expected = ("0", "ieee") if dtype == "float32" else (None, None)
    assert tuple(map(server_environment(config).get, variables)) == expected

    monkeypatch.setenv("TRITON_F32_DEFAULT", "tf32")
    assert server_environment(config)["TRITON_F32_DEFAULT"] == "tf32"
