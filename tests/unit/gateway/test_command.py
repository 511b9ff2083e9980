"""Programs as agents, with real processes; and how agents are named."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import ConfigError
from asyncrl.gateway import Command, Endpoint, load_agent, workspaces
from asyncrl.gateway.lines import CommandError
from asyncrl.types import Message, Sample
from asyncrl.values import checked_result
from tests.fakes.processes import wait_until_gone, written_line

ENDPOINT = Endpoint("http://127.0.0.1:1/v1", "secret")
SAMPLE = Sample(3, "test", (Message("user", "q"),), '{"x": 42}', extra_info_json='{"y": 1, "answer": 42}')


def run(line: str, timeout: float = 30.0, sample: Sample = SAMPLE, **options: Any) -> Any:
    return asyncio.run(asyncio.wait_for(Command(line=line, **options)(sample, ENDPOINT), timeout))


def python(path: Path, code: str) -> str:
    (path / "agent.py").write_text(code)
    return f"{sys.executable} {path / 'agent.py'}"


def test_a_program_gets_the_sample_and_the_endpoint(tmp_path: Path) -> None:
    code = (
        "import json, os, sys\n"
        "names = ('OPENAI_BASE_URL', 'OPENAI_API_KEY', 'OPENAI_MODEL', 'NO_PROXY')\n"
        "print('working on it')\n"
        "print(json.dumps({'sample': json.load(sys.stdin), **{n: os.environ[n] for n in names}}))\n"
    )
    outcome = run(python(tmp_path, code))
    assert (outcome["OPENAI_BASE_URL"], outcome["OPENAI_API_KEY"]) == (ENDPOINT.base_url, "secret")
    assert "127.0.0.1" in outcome["NO_PROXY"]
    prompt = [{"role": "user", "content": "q"}]
    rest = {"data_source": "test", "ability": "", "extra_info": {}}
    assert outcome["sample"] == {"row": 3, "prompt": prompt, **rest}


def test_a_program_does_not_get_the_launchers_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "hidden")
    monkeypatch.setenv("SEARCH_KEY", "named")
    line = f"{sys.executable} -c 'import json, os; print(json.dumps(dict(os.environ)))'"
    assert (
        "hidden" not in json.dumps(outcome := run(line)) and outcome["PATH"] and "SEARCH_KEY" not in outcome
    )
    assert run(line, env="SEARCH_KEY, NOT_SET")["SEARCH_KEY"] == "named"


def test_a_program_does_not_get_the_answer() -> None:
    """Whatever a program can read, the model that leads it may read. Of extra_info it gets what is named."""
    assert run("cat", extra_info="y, z")["extra_info"] == {"y": 1}
    assert "ground_truth" not in run("cat")
    assert "42" not in json.dumps(run("cat", extra_info="y"))


@pytest.mark.parametrize(
    ("line", "result"),
    [
        ("echo 0.5", 0.5),
        ("echo '{\"score\": 1}'", {"score": 1}),
        ("echo done", None),
        ("echo true", None),
        ("echo '[1]'", None),
        ("true", None),
        ("sh -c 'echo 1; echo 2 >&2'", 1),
        ("sh -c 'cat > /dev/null; echo; echo 7; echo'", 7),
    ],
)
def test_the_last_line_is_the_result(line: str, result: Any) -> None:
    assert run(line) == result


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("sh -c 'echo 1; echo no luck >&2; exit 3'", "sh exited with code 3: no luck"),
        ("false", "false exited with code 1: no message"),
        ("sh -c 'kill -9 $$'", "exited with code -9"),
    ],
)
def test_a_failure_is_reported(line: str, why: str) -> None:
    with pytest.raises(CommandError, match=why.replace("$", r"\$")):
        run(line)


def test_the_key_in_an_error_is_left_out(tmp_path: Path) -> None:
    """Clients quote it: 'Incorrect API key provided'. The error goes to logs, records and terminals."""
    code = "import os, sys\nsys.exit('wrong key: {0!r}, {0}'.format(os.environ['OPENAI_API_KEY']))"
    with pytest.raises(CommandError, match=r"code 1: wrong key: 'KEY', KEY$"):
        run(python(tmp_path, code))


HOME_FILES = {
    ".tool.conf": "base: {base_url}\nkey: {key}\nother: {braces} {}\n",
    ".config/tool/models.json": '{"{model}": {"tokens": {max_tokens}}}',
}


def test_files_in_home_are_written_before_the_program_starts(tmp_path: Path) -> None:
    code = (
        "import json\nfrom pathlib import Path\n"
        f"print(json.dumps({{name: (Path.home() / name).read_text() for name in {[*HOME_FILES]}}}))"
    )
    assert run(python(tmp_path, code), home_files=HOME_FILES) == {
        ".tool.conf": f"base: {ENDPOINT.base_url}\nkey: secret\nother: {{braces}} {{}}\n",
        ".config/tool/models.json": '{"policy": {"tokens": 0}}',
    }


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"../x": ""}, "home_files '../x' is not the path of a file in HOME"),
        ({"/etc/x": ""}, "is not the path of a file in HOME"),
        ({"a/../../x": ""}, "is not the path of a file in HOME"),
        ({"a//x": ""}, "is not the path of a file in HOME"),
        ({"./x": ""}, "is not the path of a file in HOME"),
        ({"a/": ""}, "is not the path of a file in HOME"),
        ({"": ""}, "is not the path of a file in HOME"),
        ({"a\0": ""}, "is not the path of a file in HOME"),
        ({"a": "\0"}, "home_files 'a' contains a NUL"),
        ({"a": "", "a/b": ""}, "home_files 'a' cannot be a file, because 'a/b' is inside it"),
        (
            {"a": "x" * (1 << 20), "b": "x"},
            "home_files contains 1048577 bytes, but at most 1048576 are allowed",
        ),
    ],
)
def test_files_in_home_stay_there(files: dict[str, str], why: str) -> None:
    with pytest.raises(ConfigError, match=rf"^rollout\.agent\.command: .*{re.escape(why)}"):
        load_agent({"command": {"line": "true", "home_files": files}})


@pytest.mark.parametrize("path", [".codex", ".codex/config.toml/x"])
def test_files_in_home_do_not_replace_directories_of_a_coding_agent(path: str) -> None:
    options = {"program": "/bin/sh", "sandbox": "none", "home_files": {path: ""}}
    with pytest.raises(
        ConfigError, match=r"^rollout\.agent\.codex: home_files .* cannot be a file, because .* is inside"
    ):
        load_agent({"codex": options})


def test_an_error_in_python_has_its_place_in_the_users_file(tmp_path: Path) -> None:
    for code, why in {
        "import json\ndef f():\n    json.loads('x' * 9)\nf()": r"JSONDecodeError: .*\(agent.py:3\)$",
        "import sys\ntry:\n    {}['b']\nexcept KeyError:\n    import traceback; traceback.print_exc()\n"
        "sys.exit('no luck')": r"code 1: no luck$",
    }.items():
        with pytest.raises(CommandError, match=why):
            run(python(tmp_path, code))


def test_python_is_the_interpreter_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another one, or none, is first on PATH; one that is given by its path stays."""
    other = tmp_path / "python"
    other.write_text('#!/bin/sh\necho \'{"which": "other"}\'\n')
    other.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "agent.py").write_text("import json, sys; print(json.dumps({'which': sys.executable}))")
    monkeypatch.chdir(tmp_path)
    for name in ("python", "python3"):
        assert run(f"{name} agent.py") == {"which": sys.executable}
    assert run(f"{other} agent.py") == run("./python agent.py") == {"which": "other"}
    assert run("agent agent.py", program=str(other)) == {"which": "other"}


def test_a_sample_that_nobody_reads_and_output_without_end_do_no_harm() -> None:
    big = Sample(0, "test", (Message("user", "q" * 1_000_000),), "1")
    assert run("sh -c 'head -c 5000000 /dev/zero | tr \"\\0\" x; echo; echo 3'", sample=big) == 3


async def test_endless_output_is_read_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr("asyncrl.gateway.workspaces.asyncio.sleep", pause)
    monkeypatch.setattr(workspaces, "FAST_READS", 4)
    for size, has_pauses in ((1000, False), (4 << 20, True)):
        out, theirs = os.pipe()
        process = await asyncio.create_subprocess_exec("head", "-c", f"{size}", "/dev/zero", stdout=theirs)
        os.close(theirs)
        await workspaces._read_tail(out, 100)
        await process.wait()
        assert bool(pauses) is has_pauses
    assert len(pauses) >= ((4 << 20) >> 16) - 4 and {*pauses} == {workspaces.PAUSE_SECONDS}


async def test_all_that_is_kept_of_an_output_is_not_copied_with_each_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workspaces, "PAUSE_SECONDS", 0)
    large_limit = 16 << 20

    async def read_seconds(limit: int) -> float:
        out, theirs = os.pipe()
        process = await asyncio.create_subprocess_exec("head", "-c", "64M", "/dev/zero", stdout=theirs)
        os.close(theirs)
        started = time.process_time()
        assert len((await workspaces._read_tail(out, limit))[0]) == limit
        took = time.process_time() - started
        await process.wait()
        return took

    kept_bytes = bytes(large_limit)
    started = time.process_time()
    for _ in range(300):
        bytearray(kept_bytes)
    copies_seconds = time.process_time() - started

    # A copy with each part of 64 KiB would be 1,024 copies, 768 of them of 16 MiB.
    assert await read_seconds(large_limit) < 4 * await read_seconds(1 << 10) + copies_seconds


@pytest.mark.parametrize("ending", ["wait", "exit 0"])
async def test_nothing_of_a_program_is_left(tmp_path: Path, ending: str) -> None:
    """Neither when it is cancelled nor when it leaves children that hold its pipes."""
    pids = tmp_path / "pids"
    line = f"sh -c 'setsid sleep 600 & echo $$ $! > {pids}; {ending}'"
    playing = asyncio.create_task(Command(line=line)(SAMPLE, ENDPOINT))
    written_pids = (await written_line(pids)).split()
    if ending == "wait":
        playing.cancel()
    await asyncio.wait([playing], timeout=30)
    assert playing.done() and len(written_pids) == 2
    for pid in written_pids:
        await wait_until_gone(int(pid))


# -- names -------------------------------------------------------------------------------------------


def test_agents_are_named_with_options(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def solve(sample, endpoint, *, depth: int = 1):\n    return depth\n")
    assert load_agent(f"{path}:solve")(SAMPLE, ENDPOINT) == 1
    assert load_agent({f"{path}:solve": {"depth": 3}})(SAMPLE, ENDPOINT) == 3
    assert asyncio.run(load_agent({"command": {"line": "echo 4"}})(SAMPLE, ENDPOINT)) == 4


@pytest.mark.parametrize(
    ("plugin", "why"),
    [
        ("command", r"rollout\.agent\.command: option 'line' is missing"),
        ({"command": {"line": ""}}, r"rollout\.agent\.command\.line: Expected `str`"),
        ({"command": {"line": " "}}, r"rollout\.agent\.command\.line: Expected `str`"),
        (
            {"command": {"line": "x", "shell": True}},
            "unknown option 'shell'; options: line, extra_info, ",
        ),
        ({"command": {"line": "x"}, "other": {}}, "expected one name"),
        ({}, "expected one name"),
        (
            {"command": {"line": "echo 'unclosed"}},
            r"rollout\.agent\.command: line .* No closing quotation",
        ),
        ({"command": {"line": "no-such-program --x"}}, "no such program: 'no-such-program'; install it"),
        ({"command": {"line": "./agent.sh"}}, "no such program: './agent.sh'"),
        ({"command": {"line": "ls", "memory_mb": 9}}, "memory_mb, .* need a sandbox; set sandbox: jail"),
        (
            {"command": {"line": "ls", "sandbox": "jail", "show": "/opt, /etc/"}},
            "show '/etc/': a sandbox has its own",
        ),
        ({"command": {"line": "ls", "sandbox": "jail", "show": "/"}}, "show '/': a sandbox has its own"),
        ({"command": {"line": "ls", "sandbox": "jail", "show": "~/no"}}, "show '~/no': no such file"),
        (
            {"codex": {"program": "/bin/true", "extra_info": "a"}},
            "extra_info works only with the agent 'command': codex reads",
        ),
        ({"command": {"line": "ls", "files": "/no/such"}}, "files '/no/such': no such directory"),
        ({"command": {"line": "ls", "env": "=value"}}, "env '=value' contains .* a value without a name"),
        ({"command": {"line": "ls", "env": "A=\0"}}, "contains a NUL"),
        ({"command": {"line": "ls", "env": "A=\ud800"}}, r"env 'A=\\ud800' contains .* lone surrogate"),
        ("comand", "did you mean command"),
        ("math:pi", "is not a function"),
        ("no_such_module:f", "cannot import"),
    ],
)
def test_a_wrong_name_is_reported(plugin: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load_agent(plugin)


AGENTS = """
from __future__ import annotations
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from asyncrl.gateway import Endpoint

def typed(sample, endpoint: Endpoint): ...
def short(sample): ...
def long(sample, endpoint, tools): ...
async def yields(sample, endpoint):
    yield 1
class Solver:
    def __init__(self, *, key: str = ""):
        if not key:
            raise RuntimeError("no key")
        self.key = key
    async def __call__(self, sample, endpoint):
        return len(self.key)
class Idle: ...
def unknown(sample, endpoint, *, options: Nowhere = None): ...
"""


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (
            "short",
            r"short \(mine.py:8\) cannot be called .* \(too .*write async def agent\(sample, endp",
        ),
        ("long", r"long \(mine.py:9\) cannot be called with the expected arguments \(missing .* 'tools'\)"),
        ("yields", r"yields \(mine.py:10\) yields instead of returning"),
        ("Solver", r"Solver: cannot be created \(RuntimeError: no key \(mine.py:15\)"),
        ("Idle", r"mine.py:Idle: instances of this class cannot be called"),
        ("unknown", "no usable signature .*Nowhere"),
    ],
)
def test_an_agent_that_cannot_be_called_is_reported_before_the_start(
    tmp_path: Path, name: str, why: str
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(AGENTS)
    load_agent(f"{path}:typed")
    assert asyncio.run(load_agent({f"{path}:Solver": {"key": "abc"}})(SAMPLE, ENDPOINT)) == 3
    with pytest.raises(ConfigError, match=why) as caught:
        load_agent(f"{path}:{name}")
    assert str(caught.value).startswith("rollout.agent")


@pytest.mark.parametrize("value", [None, 1.5, {"score": 1.0, "steps": [1, 2]}])
def test_results_are_json_values(value: Any) -> None:
    assert checked_result(value) == value
    assert json.loads(json.dumps(checked_result(value))) == value


@pytest.mark.parametrize("value", ["text", [1], float("nan"), {"x": object()}, {"x": "y" * (1 << 20)}])
def test_what_is_no_result_is_reported(value: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        checked_result(value)
