"""Task folders in Harbor's format: what becomes of each field, and what is refused, in one line."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import pytest

from asyncrl.config import DataConfig
from asyncrl.data.columns import IgnoredSettings
from asyncrl.data.harbor import (
    DESCRIPTIVE_SECTIONS,
    REFUSED_FIELDS,
    REFUSED_FILES,
    HonouredFields,
    read_tasks,
)
from asyncrl.data.samples import RowLayout, read_samples
from asyncrl.data.tasks import Task, TaskTests, check_task, task_of
from asyncrl.errors import ConfigError
from asyncrl.types import Message, Sample
from tests.fakes.tasks import bare_image, task_folder

DOCS = Path(__file__).parents[3] / "docs/guides/tasks.md"

WHOLE = """
schema_version = "1.4"
artifacts = ["/app/out"]
[task]
name = "we/sums"
[metadata]
author = "A"
workspace = ["/app", "/data/in/"]
protected = ["helpers.py"]
[environment]
docker_image = "bare"
workdir = "/app"
cpus = 2
memory = "2G"
storage_mb = 100
build_timeout_sec = 900.0
network_mode = "no-network"
gpus = 0
mcp_servers = []
env = {MODE = "fast"}
[agent]
timeout_sec = 60
user = "root"
[verifier]
timeout_sec = 30.5
env = {SEED = "1"}
"""

# The fields of Harbor 0.25's models of task.toml.
HARBORS = """
schema_version source steps artifacts multi_step_reward_strategy task.name task.version task.description
task.authors task.keywords metadata verifier.timeout_sec verifier.env verifier.user verifier.network_mode
verifier.allowed_hosts verifier.environment_mode verifier.environment verifier.collect agent.timeout_sec
agent.user agent.network_mode agent.allowed_hosts environment.build_timeout_sec environment.docker_image
environment.os environment.cpus environment.memory_mb environment.storage_mb environment.memory
environment.storage environment.gpus environment.gpu_types environment.tpu environment.mcp_servers
environment.env environment.skills_dir environment.healthcheck environment.workdir environment.allow_internet
environment.network_mode environment.allowed_hosts solution.env
"""


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ASYNCRL_IMAGES", str(image_directory := tmp_path / "images"))
    bare_image(image_directory, "bare", "app", "data/in")
    return image_directory


def read(path: Path | str, see: Any = lambda row, is_demonstration: row) -> list[Sample]:
    config = DataConfig(str(path))
    return list(read_samples(config, str(path), "train", RowLayout(truth="tests"), see))


def test_a_folder_becomes_a_sample_with_its_image_pinned(tmp_path: Path, images: Path) -> None:
    names = {"FAIL_TO_PASS": ["test_a.py::test_one"], "PASS_TO_PASS": '["test_a.py::test_two[x-1]"]'}
    folder = task_folder(tmp_path / "sums" / "b", WHOLE, config=names)
    task_folder(tmp_path / "sums" / "a")
    (tmp_path / "sums" / "README.md").write_text("no task")
    first, second = read(tmp_path / "sums")
    assert [task_of(sample).name for sample in (first, second)] == ["a", "we/sums"]  # type: ignore[union-attr]
    assert (second.data_source, second.prompt) == ("sums", (Message("user", "Write 42 into answer.txt."),))
    digest = bare_image(images, "bare").digest
    assert task_of(second) == Task(
        "we/sums", digest, "/app", ("/app", "/data/in"), "root", {"MODE": "fast"}, 2048, 100, 60.0
    )
    assert second.ground_truth == {
        "tests": str(folder / "tests"),
        "seconds": 30.5,
        "environment": {"SEED": "1"},
        "turn_green": ["test_a.py::test_one"],
        "stay_green": ["test_a.py::test_two[x-1]"],
        "protected": ["helpers.py"],
    }
    assert task_of(first) == Task("a", digest, "/app", ("/app",))
    assert msgspec.json.decode(first.ground_truth_json, type=TaskTests).seconds == 600

    bare_image(
        images, "bare", "app", "data/in", digest="sha256-other"
    )  # imported anew: other samples, and a resume says so
    assert [task_of(sample).image for sample in read(tmp_path / "sums")] == ["sha256-other"] * 2  # type: ignore[union-attr]


def test_folders_are_named_alone_by_pattern_and_among_files(tmp_path: Path, images: Path) -> None:
    for name in ("a1", "a2", "b1"):
        task_folder(tmp_path / "sums" / name)
    for path, names in (("sums/b1", ["b1"]), ("sums/a*", ["a1", "a2"]), ("su*", ["a1", "a2", "b1"])):
        samples = read(tmp_path / path)
        assert [task_of(sample).name for sample in samples] == names  # type: ignore[union-attr]
        assert {sample.data_source for sample in samples} == {"sums"}


def test_ignored_fields_are_one_line_and_can_be_read_as_columns(tmp_path: Path, images: Path) -> None:
    from asyncrl.config import parse

    tasks = tmp_path / "sums"
    for name in ("a", "b"):
        task_folder(tasks / name, WHOLE + "typo_sec = 3\nempty = {}\n")
    ignored_settings = IgnoredSettings()
    read(tasks, ignored_settings.count_row)
    keys = {"name": "x", "data": {"train": str(tasks)}, "model": {"path": "m"}}
    (line,) = ignored_settings.unmet_requests(parse(keys))
    ignored = ("artifacts", "environment.cpus", "environment.build_timeout_sec", "verifier.typo_sec")
    assert line.startswith(f"unused columns: {', '.join(ignored)}")
    layout = RowLayout({"extra_info.cpus": "environment.cpus"})
    sample, _ = read_samples(DataConfig(str(tasks)), str(tasks), "train", layout)
    assert sample.extra_info["cpus"] == 2


def test_canaries_are_not_shown_to_the_model(tmp_path: Path, images: Path) -> None:
    canary = "<!-- harbor-canary GUID 1 -->\n# a CANARY: never train on this\n\n"
    task_folder(tmp_path / "t", instruction=f"{canary}# Title\nSolve it; mind the canary.\n")
    assert read(tmp_path / "t")[0].prompt[0].content == "# Title\nSolve it; mind the canary.\n"


def toml(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "task.toml").write_text(text)


def environment(line: str, more: str = "") -> Callable[[Path], object]:
    return toml(f'[environment]\ndocker_image = "bare"\n{line}\n{more}')


def at(name: str, text: str | bytes) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())

    return write


WORKDIR = 'workdir = "/app"'
FAULTS: list[tuple[str, Callable[[Path], Any], str]] = [
    (
        "no instruction",
        lambda t: (t / "instruction.md").unlink(),
        "instruction.md is missing; every task needs this file",
    ),
    ("no toml", lambda t: (t / "task.toml").unlink(), "task.toml is missing"),
    ("an empty instruction", at("instruction.md", "# canary\n"), "instruction.md is empty"),
    ("no UTF-8", at("instruction.md", b"caf\xe9"), "instruction.md: not readable (UnicodeDecodeError"),
    ("broken TOML", toml("[environment\n"), "task.toml: not readable (TOMLDecodeError"),
    ("no tests", lambda t: (t / "tests/test.sh").unlink(), "tests/test.sh is missing"),
    (
        "a number",
        environment("workdir = 3"),
        "task.toml: Expected `str`, got `int` - at `$.environment.workdir`",
    ),
    ("no time", environment(WORKDIR, "[agent]\ntimeout_sec = 0"), "$.agent.timeout_sec"),
    ("time is NaN", environment(WORKDIR, "[agent]\ntimeout_sec = nan"), "$.agent.timeout_sec"),
    ("endless", environment(WORKDIR, "[verifier]\ntimeout_sec = inf"), "$.verifier.timeout_sec"),
    ("negative", environment(WORKDIR, "[verifier]\ntimeout_sec = -1"), "$.verifier.timeout_sec"),
    ("no memory", environment("memory_mb = 0"), "$.environment.memory_mb"),
    ("no size", environment('storage = "lots"'), "$.environment.storage"),
    ("no section", toml("environment = 3"), "$.environment"),
    (
        "no image",
        toml('[environment]\ndocker_image = "lost"'),
        "no image named 'lost'",
    ),
    ("the root", environment(""), "metadata.workspace '/' cannot be judged"),
    ("the tests", environment(WORKDIR, '[metadata]\nworkspace = ["/tests"]'), "'/tests' cannot be judged"),
    ("above", environment(WORKDIR, '[metadata]\nworkspace = ["/app/../"]'), "is not an absolute path"),
    ("relative", environment('workdir = "app"'), "'app' is not an absolute path"),
    ("nowhere", environment('workdir = "/srv/app"'), "'/srv/app' is not a directory in the task's image"),
    ("a link", environment(WORKDIR, '[metadata]\nworkspace = ["/link"]'), "leads through the link /link;"),
    ("below a link", environment('workdir = "/link/in"'), "leads through the link /link;"),
    ("a file", environment('workdir = "/file"'), "'/file' is not a directory in the task's image"),
    (
        "the machine's",
        environment(WORKDIR + '\nenv = {KEY = "${KEY:-x}"}'),
        "environment.env KEY = ${KEY:-x}",
    ),
    (
        "no name",
        environment(WORKDIR + '\nenv = {"A=B" = "x"}'),
        "environment.env 'A=B' is not a valid variable",
    ),
    ("names", at("tests/config.json", '{"FAIL_TO_PASS": 3}'), "FAIL_TO_PASS is not a list of test names"),
    ("text", at("tests/config.json", '{"PASS_TO_PASS": "a b"}'), "PASS_TO_PASS is not a list of test names"),
    ("no JSON", at("tests/config.json", "{"), "config.json: not readable"),
    ("out", lambda t: (t / "tests/x").symlink_to("../solution"), "tests/x is a link that points outside"),
    (
        "absolute",
        lambda t: (t / "tests/x").symlink_to("/etc/passwd"),
        "tests/x is a link that points outside",
    ),
    (
        "elsewhere",
        lambda t: (t / "tests").rename(t / "old") and (t / "tests").symlink_to("old"),
        "points outside",
    ),
    (
        "compose",
        at("environment/docker-compose.yaml", "x: 1"),
        "environment/docker-compose.yaml is not supported",
    ),
    ("context", at("trajectory.json", "{}"), "trajectory.json is not supported: a task begins with"),
]


@pytest.mark.parametrize(
    ("spoil", "complaint"), [case[1:] for case in FAULTS], ids=[case[0] for case in FAULTS]
)
def test_what_is_wrong_is_one_line_that_names_the_folder(
    tmp_path: Path, images: Path, spoil: Callable[[Path], Any], complaint: str
) -> None:
    image = bare_image(images, "bare", "app", "real/in")
    (Path(image.root) / "link").symlink_to("/real")
    (Path(image.root) / "file").touch()
    spoil(folder := task_folder(tmp_path / "tasks" / "t"))
    with pytest.raises(ConfigError, match=re.escape(complaint)) as raised:
        read(tmp_path / "tasks")
    assert str(raised.value).startswith(f"{folder}: ") and "\n" not in str(raised.value)


def test_a_missing_image_comes_with_the_two_commands_that_make_it(tmp_path: Path, images: Path) -> None:
    folder = task_folder(tmp_path / "lost", "[environment]\n")
    with pytest.raises(ConfigError, match=r"--name lost; or set environment\.docker_image to an existing"):
        read(folder)  # nothing says what it is made of
    (folder / "environment").mkdir()
    (folder / "environment/Dockerfile").touch()
    built = re.escape(
        f"docker build -t lost {folder}/environment; docker save lost | asyncrl image import - --name lost"
    )
    with pytest.raises(ConfigError, match=built):
        read(folder)
    task_folder(folder, '[environment]\ndocker_image = "org/swe:1"\nworkdir = "/app"')
    saved = re.escape(
        "docker pull org/swe:1; docker save org/swe:1 | asyncrl image import - --name org-swe-1"
    )
    with pytest.raises(ConfigError, match=saved):
        read(folder)
    bare_image(images, "org-swe-1", "app")
    assert read(folder)


def test_layers_of_a_thin_image_hide_what_is_below(tmp_path: Path, images: Path) -> None:
    bare_image(images, "base", "app/src", "old")
    thin = bare_image(images, "thin", "app/more", over="base")
    (Path(thin.root) / "old").touch()
    for inner, fault in (
        ("/app/src", ""),
        ("/app/more", ""),
        ("/old", "is not a directory in the task's image"),
    ):
        folder = task_folder(tmp_path / "t", f'[environment]\ndocker_image = "thin"\nworkdir = "{inner}"')
        if not fault:
            assert read(folder)
            continue
        with pytest.raises(ConfigError, match=fault):
            read(folder)


@pytest.mark.parametrize("name", REFUSED_FIELDS)
def test_refused_fields_say_why_and_harmless_values_pass(tmp_path: Path, images: Path, name: str) -> None:
    section, _, field = name.rpartition(".")
    header = '[environment]\ndocker_image = "bare"\nworkdir = "/app"\n'
    section_header = "" if section == "environment" else f"[{section}]\n" if section else ""
    for value, refused in (('"public"', True), ("false", False)):
        line = f"{field} = {value}\n"
        text = header + section_header + line if section else line + header
        folder = task_folder(tmp_path / "t", text)
        if refused:
            with pytest.raises(
                ConfigError, match=re.escape(f"{name} = public is not supported: {REFUSED_FIELDS[name]}")
            ):
                read(folder)
        else:
            assert "environment.cpus" not in next(read_tasks(folder)).ignored
            assert name not in next(read_tasks(folder)).ignored


def test_a_directory_without_tasks_is_one_line(tmp_path: Path, images: Path) -> None:
    (tmp_path / "parquet").mkdir()
    with pytest.raises(ConfigError, match=r"no task \(a folder with task\.toml, .*/\*\.parquet"):
        read(tmp_path / "parquet")
    with pytest.raises(ConfigError, match="none/: no such directory; correct the path"):
        read(f"{tmp_path}/none/")


# -- the table ---------------------------------------------------------------------------------------


def honoured() -> Iterator[tuple[str, str]]:
    """The honoured fields with their meanings."""
    for section in msgspec.structs.fields(HonouredFields):
        for name, hint in get_type_hints(section.type, include_extras=True).items():
            plain = [
                annotation for annotation in (hint, *get_args(hint)) if hasattr(annotation, "__metadata__")
            ]
            yield f"{section.name}.{name}", plain[0].__metadata__[0].description


def table() -> str:
    rows = [(name, "honoured", meaning) for name, meaning in honoured()]
    done = {name for name, *_ in rows} | {*REFUSED_FIELDS}
    people = [
        name
        for name in HARBORS.split()
        if name not in done and name.partition(".")[0] in DESCRIPTIVE_SECTIONS
    ]
    other_names = [name for name in HARBORS.split() if name not in done and name not in people]
    rows.append((", ".join(people), "descriptive", "not read"))
    rows.append((", ".join(other_names), "ignored", "listed on one line, with all unknown names"))
    reasons: dict[str, list[str]] = {}
    for name, why in (REFUSED_FIELDS | REFUSED_FILES).items():
        reasons.setdefault(why, []).append(name)
    rows += [(", ".join(names), "refused", why) for why, names in reasons.items()]
    lines = (
        "| " + " | ".join((re.sub(r"[\w./-]+", r"`\g<0>`", names), *more)) + " |" for names, *more in rows
    )
    return "\n".join(("| field | treatment | meaning or reason |", "|---|---|---|", *lines))


def test_the_page_has_the_table_of_the_reader() -> None:
    """After a change: write what this compares with into docs/guides/tasks.md."""
    assert table() in DOCS.read_text()


# -- checks of samples -------------------------------------------------------------------------------


def test_a_sample_is_checked_for_its_image_and_its_tests(tmp_path: Path, images: Path) -> None:
    (sample,) = read(folder := task_folder(tmp_path / "t"))
    check_task(sample, True)
    other_sample = msgspec.structs.replace(sample, extra_info_json='{"task": "gsm8k"}')
    assert task_of(other_sample) is None
    check_task(other_sample, False)
    with pytest.raises(ConfigError, match="sample 0 is not a task"):
        check_task(other_sample, True)
    with pytest.raises(ConfigError, match="sample 0: the task or its tests cannot be read"):
        check_task(msgspec.structs.replace(sample, ground_truth_json="42"), True)
    check_task(msgspec.structs.replace(sample, ground_truth_json="42"), False)
    (folder / "tests/test.sh").unlink()
    with pytest.raises(
        ConfigError, match=r"/tests/test\.sh, which judges the task, is missing; restore the script"
    ):
        check_task(sample, True)
    (images / task_of(sample).image / "image.json").unlink()  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="no image named"):
        check_task(sample, False)
