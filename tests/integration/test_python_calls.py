"""Runs that Python starts: from scripts, from threads, and from a notebook's kernel that is killed."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from nbclient import NotebookClient

import asyncrl
from asyncrl.observe.files import read_rows
from tests.fakes.processes import wait_until
from tests.unit.launch.test_console_view import until

ROOT = Path(__file__).resolve().parents[2]
DEADLINE = 120.0
SMALL = {
    "buffer": {"groups_per_batch": 4, "episodes_per_group": 4},
    "rollout": {"slots": 32},
    "validation": {"samples": 8},
    "checkpoint": {"every": 3},
}


def row(first: int, second: int) -> dict[str, Any]:
    prompt = [{"role": "user", "content": f"Start with {first}, plus {second}."}]
    return {"prompt": prompt, "ground_truth": str(first + second), "extra_info": {"sum": first + second}}


SCRIPT = """\
import json
import sys
from pathlib import Path

import asyncrl
from tests.integration.test_python_calls import SMALL, row


def closeness(data_source, solution_str, ground_truth, extra_info):
    return {"score": float(ground_truth in solution_str), "known_sum": float(extra_info["sum"])}


if __name__ == "__main__":
    runs = Path(sys.argv[1])
    common = {"reward": closeness, "train": [row(n, 3) for n in range(8)], "run_dir": runs}
    run = asyncrl.train("experiment=calculator", SMALL, name="first", total_steps=2, **common)
    episodes = list(run.episodes(step=2))
    again = asyncrl.train(
        "experiment=calculator", SMALL, name="first", total_steps=3, resume="auto", test=[row(1, 2)], **common
    )
    result = again.evaluate([row(n, 5) for n in range(4)], episodes=2)
    same_result = again.evaluate([row(n, 5) for n in range(4)], {"total_steps": 60}, episodes=2)
    assert same_result == result  # read, not run again: the name depends on content
    exported = again.export(runs / "model")
    print(json.dumps({
        "ending": run.status().ending,
        "steps_in_metrics": len(run.metrics()["timing_s/step"].drop_null()),
        "reward": run.metrics()["critic/score/mean"].drop_null().to_pylist(),
        "sums": sorted({episode.components["known_sum"] for episode in episodes}),
        "logprobs": [len(turn.logprobs) == len(turn.ids) == len(turn.versions) for turn in episodes[0].turns],
        "roles": [message.role for message in episodes[0].conversation],
        "steps": again.status().step,
        "samples": result.metrics["val-core/all/sampled/mean@2"]["samples"],
        "score": result.score,
        "model": (exported / "config.json").is_file(),
    }))
"""


CALCULATOR_SCRIPT = """\
import asyncrl
from tests.integration.test_python_calls import SMALL
asyncrl.train("experiment=calculator", SMALL, name="run", run_dir="runs", total_steps=500)
"""


def run_script(tmp_path: Path, script: str, *arguments: str) -> subprocess.Popen[str]:
    path = tmp_path / "task_script.py"
    path.write_text(script)
    return subprocess.Popen(
        [sys.executable, str(path), *arguments],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_script_trains_resumes_and_evaluates(tmp_path: Path) -> None:
    script = run_script(tmp_path, SCRIPT, str(tmp_path / "runs"))
    printed, errors = script.communicate(timeout=500)
    assert script.returncode == 0, printed + errors
    assert "ignoring the experiment's data.test" in printed
    assert "resuming with changed keys: data.test" in printed

    numbers = json.loads(printed.splitlines()[-1])
    assert numbers["ending"] == "completed"
    assert numbers["steps_in_metrics"] == 3
    assert all(0 <= reward <= 1 for reward in numbers["reward"])
    assert set(numbers["sums"]) <= set(range(3, 11))
    assert numbers["sums"]
    assert numbers["logprobs"]
    assert all(numbers["logprobs"])
    assert numbers["roles"][:2] == ["user", "assistant"]
    assert numbers["steps"] == 3
    assert numbers["samples"] == 4
    assert 0 <= numbers["score"] <= 1
    assert numbers["model"]


def test_a_second_call_of_a_script_is_refused(tmp_path: Path) -> None:
    """The call outside of the guard is made again where the run loads the file."""
    script = run_script(
        tmp_path,
        "import asyncrl\n"
        "def score(data_source, solution_str, ground_truth, extra_info): return 0.0\n"
        f"asyncrl.train('experiment=calculator', reward=score, run_dir={str(tmp_path / 'runs')!r})\n",
    )
    printed, errors = script.communicate(timeout=DEADLINE)
    assert script.returncode == 1, printed
    last_line = errors.rstrip().splitlines()[-1]
    assert "asyncrl.train() was called by code that a run has loaded" in last_line
    assert '`if __name__ == "__main__":`' in last_line
    assert not list((tmp_path / "runs").glob("*/config.yaml"))


def test_bad_input_is_the_error_of_the_command(tmp_path: Path) -> None:
    keywords = {"trainer": {"lrr": 1}, "run_dir": tmp_path, "name": "bad"}
    with pytest.raises(asyncrl.ConfigError, match=r"unknown key trainer\.lrr; did you mean") as raised:
        asyncrl.train("experiment=calculator", **keywords)
    assert "\n" not in str(raised.value)


def start_run(runs: Path, name: str, lines: list[str] | None = None) -> asyncrl.StartedRun:
    return asyncrl.start(
        "experiment=calculator",
        SMALL,
        name=name,
        run_dir=runs,
        total_steps=500,
        show=(lines if lines is not None else []).append,
    )


def checkpoint_steps(run_dir: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in run_dir.glob("checkpoints/step-*"))


def committed_steps(run_dir: Path) -> int:
    return sum("timing_s/step" in metrics_row for metrics_row in read_rows(run_dir))


def live_roles(run_dir: Path) -> list[psutil.Process]:
    """Return the processes of a run, but for its launcher."""
    processes: list[psutil.Process] = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            arguments = process.cmdline()
            if "asyncrl.launch.role" in arguments and str(run_dir) in " ".join(arguments):
                processes.append(process)
    return processes


@pytest.mark.timeout(300)
def test_stop_writes_a_checkpoint(tmp_path: Path) -> None:
    lines: list[str] = []
    run = start_run(tmp_path, "stopped", lines)
    opened = asyncrl.open_run("stopped", run_dir=tmp_path)
    wait_until(lambda: committed_steps(run.directory) >= 1)
    wait_until(lambda: opened.status().phase == "running")  # written a few times a second
    run.stop()
    run.wait(DEADLINE)

    steps = committed_steps(run.directory)
    assert checkpoint_steps(run.directory)[-1] == steps
    assert opened.status().phase == "ended"
    assert opened.model == run.directory / "checkpoints" / f"step-{steps}" / "hf"
    assert any("with a checkpoint" in line for line in lines)
    assert not live_roles(run.directory)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_kill_and_a_process_that_holds_the_pipe(tmp_path: Path) -> None:
    """A forked child of the caller has the pipe's other end, too: `stop` must not depend on its end."""
    stopped = start_run(tmp_path, "stopped")
    forked_pid = os.fork()
    if not forked_pid:
        signal.pause()
        os._exit(0)

    try:
        wait_until(lambda: committed_steps(stopped.directory) >= 1)
        stopped.stop()
        stopped.wait(DEADLINE)
        assert checkpoint_steps(stopped.directory)[-1] == committed_steps(stopped.directory)
    finally:
        os.kill(forked_pid, signal.SIGKILL)
        os.waitpid(forked_pid, 0)

    killed = start_run(tmp_path, "killed")
    wait_until(lambda: committed_steps(killed.directory) >= 1)
    killed.kill()
    assert not killed.is_running
    assert not live_roles(killed.directory)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_two_runs_at_once_in_threads(tmp_path: Path) -> None:
    runs: dict[str, asyncrl.StartedRun] = {}

    def run_and_stop(name: str) -> None:
        runs[name] = start_run(tmp_path, name)
        wait_until(lambda: committed_steps(runs[name].directory) >= 1)
        runs[name].stop()
        runs[name].wait(DEADLINE)

    threads = [threading.Thread(target=run_and_stop, args=(name,)) for name in ("left", "right")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * DEADLINE)
    assert sorted(runs) == ["left", "right"]
    for run in runs.values():
        assert checkpoint_steps(run.directory)[-1] == committed_steps(run.directory)


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("interrupts", [1, 2])
def test_ctrl_c(tmp_path: Path, interrupts: int) -> None:
    script = run_script(tmp_path, CALCULATOR_SCRIPT)
    run_dir = tmp_path / "runs" / "run"
    wait_until(lambda: committed_steps(run_dir) >= 1)
    script.send_signal(signal.SIGINT)
    if interrupts == 2:
        wait_until(lambda: asyncrl.open_run(run_dir).status().phase in ("stopping", "ended"))
        script.send_signal(signal.SIGINT)

    _, errors = script.communicate(timeout=DEADLINE)
    assert "KeyboardInterrupt" in errors.rstrip().splitlines()[-1]
    assert not live_roles(run_dir)
    if interrupts == 1:
        assert checkpoint_steps(run_dir)[-1] == committed_steps(run_dir)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_terminal_has_the_live_view_and_is_given_back(tmp_path: Path) -> None:
    """Ctrl-C is typed there."""
    script_path = tmp_path / "task_script.py"
    script_path.write_text(CALCULATOR_SCRIPT)
    run_dir = tmp_path / "runs" / "run"
    child, terminal = pty.fork()
    if not child:
        os.chdir(tmp_path)
        os.environ |= {"TERM": "xterm", "COLUMNS": "100", "LINES": "40", "PYTHONPATH": str(ROOT)}
        os.execv(sys.executable, [sys.executable, str(script_path)])

    try:
        until(terminal, b"starting 3 processes; logs in runs/run/logs")
        until(terminal, b"b: newest bad transcript")
        assert not termios.tcgetattr(terminal)[3] & termios.ECHO
        seen = until(terminal, b"step 2/500")
        seen += until(terminal, b"lag mean")
        assert b"phase: running" not in seen  # lines that the view makes needless
        os.write(terminal, b"\x03")
        ending = until(terminal, b"KeyboardInterrupt\r\n")
        assert b"with a checkpoint" in ending
        assert b"\x1b[?25h" in ending, "the cursor is back"
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGINT
        child = 0
        assert termios.tcgetattr(terminal)[3] & termios.ECHO
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        os.close(terminal)

    assert checkpoint_steps(run_dir)[-1] == committed_steps(run_dir)
    assert not live_roles(run_dir)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_killed_kernel_leaves_a_checkpoint(tmp_path: Path) -> None:
    from jupyter_client.manager import KernelManager

    kernel = KernelManager(kernel_name="python3")
    kernel.start_kernel(cwd=str(tmp_path), env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    client = kernel.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=DEADLINE)
        client.execute(CALCULATOR_SCRIPT)
        run_dir = tmp_path / "runs" / "run"
        wait_until(lambda: committed_steps(run_dir) >= 1)
        (kernel_process,) = [
            process
            for process in psutil.Process().children(recursive=True)
            if "ipykernel" in " ".join(process.cmdline())
        ]
        kernel_process.kill()
        wait_until(lambda: asyncrl.open_run(run_dir).status().phase == "ended")
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)

    assert checkpoint_steps(run_dir)[-1] == committed_steps(run_dir)
    assert not live_roles(run_dir)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_example_of_the_page_learns(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "start" / "python.md").read_text()
    script = run_script(tmp_path, "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)))
    printed, errors = script.communicate(timeout=800)
    assert script.returncode == 0, printed[-2000:] + errors
    run = asyncrl.open_run("warehouse", run_dir=tmp_path / "runs")
    successes = run.metrics()["val-core/all/sampled/success"].drop_null().to_pylist()
    assert successes[-1] > successes[0] + 0.2
    assert (tmp_path / "warehouse-model" / "config.json").is_file()


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_notebook_trains_the_demo_and_draws_its_curve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(ROOT / "examples" / "notebook.ipynb", as_version=4)
    NotebookClient(notebook, timeout=500, resources={"metadata": {"path": str(tmp_path)}}).execute()

    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    (view,) = [output for output in outputs if "<svg" in output.get("data", {}).get("text/html", "")]
    for text in ("completed · step 60/60 · elapsed ", ">reward ", ">held-out success "):
        assert text in view["data"]["text/html"]
    printed = "".join(output.get("text", "") for output in outputs)
    (code_file,) = (tmp_path / "runs").glob("calculator-*/code/*/task.py")
    assert "def close_to_truth" in code_file.read_text()
    success = re.search(r"(\d+)% of 256 episodes succeed", printed)
    assert success and int(success[1]) > 60
