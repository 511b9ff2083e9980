"""The two lanes of a visit to a GPU machine, with steps that fail in every way (gpu_kit/visit.py), and what
is packed for it (gpu_kit/pack_visit.py)."""

from __future__ import annotations

import ast
import asyncio
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import Qwen3Config

from asyncrl.config import parse
from asyncrl.config.composition import compose
from asyncrl.engines.sglang.process import server_command
from asyncrl.trainer.footprint import footprint
from asyncrl.weights.trained_tensors import parameter_count
from tests.fakes.scripts import script

pytestmark = pytest.mark.slow

KIT = Path(__file__).parents[2] / "tools" / "gpu_kit"
CHILD = "subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE, start_new_session=True)"
FAKES = f"""
import os, signal, subprocess, sys, threading
from contextlib import contextmanager
from pathlib import Path
from parts.common import Finding

OUT = Path(__file__).parent / "out"
CACHE = Path(__file__).parent / "visit/state/caches/inductor/kernel"

@contextmanager
def alone(context):
    lock = context.work.parent / "taken"
    os.close(os.open(lock, os.O_CREAT | os.O_EXCL))
    yield
    lock.unlink()

def fine(context):
    with alone(context):
        yield Finding("one", "1", "1", True)

def misses(context): yield Finding("one", "2", "1", False)
def crashes(context): yield Finding("one", 1 / 0)
def dies(context): yield Finding("one", "1"); os._exit(3)
def hangs(context): yield Finding("pid", str({CHILD}.pid)); threading.Event().wait()

def meets_reading(context):
    with alone(context), (OUT.parent / "meeting").open("rb") as meeting:
        yield Finding("heard", meeting.read().decode())

def meets_writing(context):
    (OUT.parent / "meeting").write_bytes(b"of the other lane")
    yield Finding("GPUs", os.environ["CUDA_VISIBLE_DEVICES"])

def reads(context):
    yield Finding("first", "is known")
    yield Finding("on disk", str("is known" in (OUT / "results.jsonl").read_text()))

def keeps(context):
    for size in (100, 5000):
        folder = context.work / "keep"
        folder.mkdir(exist_ok=True)
        (folder / f"{{size}}").write_bytes(os.urandom(size))
        if context.work.name == "small":
            break
    yield Finding("kept", "1")

def compiles(context):
    CACHE.parent.mkdir(parents=True)
    CACHE.write_bytes(os.urandom(2000))
    yield Finding("compiled", CACHE.read_bytes().hex())

def compiles_too_much(context):
    kernel = CACHE.parents[1] / "sglang/kernel"
    kernel.parent.mkdir(parents=True)
    kernel.write_bytes(os.urandom(5000))
    yield Finding("compiled", "too much")

def ends_the_call(context):
    yield Finding("one", "1")
    os.kill(int(os.environ["DRIVER"]), signal.SIGTERM)
    threading.Event().wait()

def finds(context):
    yield Finding("compiled", CACHE.read_bytes().hex() if CACHE.exists() else "nothing")
"""
DRIVE = """
import os, sys, visit
os.environ["DRIVER"] = str(os.getpid())
visit.FILE_BYTES, visit.CACHE_FILE_BYTES, visit.CACHE_FILES = 2000, 1000, 3
steps = [visit.Step(name, lane, f"fakes:{function}", float(seconds), least=float(seconds) / 2)
         for name, lane, function, seconds in (word.split(",") for word in sys.argv[1:])]
sys.exit(visit.main(["T", "--out", "out", "--folder", "visit"], calls={"T": visit.Call(60.0, tuple(steps))},
                    prepare=lambda folder, state: None))
"""


def drive(folder: Path, *steps: str) -> tuple[int, list[dict[str, Any]]]:
    """Exit code and results of a call of these steps, `NAME,LANE,FUNCTION,SECONDS` each."""
    (folder / "parts").mkdir(exist_ok=True)
    for name in ("check.py", "visit.py", "parts/__init__.py", "parts/common.py"):
        shutil.copy(KIT / name, folder / name)
    (folder / "fakes.py").write_text(FAKES)
    (folder / "drive.py").write_text(DRIVE)
    shutil.rmtree(folder / "out", ignore_errors=True)
    command = [sys.executable, "drive.py", *steps]
    code = subprocess.run(command, cwd=folder, timeout=50, capture_output=True).returncode
    return code, [json.loads(line) for line in (folder / "out/results.jsonl").read_text().splitlines()]


def ends(lines: list[dict[str, Any]]) -> dict[str, str]:
    return {line["step"]: line["state"] for line in lines if line["event"] == "end" and "state" in line}


def values(lines: list[dict[str, Any]], step: str) -> list[str]:
    return [line["value"] for line in lines if (line["step"], line["event"]) == (step, "finding")]


def test_a_step_over_its_limit_is_killed_with_its_children_and_no_step_ends_the_next(tmp_path: Path) -> None:
    names = ["hangs", "crashes", "dies", "misses", "fine"]
    seconds = {"hangs": 1.0}
    code, lines = drive(tmp_path, *(f"{name},exclusive,{name},{seconds.get(name, 20)}" for name in names))
    failed = {"hangs": "killed", "crashes": "failed", "dies": "ended with 3"}
    assert code == 1 and ends(lines) == failed | {"misses": "done", "fine": "done"}
    for child in values(lines, "hangs"):  # none, if the machine was too busy to start it within the limit
        with pytest.raises(ProcessLookupError):
            os.kill(int(child), 0)
    assert "ZeroDivisionError" in values(lines, "crashes")[0]


def test_lanes_run_beside_each_other_and_exclusive_steps_never(tmp_path: Path) -> None:
    """Each exclusive step fails if another one is under way; the fifo lets neither lane's step end alone."""
    os.mkfifo(tmp_path / "meeting")
    exclusive = [f"{number},exclusive,fine,20" for number in range(3)]
    both = ["reader,exclusive,meets_reading,20", "writer,shared,meets_writing,20"]
    code, lines = drive(tmp_path, *both, *exclusive)
    assert code == 0 and set(ends(lines).values()) == {"done"}
    assert values(lines, "reader") == ["of the other lane"] and values(lines, "writer") == [""]


def test_a_finding_is_on_disk_before_the_step_goes_on(tmp_path: Path) -> None:
    code, lines = drive(tmp_path, "reads,exclusive,reads,20", "none,exclusive,fine,100")
    assert values(lines, "reads") == ["is known", "True"]
    assert code == 1, "a step without time counts as not run"
    assert ends(lines)["none"] == "not run"
    assert script("visit", "gpu_kit").succeeded({"state": "left out"}), "one that is optional does not"


def test_what_is_too_large_to_come_back_is_left_out_and_named(tmp_path: Path) -> None:
    _, lines = drive(tmp_path, "small,exclusive,keeps,20", "large,exclusive,keeps,20")
    left_out = [(line["step"], line["file"]) for line in lines if line["event"] == "left out"]
    assert left_out == [("large", "large.tar.gz")]
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "results.jsonl",
        "log.txt",
        "small.tar.gz",
    }


@pytest.mark.parametrize("missing", [0, 1])
def test_caches_of_a_visit_are_there_in_the_next(tmp_path: Path, missing: int) -> None:
    first = tmp_path / "first"
    second = tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    _, lines = drive(first, "compiles,shared,compiles,20")
    files = sorted((first / "out").glob("caches-*"))
    assert len(files) == 3
    (second / "visit/caches").mkdir(parents=True)
    for file in files[missing:]:
        shutil.copy(file, second / "visit/caches")
    _, again = drive(second, "finds,shared,finds,20")
    assert values(again, "finds") == (["nothing"] if missing else values(lines, "compiles"))
    assert next(line["event"] for line in again if line["step"] == "caches") == (
        "left out" if missing else "unpacked"
    )


def test_of_caches_that_are_too_large_those_of_the_trainer_come_back(tmp_path: Path) -> None:
    first = tmp_path / "first"
    second = tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    _, lines = drive(first, "compiles,shared,compiles,20", "more,shared,compiles_too_much,20")
    about = [(line["event"], line.get("file")) for line in lines if line["step"] == "caches"]
    assert about == [("left out", "sglang"), ("packed", None)]
    (second / "visit/caches").mkdir(parents=True)
    for file in (first / "out").glob("caches-*"):
        shutil.copy(file, second / "visit/caches")
    _, again = drive(second, "finds,shared,finds,20")
    assert values(again, "finds") == values(lines, "compiles")


def test_a_signal_ends_the_step_under_way_and_the_call_and_what_is_known_stays(tmp_path: Path) -> None:
    code, lines = drive(tmp_path, "first,exclusive,ends_the_call,20", "second,exclusive,fine,20")
    assert code == 1 and ends(lines) == {"first": "killed"} and values(lines, "first") == ["1"]
    assert [line["event"] for line in lines if line["step"] == "call"] == ["begin", "end"]


def test_a_second_call_at_the_same_time_is_refused(tmp_path: Path) -> None:
    visit = script("visit", "gpu_kit")
    (tmp_path / "visit/state").mkdir(parents=True)
    with (tmp_path / "visit/state/lock").open("w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        line = [sys.executable, KIT / "visit.py", "A", "--device", "cpu", "--folder", tmp_path / "visit"]
        refused = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 1 and "another call is under way" in refused.stderr
    with visit.alone(tmp_path / "visit/state"):
        pass


def test_a_call_goes_on_without_git_and_without_the_driver_s_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    visit = script("visit", "gpu_kit")
    slow = tmp_path / "nvidia-smi"
    slow.write_text("#!/bin/sh\nexit 3\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    about = visit.described(SimpleNamespace(device="cuda"))
    assert (about["gpu"], about["revision"], about["device"]) == ("", "", "cuda")


def test_loads_are_filled_with_the_largest_files_first() -> None:
    spread = script("pack_visit", "gpu_kit").spread
    assert spread([3, 40, 28, 40, 2], first=32, limit=50) == [0, 1, 0, 2, 1]
    with pytest.raises(ValueError, match="60 bytes"):
        spread([60], first=32, limit=50)


def test_steps_of_calls_are_functions_of_the_kit() -> None:
    visit = script("visit", "gpu_kit")
    for call in visit.CALLS.values():
        for step in call.steps:
            module, _, name = step.function.partition(":")
            tree = ast.parse((KIT / f"{module.replace('.', '/')}.py").read_text())
            assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, step
        longest = max(sum(step.least for step in steps) for steps in call.lanes().values())
        assert longest < call.seconds - visit.PACK_S


def test_no_step_of_a_call_has_the_name_of_a_folder_that_steps_share() -> None:
    """A step begins with an empty folder of its name, beside theirs."""
    sources = "".join(file.read_text() for file in (KIT / "parts").glob("*.py"))
    shared = set(re.findall(r'work\.parent / "([\w-]+)"', sources))
    steps = {step.name for call in script("visit", "gpu_kit").CALLS.values() for step in call.steps}
    assert shared >= {"models", "sglang-bundle"} and not shared & steps


def test_the_bundle_is_unpacked_once_and_nobody_sees_half_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = script("parts.bundle", "gpu_kit")
    (tmp_path / "site").mkdir()
    packed = tmp_path / "sglang.tar.xz"
    with tarfile.open(packed, "w:xz") as archive:
        archive.add(tmp_path / "site", "site")
    refused = []
    real_open = tarfile.open

    def opened(*paths: Any) -> tarfile.TarFile:
        with (tmp_path / "bundle.lock").open("w") as lock, pytest.raises(BlockingIOError) as error:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        refused.append(error)
        return real_open(*paths)

    monkeypatch.setattr(bundle.tarfile, "open", opened)
    for _ in range(2):
        folder = bundle.unpacked_bundle(packed, tmp_path / "bundle", time.monotonic() + 30.0)
        assert (folder / "site").is_dir()
    assert len(refused) == 1


def test_the_longest_silence_of_streams_is_the_longest_time_without_a_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = script("parts.server", "gpu_kit")
    clock = 0.0
    client = SimpleNamespace(use=SimpleNamespace(tokens=0))
    steps = iter([(0.5, 4), (0.5, 4), (2.0, 4), (0.25, 8), (1.0, 12)])  # seconds, and tokens by then
    stream: asyncio.Future[None]

    async def sleep(_: float) -> None:
        nonlocal clock
        try:
            seconds, client.use.tokens = next(steps)
        except StopIteration:
            stream.set_result(None)
            seconds = 50.0
        clock += seconds

    async def measure() -> float:
        nonlocal stream
        stream = asyncio.get_running_loop().create_future()
        silence: float = await server.longest_silence(client, [stream])
        return silence

    monkeypatch.setattr(server.time, "perf_counter", lambda: clock)
    monkeypatch.setattr(server.asyncio, "sleep", sleep)
    assert asyncio.run(measure()) == 2.75


def test_a_stage_of_the_server_that_hangs_is_ended_at_its_limit(tmp_path: Path) -> None:
    server = script("parts.server", "gpu_kit")
    context = server.Context("cuda", time.monotonic() + 100.0, tmp_path, tmp_path)

    async def hang() -> list[Any]:
        await asyncio.Event().wait()
        return []

    with asyncio.Runner() as runner, pytest.raises(TimeoutError, match="not over after 0 s"):
        server._finish(runner, context, server.Stage("hangs", 0.05, hang))


def test_memory_is_estimated_for_models_without_weights(tmp_path: Path) -> None:
    """Shapes come from a header of weights that are not there; longer rows take more."""
    steps = script("parts.steps", "gpu_kit")
    mfu = script("parts.mfu", "gpu_kit")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 640}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    steps.write_sizes(Qwen3Config(**sizes, **heads, tie_word_embeddings=True), tmp_path)
    attention = 64 * (64 + 32 + 32 + 64) + 2 * 16
    mlp = 3 * 64 * 128
    parameters = 640 * 64 + 2 * (attention + mlp + 2 * 64) + 64
    assert parameter_count(str(tmp_path)) == parameters
    model = {"path": str(tmp_path), "dtype": "bfloat16", "device": "cpu"}
    config = parse({"name": "x", "model": model, "data": {"train": "none"}})
    short, long = (footprint(mfu.of_shape(config, mfu.Shape("", 1, length))).total for length in (1024, 4096))
    assert 16 * parameters < short < long


@pytest.mark.parametrize(
    ("kind", "allocated", "ok"), [("cuda", 100e9, True), ("cuda", 80e9, False), ("cpu", 0.0, None)]
)
def test_allocated_memory_is_judged_beside_the_estimate(
    tmp_path: Path, kind: str, allocated: float, ok: bool | None
) -> None:
    common = script("parts.common", "gpu_kit")
    context = common.Context(kind, 0.0, tmp_path, tmp_path)
    assert common.memory("step", allocated, 95e9, context).ok is ok


GOOD: dict[str, Any] = {
    "success_before": 0.15,
    "success_after": 0.9,
    "greedy_before": 0.2,
    "greedy_after": 1.0,
    "flow": {"issued": 400, "trained": 384, "dropped": 16, "failed": 0},
    "conserved": True,
    "steps": 12,
    "skipped_steps": 0,
    "logprob_diff_max_same_version": 0.3,
    "logprob_tokens_compared": 9000,
    "k3_same_version": 0.004,
    "probe_logprob_diff_max": 0.06,
    "probe_noise_floor": 0.05,
}


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        ({}, []),
        ({"success_after": 0.5}, ["held out"]),
        ({"success_before": 0.5}, ["held out"]),
        ({"success_after": None}, ["held out"]),
        ({"conserved": False}, ["account of episodes"]),
        ({"flow": {"issued": 400, "trained": 384}}, ["account of episodes"]),
        ({"steps": 11}, ["steps"]),
        ({"skipped_steps": 1}, ["steps"]),
        ({"k3_same_version": 0.1}, ["log-probs at one version"]),
        ({"probe_logprob_diff_max": 0.2}, ["log-probs at one version"]),
        ({"logprob_tokens_compared": 0}, ["log-probs at one version"]),
    ],
)
def test_what_a_run_of_server_and_trainer_must_have_reached(
    tmp_path: Path, changed: dict[str, Any], missed: list[str]
) -> None:
    runs = script("parts.runs", "gpu_kit")
    context = runs.Context("cuda", 0.0, tmp_path, tmp_path)
    findings = list(runs.judged(context, runs.Way("asynchronous", 12, 128), GOOD | changed))
    assert [finding.name for finding in findings if not finding.ok] == [
        f"asynchronous: {name}" for name in missed
    ]


def pack_bundle(folder: Path, launcher: str) -> Path:
    """Write a bundle with a launcher and no packages."""
    (folder / "site").mkdir(parents=True, exist_ok=True)
    (folder / "launch_gpu.py").write_text(launcher)
    with tarfile.open(folder / "sglang.tar.xz", "w:xz") as archive:
        for name in ("site", "launch_gpu.py"):
            archive.add(folder / name, name)
    return folder / "sglang.tar.xz"


def test_a_newer_bundle_and_a_newer_launcher_replace_what_an_earlier_call_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two calls on one machine: first the launcher of the checkout changes, then the bundle."""
    bundle = script("parts.bundle", "gpu_kit")
    launcher = tmp_path / "launch_gpu.py"
    monkeypatch.setattr(bundle, "CHECKOUT_LAUNCHER", launcher)
    context = bundle.Context("cuda", time.monotonic() + 30.0, tmp_path / "work" / "server", tmp_path / "kit")
    context.work.mkdir(parents=True)

    def launcher_text() -> str:
        command = bundle.server_command(context)
        assert command is not None
        return Path(command[3]).read_text()

    pack_bundle(tmp_path / "kit", "print('of the first bundle')")
    assert launcher_text() == "print('of the first bundle')"
    launcher.write_text("print('of the checkout')")
    assert launcher_text() == "print('of the checkout')"

    launcher.unlink()
    pack_bundle(tmp_path / "kit", "print('of the second bundle')")
    half_unpacked = tmp_path / "work" / "sglang-bundle" / "0123.unfinished"
    half_unpacked.mkdir()
    assert launcher_text() == "print('of the second bundle')"
    assert len(list((tmp_path / "work" / "sglang-bundle").iterdir())) == 1


def test_the_launcher_of_a_checkout_is_the_one_that_is_packed() -> None:
    bundle = script("parts.bundle", "gpu_kit")
    packer = script("pack", "gpu_kit/sglang_bundle")
    assert bundle.CHECKOUT_LAUNCHER == packer.HERE / bundle.LAUNCHER
    assert bundle.CHECKOUT_LAUNCHER.exists()


def test_a_part_does_not_wait_longer_than_its_time_for_another_that_unpacks(tmp_path: Path) -> None:
    bundle = script("parts.bundle", "gpu_kit")
    packed = pack_bundle(tmp_path, "")
    with (tmp_path / "unpacked.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match="another process still unpacks"):
            bundle.unpacked_bundle(packed, tmp_path / "unpacked", time.monotonic() + 0.1)


# -- a server that fails in the kit ------------------------------------------------------------------------


def test_a_deadline_within_a_stage_keeps_its_own_words(tmp_path: Path) -> None:
    server = script("parts.server", "gpu_kit")
    context = server.Context("cuda", time.monotonic() + 100.0, tmp_path, tmp_path)

    async def push() -> list[Any]:
        raise TimeoutError("a version was not written within 20 s")

    with asyncio.Runner() as runner, pytest.raises(TimeoutError, match="a version was not written"):
        server._finish(runner, context, server.Stage("update", 10.0, push))


class FailingPair:
    """A server and a trainer of the kit whose first starts fail."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.calls: list[str] = []

    async def start(self) -> list[Any]:
        self.calls.append("start")
        if self.calls.count("start") <= self.failures:
            raise RuntimeError("CUDA graphs need more memory")
        return []

    async def stop_server(self) -> None:
        self.calls.append("stop")

    def leave_out_cuda_graphs(self) -> None:
        self.calls.append("no graphs")


@pytest.mark.parametrize(
    ("kind", "seconds_left", "failures", "calls", "fails"),
    [
        ("cuda", 100.0, 0, ["start"], False),
        ("cuda", 100.0, 1, ["start", "stop", "no graphs", "start"], False),
        ("cuda", 100.0, 2, ["start", "stop", "no graphs", "start"], True),
        ("cuda", 10.0, 1, ["start"], True),
        ("cpu", 100.0, 1, ["start"], True),
    ],
)
def test_a_server_that_does_not_start_is_started_once_more_without_cuda_graphs(
    tmp_path: Path, kind: str, seconds_left: float, failures: int, calls: list[str], fails: bool
) -> None:
    server = script("parts.server", "gpu_kit")
    context = server.Context(kind, time.monotonic() + seconds_left, tmp_path, tmp_path)
    pair = FailingPair(failures)
    findings = []
    failed = False
    with asyncio.Runner() as runner:
        try:
            findings += server._start(runner, context, pair)
        except RuntimeError:
            failed = True
    assert pair.calls == calls and failed == fails
    if calls[1:] and not fails:
        assert [(finding.name, finding.ok) for finding in findings] == [
            ("start", False),
            ("second start", None),
        ]


def test_streams_of_a_stage_that_fails_do_not_go_on(tmp_path: Path) -> None:
    """A load that fails in the midst of streams: they would be in the server's batch in the next stage."""
    server = script("parts.server", "gpu_kit")
    pair = object.__new__(server.ServerAndTrainer)
    client = SimpleNamespace(use=SimpleNamespace(tokens=0))
    streams: list[asyncio.Task[None]] = []

    async def stream() -> None:
        client.use.tokens += server.BEGUN
        await asyncio.Event().wait()

    def begin(_: Any, tokens: int) -> list[asyncio.Task[None]]:
        streams.extend(asyncio.create_task(stream()) for _ in range(2))
        return streams

    async def load() -> None:
        async with pair.open_streams(client, 10):
            assert not any(stream.done() for stream in streams)
            raise RuntimeError("the server refuses the version")

    async def states() -> list[bool]:
        with pytest.raises(RuntimeError, match="refuses"):
            await load()
        return [stream.cancelled() for stream in streams]

    pair.streams = begin
    assert asyncio.run(states()) == [True, True]


def test_a_server_that_hangs_does_not_keep_the_part_from_its_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its loader waits for the end of a pause that the server never answers."""
    server = script("parts.server", "gpu_kit")
    monkeypatch.setattr(server, "CLOSE_S", 0.05)
    ended: list[str] = []

    async def stop() -> None:
        ended.append("process")

    async def close() -> None:
        await asyncio.Event().wait()

    pair = object.__new__(server.ServerAndTrainer)
    pair.clients = []
    pair.process = SimpleNamespace(stop=stop)
    pair.loader = SimpleNamespace(close=close)
    pair.publisher = SimpleNamespace(close=lambda: ended.append("publisher"))

    async def end() -> None:
        async with asyncio.timeout(10.0):
            await pair.close()

    asyncio.run(end())
    assert ended == ["process", "publisher"]
    assert "has not ended" in capsys.readouterr().out


# -- arguments that only a GPU machine uses ----------------------------------------------------------------

SGLANG_PYTHON = KIT.parents[1] / ".venv-sglang" / "bin" / "python"
PARSE = """
import argparse, json, sys
import launch_gpu
launch_gpu.declare_torchvision_operators()  # or SGLang cannot import a torchvision without its libraries
from sglang.srt.server_args import ServerArgs

parser = argparse.ArgumentParser(allow_abbrev=False)
ServerArgs.add_cli_args(parser)
names = "attention_backend cuda_graph_backend_decode mem_fraction_static enable_memory_saver max_lora_rank"
for words in json.loads(sys.stdin.read()):
    parsed = vars(parser.parse_args(launch_gpu.ARGUMENTS + words))
    print(json.dumps([parsed[name] for name in names.split()]))
"""


@pytest.mark.skipif(not SGLANG_PYTHON.exists(), reason="needs make sglang-cpu, for SGLang's parser")
def test_sglang_parses_the_arguments_of_servers_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rehearsal on a CPU has other arguments: nothing else reads these before a GPU machine does."""
    server = script("parts.server", "gpu_kit")
    steps = script("parts.steps", "gpu_kit")
    end_to_end = script("parts.end_to_end", "gpu_kit")
    context = server.Context("cuda", time.monotonic() + 100.0, tmp_path, tmp_path)
    model = tmp_path / "model"
    steps.write_sizes(Qwen3Config(num_hidden_layers=1, vocab_size=640, hidden_size=64), model)
    monkeypatch.setattr(server, "saved_model", lambda context: model)
    configs = [server._configuration(context, ["server"], rank, saver=not rank) for rank in (0, server.RANK)]
    pair = object.__new__(server.ServerAndTrainer)
    pair.config = configs[0]
    pair.leave_out_cuda_graphs()
    configs.append(pair.config)

    trained: list[list[str]] = []

    class Recorded:
        def __init__(self, line: list[str], **_: Any) -> None:
            trained.append(line[line.index("train") + 1 :])

        def wait(self, seconds: float) -> int:
            return 0

    with monkeypatch.context() as patched:
        patched.setattr(end_to_end.subprocess, "Popen", Recorded)
        for way in (end_to_end.ASYNCHRONOUS, end_to_end.SYNCHRONOUS, end_to_end.SHIFTS):
            end_to_end.asyncrl(context, way, model, ["server"])
    configs += [compose(overrides) for overrides in trained]

    words = [server_command(config, 0, "127.0.0.1", 30000, gpus=1)[1:] for config in configs]
    run = subprocess.run(
        [SGLANG_PYTHON, "-c", PARSE],
        input=json.dumps(words),
        env=os.environ | {"PYTHONPATH": str(KIT / "sglang_bundle"), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    parsed = [json.loads(line) for line in run.stdout.splitlines()]
    assert parsed[:3] == [
        ["triton", None, 0.3, True, None],
        ["triton", None, 0.3, False, 8],
        ["triton", "disabled", 0.3, True, None],
    ]
    assert [(row[0], row[3]) for row in parsed[3:]] == [
        ("triton", False),
        ("triton", False),
        ("triton", True),
    ]


# -- what the calls of a visit carry -----------------------------------------------------------------------


def test_a_bundle_that_is_older_than_its_sources_is_not_packed(tmp_path: Path) -> None:
    packer = script("pack_visit", "gpu_kit")
    bundle = tmp_path / "sglang.tar.xz"
    source = tmp_path / "requirements.txt"
    source.touch()
    packer.check_bundle(bundle, [source])
    bundle.touch()
    os.utime(source, ns=(0, bundle.stat().st_mtime_ns))
    packer.check_bundle(bundle, [source])

    os.utime(source, ns=(0, bundle.stat().st_mtime_ns + 1))
    with pytest.raises(
        SystemExit, match=r"sglang.tar.xz is older than requirements.txt: make gpu-kit-sglang"
    ):
        packer.check_bundle(bundle, [source])


def test_sources_of_the_bundle_are_all_files_that_go_into_it() -> None:
    packer = script("pack_visit", "gpu_kit")
    files = {path.name for path in (KIT / "sglang_bundle").iterdir() if path.is_file()}
    assert {path.name for path in packer.BUNDLE_SOURCES} == files - {"launch_gpu.py"}


@pytest.mark.skipif(not (KIT.parents[1] / ".git").exists(), reason="needs git, which knows what travels")
def test_a_call_may_carry_a_load_the_checkout_and_all_caches_that_a_visit_brings_back() -> None:
    packer = script("pack_visit", "gpu_kit")
    visit = script("visit", "gpu_kit")
    caches = visit.CACHE_FILES * visit.CACHE_FILE_BYTES
    assert packer.checkout_bytes() <= packer.CHECKOUT_BYTES
    assert packer.CHECKOUT_BYTES + packer.FIRST_BYTES + caches <= packer.CALL_BYTES
    assert packer.CHECKOUT_BYTES + packer.LOAD_BYTES <= packer.CALL_BYTES


def test_the_first_call_carries_the_caches_and_a_call_with_too_much_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    packer = script("pack_visit", "gpu_kit")
    monkeypatch.setattr(packer, "ROOT", tmp_path)
    monkeypatch.setattr(packer, "checkout_bytes", lambda: 100)
    monkeypatch.setattr(packer, "CALL_BYTES", 110)
    for name in ("load-1", "load-2", "caches"):
        (tmp_path / "build" / name).mkdir(parents=True)
        (tmp_path / "build" / name / "file").write_bytes(bytes(5))
    assert packer.print_calls(tmp_path / "build")
    output = capsys.readouterr()
    assert 'carry ["build/load-1", "build/caches"]: ' in output.out and not output.err
    assert 'carry ["build/load-2"]: ' in output.out

    (tmp_path / "build" / "caches" / "more").write_bytes(bytes(1))
    assert not packer.print_calls(tmp_path / "build")
    assert "over the 0 MiB of a call" in capsys.readouterr().err
