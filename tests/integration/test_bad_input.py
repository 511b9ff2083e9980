"""Bad input through the real command line: exit code 2, one line that helps, nothing started."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl import cli
from asyncrl.weights.disk import SHARED_MEMORY
from tests.fakes.chatml import save_tiny_chat_model
from tests.fakes.forked import FORKED

ROOT = Path(__file__).resolve().parents[2]
MARK = "ASYNCRL_TEST_MARK"


class Inputs:
    """A good run's inputs, for a case to spoil."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, folder / "model"
        shutil.copytree(model, self.model)
        self.train = folder / "train.parquet"
        self.write(rows(40))
        self.runs = folder / "runs"

    def write(self, table: list[dict[str, object]]) -> None:
        pq.write_table(pa.Table.from_pylist(table), self.train)

    def edit(self, name: str, **values: object) -> None:
        path = self.model / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    @property
    def overrides(self) -> list[str]:
        return [
            *("name=x", f"run_dir={self.runs}", f"model.path={self.model}"),
            *(f"data.train={self.train}", "rollout.max_tokens=300", "rollout.max_new_tokens=16"),
        ]


def rows(count: int, **more: object) -> list[dict[str, object]]:
    row: dict[str, object] = {
        "data_source": "d",
        "prompt": [{"role": "user", "content": "1 + 1?"}],
        "reward_model": {"style": "rule", "ground_truth": "2"},
    }
    return [row | more for _ in range(count)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(save_tiny_chat_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def inputs(tmp_path: Path, model: Path) -> Inputs:
    return Inputs(tmp_path, model)


def train(
    folder: Path, *arguments: str, cwd: Path = ROOT, command: str = "train"
) -> tuple[subprocess.CompletedProcess[str], list[int]]:
    """`asyncrl train`, and what it left running; in a fork of a process that has the imports behind it, which
    are most of a refusal's time."""
    arguments = (command, *arguments)
    mark, files = uuid.uuid4().hex, (folder / "stdout", folder / "stderr")
    process = FORKED.Process(target=_run, args=(arguments, mark, files, cwd))
    process.start()
    process.join(240)
    assert process.exitcode is not None, "it did not end"
    out, err = (file.read_text() for file in files)
    return subprocess.CompletedProcess(arguments, process.exitcode, out, err), left_by(mark)


def _run(arguments: tuple[str, ...], mark: str, files: tuple[Path, Path], cwd: Path) -> NoReturn:
    os.environ[MARK] = mark
    os.chdir(cwd)
    for descriptor, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), descriptor)
    sys.exit(cli.main(list(arguments)))


def left_by(mark: str) -> list[int]:
    return [p.pid for p in psutil.process_iter() if _environment(p).get(MARK) == mark]


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}


def refused(done: subprocess.CompletedProcess[str], left: list[int], *says: str) -> None:
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 2, done.stderr
    assert len(lines) == 1 and lines[0].startswith("asyncrl: "), done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert not left
    for text in says:
        assert text in lines[0]


Spoil = Callable[[Inputs], list[str]]


def removing(name: str) -> Spoil:
    def spoil(inputs: Inputs) -> list[str]:
        (inputs.model / name).unlink()
        return []

    return spoil


def data(table: list[dict[str, object]]) -> Spoil:
    def spoil(inputs: Inputs) -> list[str]:
        inputs.write(table)
        return []

    return spoil


def garbage(inputs: Inputs) -> list[str]:
    inputs.train.write_bytes(b"PAR1 no, not really")
    return []


def empty(inputs: Inputs) -> list[str]:
    pq.write_table(pq.read_table(inputs.train).slice(0, 0), inputs.train)
    return []


def existing(inputs: Inputs) -> list[str]:
    (inputs.runs / "x").mkdir(parents=True)
    (inputs.runs / "x" / "config.yaml").write_text("{}")
    return []


def begun_otherwise(inputs: Inputs) -> list[str]:
    (inputs.runs / "x").mkdir(parents=True)
    (inputs.runs / "x" / "config.yaml").write_text("seed: 7")
    return ["resume=auto"]


def under_a_file(inputs: Inputs) -> list[str]:
    inputs.runs.write_text("a file")
    return []


def short_context(inputs: Inputs) -> list[str]:
    inputs.edit("config.json", max_position_embeddings=64)
    return []


def broken_config(inputs: Inputs) -> list[str]:
    (inputs.model / "config.json").write_text("{")
    return []


def raising_reward(inputs: Inputs) -> list[str]:
    (inputs.folder / "reward.py").write_text("raise RuntimeError('import fails')")
    return [f"rollout.reward={inputs.folder / 'reward.py'}:f"]


def no_room(inputs: Inputs) -> list[str]:
    free = shutil.disk_usage(SHARED_MEMORY).free
    with (inputs.model / "model.safetensors").open("r+b") as sparse:
        sparse.truncate(free + 1)
    return ["weights.directory=shm"]


def setting(*overrides: str) -> Spoil:
    return lambda inputs: list(overrides)


CASES: dict[str, tuple[Spoil, tuple[str, ...]]] = {
    "unknown key": (setting("trainer.lrr=1"), ("unknown key trainer.lrr", "trainer.lr")),
    "out of bounds": (setting("buffer.max_staleness=-1"), ("buffer.max_staleness",)),
    "wrong type": (setting("total_steps=many"), ("total_steps",)),
    "bad combination": (setting("algorithm.correction={}"), ("max_staleness=0",)),
    "unknown choice": (setting("algorithm=drgpo"), ("algorithm", "dr_grpo")),
    "bad syntax": (setting("rollout.tools=[calculator"), ("rollout.tools",)),
    "missing value": (setting("data.train=???"), ("data.train has no value",)),
    "no model": (setting("model.path=nowhere"), ("model.path", "nowhere")),
    "no config": (removing("config.json"), ("config.json",)),
    "broken config": (broken_config, ("config.json", "JSON")),
    "no weights": (removing("model.safetensors"), ("safetensors",)),
    "no tokenizer": (removing("tokenizer.json"), ("tokenizer.json",)),
    "no chat template": (removing("chat_template.jinja"), ("chat template",)),
    "short context": (short_context, ("rollout.max_tokens", "64")),
    "no data": (setting("data.train=nowhere.parquet"), ("nowhere.parquet",)),
    "malformed data": (garbage, ("train.parquet", "not readable as parquet")),
    "missing column": (data([{"data_source": "d", "text": "q"}]), ("no column prompt",)),
    "unknown role": (data(rows(40, prompt=[{"role": "bot", "content": "?"}])), ("sample 0", "role 'bot'")),
    "no ground truth": (data(rows(40, reward_model={"style": "rule"})), ("sample 0", "final_number")),
    "long prompts": (data(rows(40, prompt="1 plus 1? " * 300)), ("all prompts", "more than 284 tokens")),
    "empty data": (empty, ("empty",)),
    "a tool that is not there": (
        data(rows(40, extra_info={"tools": ["weather"]})),
        ("sample 0", "weather", "rollout.tools"),
    ),
    "less than a batch": (data(rows(31)), ("31 samples", "groups_per_batch (32)")),
    "no test data": (setting("data.test=nowhere.parquet"), ("nowhere.parquet",)),
    "unknown tool": (setting("rollout.tools=[calculatr]"), ("unknown tool", "calculator")),
    "unknown tool argument": (
        setting("rollout.tools=[calculator]", "rollout.tool_args.calculator.speed=3"),
        ("calculator", "speed"),
    ),
    "arguments of no tool": (setting("rollout.tool_args.calculator.latency_mean=1"), ("rollout.tools",)),
    "unknown reward": (setting("rollout.reward=final_numbr"), ("unknown reward", "final_number")),
    "raising reward": (raising_reward, ("import fails",)),
    "missing function": (setting("rollout.reward=json:lodas"), ("lodas", "loads")),
    "unknown parser": (setting("rollout.parser=hermse"), ("hermes",)),
    "unknown engine": (setting("engine.name=troch"), ("unknown engine", "torch")),
    "no server at the URL": (
        setting("engine=sglang", "engine.urls=[http://127.0.0.1:9]"),
        ("engine.urls", "http://127.0.0.1:9"),
    ),
    "two names of a server": (
        setting("engine=sglang", "engine.urls=[http://h:1,http://h:1/]"),
        ("engine.urls", "twice"),
    ),
    "a key that is not there": (
        setting("engine=sglang", "engine.api_key_env=ASYNCRL_NO_SUCH_KEY"),
        ("engine.api_key_env", "ASYNCRL_NO_SUCH_KEY is not set"),
    ),
    "no SGLang": (setting("engine=sglang"), ("sglang", "not installed", "engine.urls")),
    "no server command": (
        setting("engine=sglang", "engine.server_command=[/nowhere/python]"),
        ("engine.server_command", "/nowhere/python"),
    ),
    "broadcast without servers": (setting("weights.transport=collective"), ("engine=sglang",)),
    "unknown advantage": (setting("algorithm.advantage=gprpo"), ("unknown advantage", "grpo")),
    "unknown loss": (setting("algorithm.loss=reinforced"), ("unknown loss", "reinforce")),
    "uninstalled tracker": (setting("observe.trackers=[swanlab]"), ("asyncrl[swanlab]",)),
    "existing run": (existing, ("resume=auto",)),
    "resumed otherwise": (begun_otherwise, ("seed", "begun with 7", "with 0", "seed=7")),
    "nothing to resume": (setting("resume=must"), ("resume=must",)),
    "unwritable run directory": (under_a_file, ("run_dir",)),
    "no such place": (setting("run_dir=/proc/asyncrl"), ("run_dir",)),
    "name with a slash": (setting("name=a/b"), ("name",)),
    "name of 300 characters": (setting(f"name={300 * 'a'}"), ("name", "200 bytes")),
    "name of two lines": (setting("name='a\nb'"), ("name",)),
    "path of 300 characters": (setting(f"model.path={300 * 'a'}"), ("File name too long", "aaaa")),
    "no Ray cluster": (
        setting("launch=ray", "launch.ray_address=auto"),
        ("launch.ray_address 'auto': no Ray cluster",),
    ),
    "nobody at the Ray address": (
        setting("launch=ray", "launch.ray_address='127.0.0.1:9'"),
        ("launch.ray_address '127.0.0.1:9'",),
    ),
    "no Ray address": (
        setting("launch=ray", "launch.ray_address=nonsense"),
        ("launch.ray_address 'nonsense'",),
    ),
    "no shared memory": (no_room, ("weights.directory=run",)),
    "no configuration directory": (setting("--config-dir=nowhere"), ("nowhere",)),
}


@pytest.mark.parametrize("case", CASES)
def test_is_refused_in_one_line(inputs: Inputs, case: str) -> None:
    if case == "uninstalled tracker" and importlib.util.find_spec("swanlab"):
        pytest.skip("swanlab is installed here")
    spoil, says = CASES[case]
    refused(*train(inputs.folder, *inputs.overrides, *spoil(inputs)), *says)
    assert not (inputs.runs / "x" / "logs").exists()


def test_a_port_in_use(inputs: Inputs) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused(*train(inputs.folder, *inputs.overrides, f"launch.port={port}"), str(port), "launch.port=0")


def test_a_run_in_use(inputs: Inputs) -> None:
    run = inputs.runs / "x"
    run.mkdir(parents=True)
    with (run / "lock").open("w") as lock:
        lock.write("4711")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused(*train(inputs.folder, *inputs.overrides), "4711")


def test_a_dry_run_starts_nothing_and_writes_nothing(inputs: Inputs) -> None:
    done, left = train(inputs.folder, *inputs.overrides, "--dry-run", "rollout.workers=2", cwd=inputs.folder)
    assert done.returncode == 0 and not left and not inputs.runs.exists()
    assert "max_staleness" not in done.stdout, "a default"
    assert any(line.split()[:3] == ["rollout", "2", "1"] for line in done.stdout.splitlines())


def test_the_doctor_of_good_input_writes_nothing_and_shows_what_the_model_reads(inputs: Inputs) -> None:
    done, left = train(inputs.folder, *inputs.overrides, cwd=inputs.folder, command="doctor")
    text = done.stdout
    assert done.returncode == 0 and not left and not inputs.runs.exists(), text
    assert text.endswith(" 0 error, 0 skipped\n") and "tensors of a trainer rank" in text
    assert "40 samples" in text and "<|im_start|>user" in text and "a turn ends with <|im_end|> (" in text
