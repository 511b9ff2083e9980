"""A place for each episode: its own directory and HOME, of which nothing is left."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import ConfigError
from asyncrl.gateway import Command, Endpoint, load_agent, places
from asyncrl.types import Message, Sample
from tests.fakes.processes import gone

ENDPOINT = Endpoint("http://127.0.0.1:1/v1", "secret")
SAMPLE = Sample(0, "test", (Message("user", "q"),), "1")
PLACES = Path(f"/var/tmp/asyncrl-{os.getuid()}")
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
        assert found["home"].startswith(f"{PLACES}/") and not Path(found["home"]).exists()
    assert PLACES.stat().st_mode & 0o777 == 0o700


def test_variables_that_are_named_are_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", "/the/users/own")
    (found,) = played(env="HF_HOME, LLM_KEY={key}, LLM_URL={base_url}/x")
    assert found["env"]["HF_HOME"] == "/the/users/own"
    assert (found["env"]["LLM_KEY"], found["env"]["LLM_URL"]) == ("secret", f"{ENDPOINT.base_url}/x")


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
def test_a_tree_with_logins_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("")
    top = name.removesuffix("/config")
    with pytest.raises(ConfigError, match=rf"could read {top}, which may hold logins; .* allow: {top}$"):
        Command(line="true", files=str(tmp_path))
    Command(line="true", files=str(tmp_path), allow=f"x, {top}")


async def test_a_place_is_removed_when_the_episode_is_cancelled(tmp_path: Path) -> None:
    told = tmp_path / "told"
    os.mkfifo(told)
    playing = asyncio.ensure_future(Command(line=f"sh -c 'pwd > {told}; sleep 600'")(SAMPLE, ENDPOINT))
    place = (await asyncio.to_thread(told.read_text)).split("/")[-2]
    assert place in os.listdir(PLACES)
    playing.cancel()
    await asyncio.wait([playing])
    assert playing.cancelled() and place not in os.listdir(PLACES)


WORKER = """
import asyncio, sys
from asyncrl.gateway import Command, Endpoint
from asyncrl.types import Sample
command = Command(line="sh -c 'echo $$ $PWD > $1; sleep 600' sh " + sys.argv[1])
asyncio.run(command(Sample(0, "test", (), "1"), Endpoint("http://127.0.0.1:1/v1", "key")))
"""


def test_what_a_killed_worker_leaves_is_removed_by_the_next(tmp_path: Path) -> None:
    told = tmp_path / "told"
    os.mkfifo(told)
    worker = subprocess.Popen([sys.executable, "-c", WORKER, str(told)], cwd=Path(__file__).parents[3])
    pid, here = told.read_text().split()
    worker.kill()
    worker.wait()
    asyncio.run(gone(int(pid)))
    assert Path(here).is_dir()
    alive = PLACES / "-".join((*places._owner(), "other"))  # of this process, which lives
    alive.mkdir()
    places._parent.cache_clear()
    try:
        assert asyncio.run(Command(line="echo 1")(SAMPLE, ENDPOINT)) == 1
        assert not Path(here).parent.exists() and alive.exists()
    finally:
        alive.rmdir()


def test_a_directory_of_places_that_others_can_enter_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    monkeypatch.setattr(places, "PARENT", str(tmp_path / "open"))
    places._parent.cache_clear()
    with pytest.raises(places.CommandError, match="is open to other users; remove it"):
        places._parent()
    places._parent.cache_clear()
