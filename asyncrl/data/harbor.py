"""Reads tasks in Harbor's format, a folder each, as rows: the instruction, and what judges it.

TASK/{instruction.md, task.toml, tests/{test.sh, config.json}, solution/solve.sh, environment/Dockerfile}
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from asyncrl.data.rows import Row
from asyncrl.data.tasks import TASK, Task, TaskTests
from asyncrl.errors import ConfigError, one_line
from asyncrl.isolation.images import Image, find_image

FILE = "task.toml"
NO_NETWORK = 'there is no network; if the task needs none, write network_mode = "no-network"'
OWN_IMAGE = "tests run in the task's own image, with its workspace"
REFUSED = {
    "steps": "there is one instruction and one verdict; make a task of each step",
    **{f"{part}.network_mode": NO_NETWORK for part in ("environment", "agent", "verifier")},
    **{f"{part}.allowed_hosts": NO_NETWORK for part in ("environment", "agent", "verifier")},
    "environment.allow_internet": NO_NETWORK,
    "environment.os": "images are of Linux",
    "environment.gpus": "sandboxes have no GPU",
    "environment.tpu": "sandboxes have no TPU",
    "environment.mcp_servers": "no server is started for a task; name it in rollout.tools",
    "environment.healthcheck": "no service of the image is started",
    **{f"verifier.{name}": OWN_IMAGE for name in ("environment_mode", "environment", "collect")},
}
"""Fields of task.toml that change what a task is, and why they are refused."""
HARMLESS = ("no-network", "linux", "shared")  # their values that ask for nothing, beside 0, false, [], {}
REFUSED_FILES = {
    "environment/docker-compose.yaml": "a task runs in one image",
    "environment/docker-compose.yml": "a task runs in one image",
    "trajectory.json": "a task begins with its instruction",
}
DESCRIBED = ("schema_version", "version", "source", "task", "metadata")  # what else is in them is for people
OUTSIDE = ("", "proc", "dev", "sys", "tests", "logs", "solution", "sandbox")  # of any workspace
UNITS = {"K": 1 / 1024, "M": 1, "G": 1024}
CANARY = re.compile(r"\A(\s*(<!--.*canary.*-->|#.*canary.*)[ \t]*(\n|\Z))+\s*", re.IGNORECASE)


def _is(meaning: str, **bounds: Any) -> Any:
    """Describe a field that is honoured, for the table of docs/tasks.md."""
    return Meta(description=meaning, **bounds)


TIME = {"gt": 0, "le": 1e7}
SIZE = {"pattern": r"^\d+(\.\d+)?[KMG]$"}
Variables = dict[str, str]


class _Package(msgspec.Struct, frozen=True):
    name: Annotated[str, _is("what the task is called; its folder's name otherwise")] = ""


class _Metadata(msgspec.Struct, frozen=True):
    workspace: Annotated[list[str], _is("not Harbor's: directories that are judged, else `workdir`")] = []
    protected: Annotated[list[str], _is("not Harbor's: files that tests find as the image has them")] = []


class _Environment(msgspec.Struct, frozen=True):
    docker_image: Annotated[str, _is("an imported image; without it, that of the folder's name")] = ""
    workdir: Annotated[str, _is("where programs start; the image's directory otherwise")] = ""
    env: Annotated[Variables, _is("variables of the agent and the tests; `${…}` is refused")] = {}
    memory_mb: Annotated[int, _is("MiB of memory of a sandbox", ge=1)] | None = None
    storage_mb: Annotated[int, _is("most MiB of files that are written in it", ge=1)] | None = None
    memory: Annotated[str, _is("the same as text, `2G`", **SIZE)] | None = None
    storage: Annotated[str, _is("the same as text, `10G`", **SIZE)] | None = None


class _Agent(msgspec.Struct, frozen=True):
    timeout_sec: Annotated[float, _is("seconds of the agent", **TIME)] | None = None
    user: Annotated[str | int, _is("`root` or 0: root of the sandbox; any other: its one user")] | None = None


class _Verifier(msgspec.Struct, frozen=True):
    timeout_sec: Annotated[float, _is("seconds of the tests", **TIME)] = 600.0
    env: Annotated[Variables, _is("more variables of the tests")] = {}


class _Solution(msgspec.Struct, frozen=True):
    env: Annotated[Variables, _is("more variables of solution/solve.sh in `tasks check`")] = {}


class HonouredFields(msgspec.Struct, frozen=True):
    """Holds the fields of task.toml that are honoured."""

    task: _Package = _Package()
    metadata: _Metadata = _Metadata()
    environment: _Environment = _Environment()
    agent: _Agent = _Agent()
    verifier: _Verifier = _Verifier()
    solution: _Solution = _Solution()


class TaskFolder(msgspec.Struct, frozen=True):
    """Holds a task as it was read. `solution`: variables of its solve.sh. `ignored`: fields that nothing
    reads, by their dotted names."""

    path: Path
    instruction: str
    task: Task
    tests: TaskTests
    solution: dict[str, str]
    ignored: dict[str, Any]

    @property
    def row(self) -> Row:
        """Return its columns. Ignored fields are some: a run lists columns that nothing reads."""
        extra = {TASK: msgspec.to_builtins(self.task)}
        truth = msgspec.to_builtins(self.tests)
        row = {"prompt": self.instruction, "ground_truth": truth, "extra_info": extra}
        return self.ignored | row | {"data_source": self.path.parent.name}


def read_tasks(directory: str | Path) -> Iterator[TaskFolder]:
    """Read a task folder, or all in a directory, by name. ConfigError names the folder, what is wrong, and
    what to do."""
    top = Path(os.path.abspath(directory))
    if not top.is_dir():
        raise ConfigError(f"{directory}: no such directory; correct the path")
    folders = [top] if _is_task(top) else sorted(filter(_is_task, top.glob("*")))
    if not folders:
        raise ConfigError(
            f"{directory}: has no task, a folder with {FILE} (docs/tasks.md); files of rows are named by a "
            f"pattern, {directory}/*.parquet"
        )
    for folder in folders:
        try:
            yield _read(folder)
        except ConfigError as error:
            raise ConfigError(f"{folder}: {error}") from error
        except OSError as error:
            raise ConfigError(f"{folder}: not readable ({one_line(error)}); correct it") from error


def _is_task(path: Path) -> bool:
    return (path / FILE).exists() or (path / "instruction.md").exists()


def _read(folder: Path) -> TaskFolder:
    given = _parsed(folder / FILE, tomllib.loads)
    ignored = _ignored(folder, given)
    try:
        fields = msgspec.convert(given, HonouredFields)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{FILE}: {error}; correct it (docs/tasks.md)") from None
    instruction = CANARY.sub("", _parsed(folder / "instruction.md", str))
    if not instruction.strip():
        raise ConfigError("instruction.md is empty; it is what the model reads")
    environment = fields.environment
    for section in ("environment", "verifier", "solution"):
        _check_variables(f"{section}.env", getattr(fields, section).env)
    image = _image(folder, environment.docker_image)
    directory = environment.workdir or image.directory
    workspace = fields.metadata.workspace or [directory]
    for path in (directory, *workspace):
        _check_directory(image, path, path in workspace)
    task = Task(
        fields.task.name or folder.name,
        image.digest,
        os.path.normpath(directory),
        tuple(map(os.path.normpath, workspace)),
        "root" if fields.agent.user in ("root", "0", 0) else "",
        environment.env,
        environment.memory_mb or _mebibytes(environment.memory),
        environment.storage_mb or _mebibytes(environment.storage),
        fields.agent.timeout_sec or 0.0,
    )
    return TaskFolder(folder, instruction, task, _tests(folder, fields), fields.solution.env, ignored)


def _parsed(path: Path, parse: Callable[[str], Any]) -> Any:
    """Read a file. ConfigError where it is not there, or not what it should be."""
    try:
        return parse(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"there is no {path.name}; a task needs one") from None
    except ValueError as error:
        raise ConfigError(f"{path.name}: not readable ({one_line(error)}); correct it") from None


def _ignored(folder: Path, given: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that nothing reads. ConfigError for one that is refused."""
    refused = [(name, why) for name, why in REFUSED_FILES.items() if (folder / name).exists()]
    honoured = {field.name: field.type.__struct_fields__ for field in msgspec.structs.fields(HonouredFields)}
    found: dict[str, Any] = {}
    for section, inner in given.items():
        known = honoured.get(section, ()) if isinstance(inner, dict) else ()
        fields = {f"{section}.{name}": inner[name] for name in inner if name not in known} if known else {}
        for name, value in (fields if known else {section: inner}).items():
            if name in REFUSED and value and str(value).lower() not in HARMLESS:
                refused.append((f"{FILE}: {name} = {str(value)[:60]}", REFUSED[name]))
            elif name not in REFUSED and value and section not in DESCRIBED:
                found[name] = value
    for what, why in refused:
        raise ConfigError(f"{what} is refused: {why}")
    return found


def _image(folder: Path, named: str) -> Image:
    """Find the image. ConfigError with the two commands that make it, where it is known of what."""
    made = named or folder.name.lower()
    name = re.sub(r"[^\w.-]", "-", named or folder.name, flags=re.ASCII)
    try:
        return find_image(name)
    except ConfigError as error:
        if not (named or (folder / "environment/Dockerfile").is_file()):
            raise ConfigError(f"{error}; or set environment.docker_image to one that is there") from error
        first = f"docker pull {made}" if named else f"docker build -t {made} {folder / 'environment'}"
        second = f"docker save {made} | asyncrl image import - --name {name}"
        raise ConfigError(f"{error}, for example: {first}; {second}") from error


def _check_directory(image: Image, path: str, judged: bool) -> None:
    """ConfigError where it is no directory of the image, or one that must not be judged."""
    key = f"{FILE}: {'metadata.workspace' if judged else 'environment.workdir'} {path!r}"
    if not path.startswith("/") or "\0" in path or ".." in path.split("/"):
        raise ConfigError(f"{key} is no absolute path; correct it")
    parts = Path(path).parts[1:]
    if judged and (parts or ("",))[0] in OUTSIDE:
        raise ConfigError(f"{key} cannot be judged; set metadata.workspace to directories of the task's own")
    layers = list(image.layers)
    inner = ""
    for part in parts:  # no link of an image is followed
        inner = f"{inner}/{part}"
        found = list[str]()
        for layer in filter(lambda layer: os.path.lexists(layer + inner), layers):
            mode = os.lstat(layer + inner).st_mode
            if not found and stat.S_ISLNK(mode):
                raise ConfigError(f"{key} leads through a link, {inner}; name the directory itself")
            if not stat.S_ISDIR(mode):
                break  # it hides what the layers below have
            found.append(layer)
        layers = found
        if not layers:
            raise ConfigError(f"{key} is no directory of its image; correct it, or make it in the image")


def _check_variables(key: str, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        if not name.isidentifier() or "\0" in value:
            raise ConfigError(f"{FILE}: {key} {name!r} is no variable; correct it")
        if "${" in value:
            why = "would come from this machine, and the model could read it; write a value"
            raise ConfigError(f"{FILE}: {key} {name} = {value} {why}")


def _mebibytes(size: str | None) -> int:
    return max(1, int(float(size[:-1]) * UNITS[size[-1]])) if size else 0


def _tests(folder: Path, fields: HonouredFields) -> TaskTests:
    """Read tests/. ConfigError without a test.sh, and for links out of it."""
    directory = folder / "tests"
    if not (directory / "test.sh").is_file():
        raise ConfigError("there is no tests/test.sh; a task is judged by one")
    real = f"{os.path.realpath(folder)}/tests"
    for path in (directory, *directory.rglob("*")):
        if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(real):
            raise ConfigError(f"{path.relative_to(folder)} is a link that leads out of tests; copy the files")
    config = directory / "config.json"
    found = _parsed(config, msgspec.json.decode) if config.exists() else {}
    named = found if isinstance(found, dict) else {}
    turn, stay = (_names(key, named.get(key)) for key in ("FAIL_TO_PASS", "PASS_TO_PASS"))
    verifier = fields.verifier
    protected = tuple(fields.metadata.protected)
    return TaskTests(str(directory), verifier.timeout_sec, verifier.env, turn, stay, protected)


def _names(key: str, given: Any) -> tuple[str, ...]:
    """Read names of tests: a list, or one as JSON text."""
    with ConfigError.instead_of(ValueError, text=f"tests/config.json: {key} is no list of names"):
        read = msgspec.json.decode(given) if isinstance(given, str) else given or ()
        return msgspec.convert(read, tuple[str, ...])
