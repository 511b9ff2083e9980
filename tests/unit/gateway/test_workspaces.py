"""A workspace for each episode: its own directory and HOME, of which nothing is left."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest

from asyncrl.errors import ConfigError
from asyncrl.gateway import Command, Endpoint, Gateway, TimeUp, load_agent, workspaces
from asyncrl.gateway.lines import CommandError
from asyncrl.isolation.sandbox import detection, emptying
from asyncrl.isolation.sandbox.base import RunEnding, RunResult, SandboxError
from asyncrl.isolation.sandbox.detection import Isolation
from asyncrl.isolation.sandbox.jail import Jail
from asyncrl.types import Message, Sample
from tests.fakes.hosts import FakeHost
from tests.fakes.processes import wait_until_gone, written_line

ENDPOINT = Endpoint("http://127.0.0.1:1/v1", "secret")
SAMPLE = Sample(0, "test", (Message("user", "q"),), "1")
WORKSPACES = Path(f"/var/tmp/asyncrl-{os.getuid()}")
LOOK = """
import json, os, sys
home, here, where = os.path.expanduser("~"), os.getcwd(), os.environ
seen = []
for path in ("notes", home + "/.state", where["TMPDIR"] + "/x"):
    with open(path, "a+") as file:
        print("was here", file=file, flush=True)
        file.seek(0)
        seen.append(file.read())
found = {"seen": seen, "here": here, "home": home, "listed": sorted(os.listdir()), "env": {**where}}
print(json.dumps(found))
"""


def played(count: int = 1, **options: Any) -> list[Any]:
    """The results of so many episodes at once."""
    command = load_agent({"command": {"line": f"python -c '{LOOK}'", **options}})

    async def play() -> list[Any]:
        return await asyncio.gather(*(command(SAMPLE, ENDPOINT) for _ in range(count)))

    return asyncio.run(play())


def test_episodes_at_once_do_not_see_each_others_files(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ("HF_HOME", "XDG_CONFIG_HOME", "CLAUDE_CONFIG_DIR", "CODEX_HOME", "GIT_CONFIG_GLOBAL")
    for name in own:
        monkeypatch.setenv(name, "/the/users/own")
    results = played(3)
    assert [found["seen"] for found in results] == [["was here\n"] * 3] * 3
    assert len({found["home"] for found in results} | {found["here"] for found in results}) == 6
    for found in results:
        assert "/the/users/own" not in found["env"].values() and found["env"]["PYTHONUSERBASE"]
        assert found["home"].startswith(f"{WORKSPACES}/") and not Path(found["home"]).exists()
    assert WORKSPACES.stat().st_mode & 0o777 == 0o700


def test_variables_that_are_named_are_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", "/the/users/own")
    (played_episode,) = played(env="HF_HOME, LLM_KEY={key}, LLM_URL={base_url}/x")
    assert played_episode["env"]["HF_HOME"] == "/the/users/own"
    assert (played_episode["env"]["LLM_KEY"], played_episode["env"]["LLM_URL"]) == (
        "secret",
        f"{ENDPOINT.base_url}/x",
    )


def test_a_tree_is_copied_into_each(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("here before\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "link").symlink_to("../notes")
    results = played(2, files=str(tmp_path))
    assert [found["seen"][0] for found in results] == ["here before\nwas here\n"] * 2
    assert results[0]["listed"] == ["notes", "sub"]
    assert (tmp_path / "notes").read_text() == "here before\n"


@pytest.mark.parametrize(
    "name", [".netrc", "sub/.aws/config", ".git-credentials", "auth.json", "my_Token.txt"]
)
def test_a_tree_with_credentials_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("")
    top = name.removesuffix("/config")
    with pytest.raises(
        ConfigError, match=rf"could read {top}, which may contain credentials; .* allow: {top}$"
    ):
        Command(line="true", files=str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("")  # no login
    for allow in (f"x, {top}", "*"):
        Command(line="true", files=str(tmp_path), allow=allow)


class NoisyJail:
    """A jail whose shell warns when it starts, and whose image has no `od`."""

    home = "/sandbox"

    async def read_file(self, path: str) -> bytes:
        raise SandboxError("larger than what can be read at once")

    async def run(self, kind: str, source: str, seconds: float) -> RunResult:
        words = ["sh", "-c", f"echo sh: a warning >&2; PATH=/nowhere\n{source}"]
        shell = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # noqa: ASYNC221
        return RunResult(RunEnding.DONE, shell.stdout)


def test_warnings_of_a_shell_are_no_answers() -> None:
    async def main() -> None:
        workspace = workspaces.SandboxWorkspace(cast(Jail, NoisyJail()), ENDPOINT, None)
        assert await workspace.problem("/bin/sh") == ""
        assert await workspace.problem("/gone") == "does not exist"
        assert await workspace.look_up("gone", "/bin") == ""
        assert await workspace.look_up("sh", "/gone:/bin") == "/bin/sh"
        assert await workspace.head("/bin/sh") == b""

    asyncio.run(main())


async def test_a_place_is_removed_when_the_episode_is_cancelled(tmp_path: Path) -> None:
    working_directory = tmp_path / "working_directory"
    line = f"sh -c 'pwd > {working_directory}; sleep 600'"
    playing = asyncio.ensure_future(Command(line=line)(SAMPLE, ENDPOINT))
    workspace = (await written_line(working_directory)).split("/")[-2]
    assert workspace in os.listdir(WORKSPACES)
    playing.cancel()
    await asyncio.wait([playing])
    assert playing.cancelled() and workspace not in os.listdir(WORKSPACES)


WORKER = """
import asyncio, sys
from asyncrl.gateway import Command, Endpoint
from asyncrl.types import Sample
command = Command(line="sh -c 'echo $$ $PWD > $1; sleep 600' sh " + sys.argv[1])
asyncio.run(command(Sample(0, "test", (), "1"), Endpoint("http://127.0.0.1:1/v1", "key")))
"""


def test_what_a_killed_worker_leaves_is_removed_by_the_next(tmp_path: Path) -> None:
    pipe = tmp_path / "told"
    os.mkfifo(pipe)
    worker = subprocess.Popen([sys.executable, "-c", WORKER, str(pipe)], cwd=Path(__file__).parents[3])
    pid, here = pipe.read_text().split()
    worker.kill()
    worker.wait()
    asyncio.run(wait_until_gone(int(pid)))
    assert Path(here).is_dir()
    workspaces._workspaces_directory.cache_clear()
    with emptying.locked_directory(
        str(WORKSPACES), workspaces.WORKSPACE_PREFIX
    ) as alive:  # of this process, which lives
        assert asyncio.run(Command(line="echo 1")(SAMPLE, ENDPOINT)) == 1
        assert not Path(here).parent.exists() and Path(alive).exists()
    assert not Path(alive).exists()


def test_a_directory_of_workspaces_that_others_can_enter_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    monkeypatch.setattr(workspaces, "WORKSPACES_DIRECTORY", str(tmp_path / "open"))
    workspaces._workspaces_directory.cache_clear()
    with pytest.raises(PermissionError, match="is open to other users; remove it"):
        workspaces._workspaces_directory()
    workspaces._workspaces_directory.cache_clear()


# -- in a sandbox ------------------------------------------------------------------------------------


SPY = """
import json, os, pathlib, sys, urllib.request
user, told = sys.argv[1:]
for name in ("work", "home", "tmp"):
    pathlib.Path("/sandbox", name, "secret").write_text(os.environ["OPENAI_API_KEY"])
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"messages": [{"role": "user", "content": "all there?"}]}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
urllib.request.urlopen(request).read()  # once all of them have asked
read = {}
for path in (user, told, "/var/tmp", "/root", "/etc/shadow", os.path.dirname(os.path.dirname(user))):
    try:
        read[path] = sorted(os.listdir(path)) if os.path.isdir(path) else open(path).read()
    except OSError:
        pass
for top, _, names in os.walk("/sandbox"):
    read |= {os.path.join(top, name): open(os.path.join(top, name)).read() for name in names}
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        read[pid] = open(f"/proc/{pid}/environ").read()
    except OSError:
        pass
print(json.dumps({"key": os.environ["OPENAI_API_KEY"], "read": read, "cwd": os.getcwd()}))
"""


@pytest.mark.parametrize("count", [6, pytest.param(64, marks=pytest.mark.full)])
def test_episodes_in_sandboxes_cannot_read_each_others_files_or_the_users(tmp_path: Path, count: int) -> None:
    """They try when all of them are there: absolute paths, /proc, the directories of the others."""
    user = tmp_path / "users"
    user.write_text("a secret of the user")
    (tmp_path / "spy.py").write_text(SPY)
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "given").write_text("given")
    line = f"python {tmp_path}/spy.py {user} {WORKSPACES}"
    options = {"sandbox": "jail", "files": str(tmp_path / "tree"), "setup_seconds": 300, "starts": 64}
    command = load_agent({"command": {"line": line, **options}})
    hosts = [FakeHost() for _ in range(count)]

    async def play(gateway: Gateway, host: FakeHost) -> Any:
        async with gateway.admit_episode(host) as endpoint:
            return await command(SAMPLE, endpoint), endpoint.api_key

    async def main() -> list[tuple[Any, str]]:
        gateway = Gateway()
        await gateway.start()
        try:
            for host in hosts:
                host.gate.clear()
            playing = asyncio.gather(*(play(gateway, host) for host in hosts))
            there = asyncio.gather(*(host.entered.wait() for host in hosts))
            await asyncio.wait([playing, there], return_when=asyncio.FIRST_COMPLETED)
            for host in hosts:
                host.gate.set()
            return await playing
        finally:
            await gateway.close()

    results = asyncio.run(main())
    keys = {key for _, key in results}
    for found, key in results:
        text = json.dumps(found["read"])
        assert found["key"] == key and found["cwd"] == "/sandbox/work" and key in text
        assert not [other for other in keys - {key} if other in text]
        assert "a secret of the user" not in text and found["read"]["/sandbox/work/given"] == "given"
        assert not {str(WORKSPACES), "/var/tmp", "/etc/shadow"} & found["read"].keys()


def test_the_packages_of_the_run_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """asyncrl, too; and a client finds no name of a file that is not there."""
    monkeypatch.setenv("SSL_CERT_FILE", "/etc/ssl/certs/ca-certificates.crt")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))  # where another checkout is installed
    code = "import httpx, openai, asyncrl.types; openai.OpenAI(api_key=str(1)); print(7)"
    assert played_with(Command(line=f"python -c '{code}'", sandbox="jail")) == 7


def test_a_program_that_takes_too_much_memory_is_killed() -> None:
    line = "python -c 'x = bytearray(300 << 20); import time; time.sleep(60)'"
    command = Command(line=line, sandbox="jail", memory_mb=200)
    with pytest.raises(
        CommandError, match="used more than 200 MiB, including its files, and was killed; raise memory_mb"
    ):
        played_with(command)


def test_a_place_that_cannot_be_made_in_a_sandbox_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspaces, "OWN_DIRECTORIES", ("home", "../proc/such"))
    with pytest.raises(CommandError, match=r"the sandbox could not create its workspace: mkdir: .*proc/such"):
        played_with(Command(line="true", sandbox="jail"))


def test_a_machine_without_namespaces_is_reported_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    without = Isolation(frozenset({"network", "processes"}), "unshare: no")
    monkeypatch.setattr(detection, "detect_isolation", lambda: without)
    with pytest.raises(ConfigError, match=r"isolate files, orphans \(unshare: no\); .* sandbox: none"):
        load_agent({"command": {"line": "true", "sandbox": "jail"}})


# -- stages ------------------------------------------------------------------------------------------


def played_with(command: Command) -> Any:
    async def main() -> Any:
        gateway = Gateway()
        await gateway.start()
        try:
            async with gateway.admit_episode(FakeHost()) as endpoint:
                return await command(SAMPLE, endpoint)
        finally:
            await gateway.close()

    return asyncio.run(main())


ASK = (
    "import json, os, time, urllib.request as u; "
    'u.urlopen(u.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", '
    'json.dumps({"messages": [{"role": "user", "content": "q"}]}).encode(), '
    '{"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})).read(); '
)


def test_a_program_that_does_not_ask_in_time_is_ended() -> None:
    with pytest.raises(CommandError, match=r"sleep did not make a request within setup_seconds \(0.2 s\)"):
        played_with(Command(line="sleep 600", setup_seconds=0.2))


def test_a_program_whose_time_is_up_is_ended() -> None:
    """That is no failure: the episode is scored for its turns."""
    with pytest.raises(TimeUp, match=r"python was stopped after 0.2 s, when its time limit expired"):
        played_with(Command(line=f"python -c '{ASK} time.sleep(600)'", seconds=0.2))


async def test_a_programs_time_stands_while_the_episodes_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The episode waits for a scorer until the clock has been read a few times."""
    reads = itertools.count()
    over = asyncio.Event()

    def clock(_: Endpoint) -> float:
        if next(reads) == 5:
            over.set()
        return 0.0

    async def run(*_: object) -> str:
        await over.wait()
        return "whole"

    async def wait_for_first_request(_: Endpoint) -> None: ...

    command = Command(line="true", seconds=0.001)
    monkeypatch.setattr(command, "_run_program", run)
    monkeypatch.setattr(Endpoint, "wait_for_first_request", wait_for_first_request)
    monkeypatch.setattr(Endpoint, "clock", clock)
    assert await command(SAMPLE, ENDPOINT) == "whole"


async def test_so_many_start_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start is over with the first request: the second begins while the first goes on."""
    begun = asyncio.Queue[int]()
    over = asyncio.Event()

    class Asking:
        def __init__(self, name: int) -> None:
            self.name = name
            self.first = asyncio.Event()
            self.clock = time.monotonic

        async def wait_for_first_request(self) -> None:
            await self.first.wait()

    async def run(sample: Sample, endpoint: Asking, *_: object) -> int:
        begun.put_nowait(endpoint.name)
        await over.wait()
        return endpoint.name

    command = Command(line="true", starts=1)
    both = [Asking(0), Asking(1)]
    monkeypatch.setattr(command, "_run_program", run)
    playing = [asyncio.ensure_future(command(SAMPLE, one)) for one in both]  # type: ignore[arg-type]
    assert await begun.get() == 0
    for _ in range(100):
        await asyncio.sleep(0)
    assert begun.empty()
    both[0].first.set()
    assert await begun.get() == 1 and not playing[0].done()
    over.set()
    assert await asyncio.gather(*playing) == [0, 1]
