"""Reads tasks in Harbor's format, one folder for each task, as rows: the instruction and the tests.

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
from asyncrl.data.tasks import TASK_KEY, Task, TaskTests
from asyncrl.errors import ConfigError, one_line
from asyncrl.isolation.images import Image, find_image

TASK_FILE = "task.toml"
NO_NETWORK = 'sandboxes have no network; if the task does not need one, write network_mode = "no-network"'
OWN_IMAGE = "tests run in the task's own image, with its workspace"
REFUSED_FIELDS = {
    "steps": "a task has one instruction and one verdict; make each step a separate task",
    **{f"{part}.network_mode": NO_NETWORK for part in ("environment", "agent", "verifier")},
    **{f"{part}.allowed_hosts": NO_NETWORK for part in ("environment", "agent", "verifier")},
    "environment.allow_internet": NO_NETWORK,
    "environment.os": "only Linux images are supported",
    "environment.gpus": "sandboxes have no GPU",
    "environment.tpu": "sandboxes have no TPU",
    "environment.mcp_servers": "tasks cannot start MCP servers; list the server in rollout.tools",
    "environment.healthcheck": "services in the image are not started",
    **{f"verifier.{name}": OWN_IMAGE for name in ("environment_mode", "environment", "collect")},
}
"""Fields of task.toml that change what a task is, and why they are refused."""
HARMLESS_VALUES = ("no-network", "linux", "shared")  # values of refused fields that request nothing
REFUSED_FILES = {
    "environment/docker-compose.yaml": "a task runs in one image",
    "environment/docker-compose.yml": "a task runs in one image",
    "trajectory.json": "a task begins with its instruction",
}
DESCRIPTIVE_SECTIONS = ("schema_version", "version", "source", "task", "metadata")  # for people: not reported
OUTSIDE_WORKSPACES = ("", "proc", "dev", "sys", "tests", "logs", "solution", "sandbox")  # never judged
UNIT_MEBIBYTES = {"K": 1 / 1024, "M": 1, "G": 1024}
CANARY_LINES = re.compile(r"\A(\s*(<!--.*canary.*-->|#.*canary.*)[ \t]*(\n|\Z))+\s*", re.IGNORECASE)


def _honoured_field(meaning: str, **bounds: Any) -> Any:
    """Describe a field that the reader uses, for the table of docs/guides/tasks.md."""
    return Meta(description=meaning, **bounds)


TIME_BOUNDS = {"gt": 0, "le": 1e7}
SIZE_BOUNDS = {"pattern": r"^\d+(\.\d+)?[KMG]$"}
Variables = dict[str, str]


class _Package(msgspec.Struct, frozen=True):
    name: Annotated[str, _honoured_field("name of the task; default: the folder's name")] = ""


class _Metadata(msgspec.Struct, frozen=True):
    workspace: Annotated[
        list[str], _honoured_field("directories that are judged (not in Harbor); default: `workdir`")
    ] = []
    protected: Annotated[
        list[str], _honoured_field("files that the tests see as they are in the image (not in Harbor)")
    ] = []


class _Environment(msgspec.Struct, frozen=True):
    docker_image: Annotated[str, _honoured_field("name of an imported image; default: the folder's name")] = (
        ""
    )
    workdir: Annotated[str, _honoured_field("directory where programs start; default: the image's")] = ""
    env: Annotated[
        Variables, _honoured_field("variables for the agent and the tests; `${…}` is rejected")
    ] = {}
    memory_mb: Annotated[int, _honoured_field("memory for a sandbox, in MiB", ge=1)] | None = None
    storage_mb: (
        Annotated[int, _honoured_field("space for files written in a sandbox, in MiB", ge=1)] | None
    ) = None
    memory: (
        Annotated[str, _honoured_field("the same, but as a string such as `2G`", **SIZE_BOUNDS)] | None
    ) = None
    storage: (
        Annotated[str, _honoured_field("the same, but as a string such as `10G`", **SIZE_BOUNDS)] | None
    ) = None


class _Agent(msgspec.Struct, frozen=True):
    timeout_sec: Annotated[float, _honoured_field("time limit for the agent", **TIME_BOUNDS)] | None = None
    user: (
        Annotated[
            str | int, _honoured_field("`root` or 0 means the sandbox's root; any other value, its user")
        ]
        | None
    ) = None


class _Verifier(msgspec.Struct, frozen=True):
    timeout_sec: Annotated[float, _honoured_field("time limit for the tests", **TIME_BOUNDS)] = 600.0
    env: Annotated[Variables, _honoured_field("additional variables for the tests")] = {}


class _Solution(msgspec.Struct, frozen=True):
    env: Annotated[
        Variables, _honoured_field("additional variables for solution/solve.sh in `tasks check`")
    ] = {}


class HonouredFields(msgspec.Struct, frozen=True):
    """Holds the fields of task.toml that the reader uses."""

    task: _Package = _Package()
    metadata: _Metadata = _Metadata()
    environment: _Environment = _Environment()
    agent: _Agent = _Agent()
    verifier: _Verifier = _Verifier()
    solution: _Solution = _Solution()


class TaskFolder(msgspec.Struct, frozen=True):
    """Holds the content of a task's folder. `solution`: variables of solve.sh. `ignored`: fields that nothing
    reads, by dotted name."""

    path: Path
    instruction: str
    task: Task
    tests: TaskTests
    solution: dict[str, str]
    ignored: dict[str, Any]

    @property
    def row(self) -> Row:
        """Return the task's columns. Ignored fields are included, so that a run lists them as unread."""
        extra_info = {TASK_KEY: msgspec.to_builtins(self.task)}
        ground_truth = msgspec.to_builtins(self.tests)
        row = {"prompt": self.instruction, "ground_truth": ground_truth, "extra_info": extra_info}
        return self.ignored | row | {"data_source": self.path.parent.name}


def read_tasks(directory: str | Path) -> Iterator[TaskFolder]:
    """Read a task folder, or all task folders in a directory, by name. ConfigError names the folder, the
    fault and the cure."""
    root = Path(os.path.abspath(directory))
    if not root.is_dir():
        raise ConfigError(f"{directory}: no such directory; correct the path")

    folders = [root] if _is_task(root) else sorted(filter(_is_task, root.glob("*")))
    if not folders:
        raise ConfigError(
            f"{directory}: no task (a folder with {TASK_FILE}, see docs/guides/tasks.md); to read rows from "
            f"files, use a pattern such as {directory}/*.parquet"
        )

    for folder in folders:
        try:
            yield _read_folder(folder)
        except ConfigError as error:
            raise ConfigError(f"{folder}: {error}") from error
        except OSError as error:
            raise ConfigError(
                f"{folder}: not readable ({one_line(error)}); check the files and their permissions"
            ) from error


def _is_task(path: Path) -> bool:
    return (path / TASK_FILE).exists() or (path / "instruction.md").exists()


def _read_folder(folder: Path) -> TaskFolder:
    document = _parse_file(folder / TASK_FILE, tomllib.loads)
    ignored = _ignored_fields(folder, document)

    try:
        fields = msgspec.convert(document, HonouredFields)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{TASK_FILE}: {error}; correct the field (docs/guides/tasks.md)") from None

    instruction = CANARY_LINES.sub("", _parse_file(folder / "instruction.md", str))
    if not instruction.strip():
        raise ConfigError("instruction.md is empty; write the instruction for the model")

    environment = fields.environment
    for section in ("environment", "verifier", "solution"):
        for name, value in getattr(fields, section).env.items():
            key = f"{TASK_FILE}: {section}.env"
            if not name.isidentifier() or "\0" in value:
                raise ConfigError(f"{key} {name!r} is not a valid variable; correct its name or value")
            if "${" in value:
                raise ConfigError(
                    f"{key} {name} = {value} would take a value from this machine, which the model could "
                    "read; write the value itself"
                )

    image = _find_task_image(folder, environment.docker_image)
    directory = environment.workdir or image.directory
    workspace = fields.metadata.workspace or [directory]

    for path in (directory, *workspace):
        _check_directory(image, path, path in workspace)

    task = Task(
        name=fields.task.name or folder.name,
        image=image.digest,
        directory=os.path.normpath(directory),
        workspace=tuple(map(os.path.normpath, workspace)),
        user="root" if fields.agent.user in ("root", "0", 0) else "",
        environment=environment.env,
        memory_mb=environment.memory_mb or _mebibytes(environment.memory),
        disk_mb=environment.storage_mb or _mebibytes(environment.storage),
        seconds=fields.agent.timeout_sec or 0.0,
    )

    return TaskFolder(folder, instruction, task, _read_tests(folder, fields), fields.solution.env, ignored)


def _parse_file(path: Path, parse: Callable[[str], Any]) -> Any:
    """Read and parse a file. ConfigError if the file is missing or malformed."""
    try:
        return parse(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"{path.name} is missing; every task needs this file") from None
    except ValueError as error:
        raise ConfigError(f"{path.name}: not readable ({one_line(error)}); correct the file") from None


def _ignored_fields(folder: Path, document: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that nothing reads. ConfigError for a refused field."""
    refusals = [(name, reason) for name, reason in REFUSED_FILES.items() if (folder / name).exists()]
    names_by_section = {
        field.name: field.type.__struct_fields__ for field in msgspec.structs.fields(HonouredFields)
    }
    ignored_fields: dict[str, Any] = {}

    for section, inner in document.items():
        honoured_names = names_by_section.get(section, ()) if isinstance(inner, dict) else ()
        fields = {section: inner}
        if honoured_names:
            fields = {f"{section}.{name}": inner[name] for name in inner if name not in honoured_names}

        for name, value in fields.items():
            if name in REFUSED_FIELDS and value and str(value).lower() not in HARMLESS_VALUES:
                refusals.append((f"{TASK_FILE}: {name} = {str(value)[:60]}", REFUSED_FIELDS[name]))
            elif name not in REFUSED_FIELDS and value and section not in DESCRIPTIVE_SECTIONS:
                ignored_fields[name] = value

    for subject, reason in refusals:
        raise ConfigError(f"{subject} is not supported: {reason}")

    return ignored_fields


def _find_task_image(folder: Path, configured_name: str) -> Image:
    """Find the task's image. ConfigError with the two commands that import the image, if they are known."""
    image_source = configured_name or folder.name.lower()
    name = re.sub(r"[^\w.-]", "-", configured_name or folder.name, flags=re.ASCII)

    try:
        return find_image(name)
    except ConfigError as error:
        if not (configured_name or (folder / "environment/Dockerfile").is_file()):
            raise ConfigError(f"{error}; or set environment.docker_image to an existing image") from error

        make_command = f"docker build -t {image_source} {folder / 'environment'}"
        if configured_name:
            make_command = f"docker pull {image_source}"
        import_command = f"docker save {image_source} | asyncrl image import - --name {name}"
        raise ConfigError(f"{error}, for example: {make_command}; {import_command}") from error


def _check_directory(image: Image, path: str, judged: bool) -> None:
    """ConfigError unless the path is a directory of the image and, if `judged`, may be judged."""
    key = f"{TASK_FILE}: {'metadata.workspace' if judged else 'environment.workdir'} {path!r}"
    if not path.startswith("/") or "\0" in path or ".." in path.split("/"):
        raise ConfigError(f"{key} is not an absolute path without '..'; correct the path")

    parts = Path(path).parts[1:]
    if judged and (parts or ("",))[0] in OUTSIDE_WORKSPACES:
        raise ConfigError(f"{key} cannot be judged; set metadata.workspace to the task's own directories")

    layers = list(image.layers)
    inner_path = ""

    for part in parts:  # step by step, as no link of an image is followed
        inner_path = f"{inner_path}/{part}"
        directory_layers = list[str]()

        for layer in filter(lambda layer: os.path.lexists(layer + inner_path), layers):
            mode = os.lstat(layer + inner_path).st_mode
            if not directory_layers and stat.S_ISLNK(mode):
                raise ConfigError(f"{key} leads through the link {inner_path}; name the directory itself")
            if not stat.S_ISDIR(mode):
                break  # this file hides the directories of the layers below

            directory_layers.append(layer)

        layers = directory_layers
        if not layers:
            raise ConfigError(
                f"{key} is not a directory in the task's image; correct the path, or create the directory in "
                "the image"
            )


def _mebibytes(size: str | None) -> int:
    return max(1, int(float(size[:-1]) * UNIT_MEBIBYTES[size[-1]])) if size else 0


def _read_tests(folder: Path, fields: HonouredFields) -> TaskTests:
    """Read the directory tests. ConfigError without a test.sh, and for links that lead out."""
    directory = folder / "tests"
    if not (directory / "test.sh").is_file():
        raise ConfigError("tests/test.sh is missing; every task needs this script, which judges the task")

    real_directory = f"{os.path.realpath(folder)}/tests"
    for path in (directory, *directory.rglob("*")):
        if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(real_directory):
            raise ConfigError(
                f"{path.relative_to(folder)} is a link that points outside tests/; copy the files into tests/"
            )

    config = directory / "config.json"
    decoded = _parse_file(config, msgspec.json.decode) if config.exists() else {}
    test_lists = decoded if isinstance(decoded, dict) else {}
    names_by_key: dict[str, tuple[str, ...]] = {}
    for key in ("FAIL_TO_PASS", "PASS_TO_PASS"):
        value = test_lists.get(key)
        with ConfigError.instead_of(ValueError, text=f"tests/config.json: {key} is not a list of test names"):
            names = msgspec.json.decode(value) if isinstance(value, str) else value or ()
            names_by_key[key] = msgspec.convert(names, tuple[str, ...])

    return TaskTests(
        tests=str(directory),
        seconds=fields.verifier.timeout_sec,
        environment=fields.verifier.env,
        turn_green=names_by_key["FAIL_TO_PASS"],
        stay_green=names_by_key["PASS_TO_PASS"],
        protected=tuple(fields.metadata.protected),
    )
