"""The reward `tests`: cheats score 0, honest solutions 1, and what is not the agent's fault is no score.

Each runs as a shell script of the agent in the task's image, its changes are collected, and judged in another
sandbox. docs/dev/sandbox.md has what stops each. The tasks are those that the project teaches (read from
docs/guides/tasks.md) and makes (tools/make_swe_tasks.py).
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from types import MappingProxyType
from typing import Any

import msgspec
import pytest

from asyncrl import cli
from asyncrl.commands.tasks import check_tasks
from asyncrl.data.harbor import TaskFolder, read_tasks
from asyncrl.data.task_sandboxes import TaskSandbox
from asyncrl.data.tasks import TASK_KEY, Task, TaskTests
from asyncrl.isolation.images import Image, find_image
from asyncrl.isolation.importing import import_image
from asyncrl.isolation.sandbox.base import ISOLATION, RunResult, SandboxLimits
from asyncrl.isolation.sandbox.changes import DIRECTORY, OPAQUE, pack_entries
from asyncrl.isolation.sandbox.jail import Jail
from asyncrl.rewards import RewardError, RewardInput
from asyncrl.rewards.task_tests import EMPTY_LOGS, JudgedByTests, NoVerdict, pack_directory
from asyncrl.types import FailReason, Sample
from tests.fakes.images import small_image
from tests.fakes.scripts import script
from tests.fakes.tasks import bare_image, task_folder
from tests.integration.runs import Run
from tests.integration.test_sandbox_exec import SHORT_OF_MEMORY

LIMITS = SandboxLimits(memory=0, open_files=256)
APP = {
    "calc/__init__.py": "import mimetypes, pickle  # which ask for winreg, _winapi and org\n\n"
    "try:\n    import cytoolz\nexcept ImportError:\n    pass\n\nfrom calc.sums import add, double\n",
    "calc/sums.py": "def add(a, b):\n    return a - b\n\n\ndef double(a):\n    return 2 * a\n",
    "calc/unused.py": "",
    "tests/conftest.py": "import pytest\n\n\n@pytest.fixture\ndef two():\n    return 2\n",
    "tests/helpers.py": "def helped(found):\n    return found\n",
    "tests/test_calc.py": "from calc import add, double\nfrom tests.helpers import helped\n\n"
    "def test_add(two):\n    assert helped(add(two, 3)) == 5\n\n"
    "def test_double(two):\n    assert double(two) == 4\n",
}
PAGE = (Path(__file__).parents[2] / "docs/guides/tasks.md").read_text()


def block(language: str, words: str) -> str:
    """Return the block of code of docs/guides/tasks.md that has these words."""
    (text,) = (text for text in re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.M | re.S) if words in text)
    return str(text)


QUICK_START = block("bash", "asyncrl image import tree").partition("asyncrl tasks check")[0]
(PYTEST_INI,) = re.findall(r"^printf '(.*)' > tests/pytest.ini$", QUICK_START, re.M)
(RUN_PYTEST,) = re.findall(r"^cat > tests/run_pytest.py <<'END'\n(.*?)^END$", QUICK_START, re.M | re.S)
CAREFUL = {
    "pytest.ini": PYTEST_INI.replace("\\n", "\n"),
    "run_pytest.py": RUN_PYTEST.replace('{"calc"}', '{"calc", "tests"}'),
    "test.sh": block("sh", "--rootdir /app"),
}
"""Tests in the workspace that are run as docs/guides/tasks.md advises."""
NAIVE = {"test.sh": "cd /app\npython3 -m pytest tests/test_calc.py && echo 1 > /logs/verifier/reward.txt"}
TURN = ("tests/test_calc.py::test_add",)
STAY = ("tests/test_calc.py::test_double",)

FIX = "sed -i 's/a - b/a + b/' calc/sums.py"
FORGED = (
    '<testsuites><testsuite><testcase classname="tests.test_calc" name="test_add"/>'
    '<testcase classname="tests.test_calc" name="test_double"/>'
    '<testcase classname="test_calc" name="test_add"/></testsuite></testsuites>'
)
FORGE = (
    "import os; os.makedirs('/logs/verifier', exist_ok=True); "
    f"open('/logs/verifier/report.xml', 'w').write('{FORGED}'); os._exit(0)"
)
ALL_PASS = """
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    report.outcome, report.longrepr = "passed", None
"""
CHANGED_ITEMS = "import pytest\ndef pytest_collection_modifyitems(items):\n    "
NO_TESTS = "def test_add(): pass\ndef test_double(): pass\n"
SITE = "/usr/lib/python3*/site-packages"


def written(path: str, text: str) -> str:
    return f"mkdir -p $(dirname {path}); cat > {path} <<'EOF'\n{text}\nEOF\n"


COMPILE = dedent(f"""\
    import importlib.util, marshal, os, struct, sys, _pytest.assertion.rewrite as rewrite
    def compiled(source, text, end, head):
        folder, name = os.path.split(source)
        os.makedirs(f"{{folder}}/__pycache__", exist_ok=True)
        with open(f"{{folder}}/__pycache__/{{name[:-3]}}{{end}}", "wb") as file:
            file.write(importlib.util.MAGIC_NUMBER + head + marshal.dumps(compile(text, source, "exec")))
    if sys.argv[1] == "test":
        source = open("tests/test_calc.py", "rb").read()
        head = struct.pack("<I", 3) + importlib.util.source_hash(source)
        compiled("tests/test_calc.py", {NO_TESTS!r}, rewrite.PYC_TAIL, head)
    else:
        found = os.stat("calc/sums.py")
        head = struct.pack("<3I", 0, int(found.st_mtime), found.st_size)
        text = open("calc/sums.py").read().replace("-", "+")
        compiled("calc/sums.py", text, f".{{sys.implementation.cache_tag}}.pyc", head)""")
LIBRARY = """\
names=$(python3 -I -c 'import sys
print(*{*sys.stdlib_module_names} - {*sys.modules} - {"pdb"})
import os, _pytest
print(*(name[:-3] for name in os.listdir(_pytest.__path__[0]) if name.endswith(".py") and name[0] != "_"))')
for name in $names org exceptiongroup colorama xdist pytest_asyncio cytoolz; do cp pdb.py $name.py; done
mkdir -p src; cp *.py src; cp *.py tests
"""
GIT = """\
mkdir -p .git; cp -r calc .git
sed -i 's/a - b/a + b/' .git/calc/sums.py
echo '__path__.insert(0, "/app/.git/calc"); from calc.sums import *' > calc/__init__.py
"""

CHEATS = {
    "exit at import": "echo 'import os; os._exit(0)' >> calc/__init__.py",
    "sys.exit in conftest.py": written("conftest.py", "import os; os._exit(0)"),
    "all pass in conftest.py": written("conftest.py", ALL_PASS),
    "all pass in the tests' conftest.py": written("tests/conftest.py", APP["tests/conftest.py"] + ALL_PASS),
    "xfail in conftest.py": written(
        "conftest.py", CHANGED_ITEMS + "for item in items: item.add_marker(pytest.mark.xfail(strict=False))"
    ),
    "skip in conftest.py": written(
        "conftest.py", CHANGED_ITEMS + "for item in items: item.add_marker(pytest.mark.skip)"
    ),
    "deselect in conftest.py": written("conftest.py", CHANGED_ITEMS + "del items[0]"),
    "deleted test": "sed -i '/def test_add/,/== 5/d' tests/test_calc.py",
    "deleted tests": "rm -r tests",
    "edited helper": written("tests/helpers.py", "helped = lambda found: 5"),
    "edited test": written("tests/test_calc.py", NO_TESTS),
    "tests made anew": "rm -r tests\n" + written("tests/test_calc.py", NO_TESTS),
    "tests behind a link": written("other/test_calc.py", NO_TESTS) + "rm -r tests; ln -s other tests",
    "forged report": written("/logs/verifier/report.xml", FORGED),
    "forged reward": written("/logs/verifier/reward.txt", "1"),
    "files in /tests": written("/tests/pytest.py", FORGE) + "cp /tests/pytest.py /tests/conftest.py",
    "patched pytest": f"echo 'def pytest_pyfunc_call(pyfuncitem): return True' >> {SITE}/_pytest/python.py",
    "pytest in the workspace": written("pytest.py", FORGE),
    "python in the workspace": written("python3", f"#!/usr/bin/python3\n{FORGE}") + "chmod +x python3",
    "another python": "mv /usr/bin/python3 /usr/bin/py\n"
    + written("/usr/bin/python3", f"#!/usr/bin/py\n{FORGE}")
    + "chmod +x /usr/bin/python3",
    "variables in files of shells": "for file in .bashrc .profile .bash_profile .env; do echo 'export "
    "PYTEST_ADDOPTS=--collect-only PATH=/app' > $file; cp $file ~/$file; cp $file /root/$file; done",
    "addopts in pytest.ini": written("evil.py", ALL_PASS)
    + written("pytest.ini", "[pytest]\naddopts = -p evil"),
    "addopts in pyproject.toml": written("evil.py", ALL_PASS)
    + written("pyproject.toml", '[tool.pytest.ini_options]\naddopts = "-p evil"'),
    "addopts in setup.cfg, tox.ini": written("evil.py", ALL_PASS)
    + written("tox.ini", "[pytest]\naddopts = -p evil")
    + written("setup.cfg", "[tool:pytest]\naddopts = -p evil"),
    "a plugin's entry point": written("evil.py", ALL_PASS)
    + written("evil-1.dist-info/entry_points.txt", "[pytest11]\nevil = evil")
    + written("evil-1.dist-info/METADATA", "Name: evil\nVersion: 1"),
    ".pth": written("a.pth", FORGE) + f"cp a.pth {SITE}",
    "sitecustomize": written("sitecustomize.py", FORGE) + f"cp sitecustomize.py {SITE}",
    "a link out of the workspace": f"{FIX}; mv calc /fixed; ln -s /fixed calc",
    "the workspace is a link to /tests": "cd /; mkdir -p tests; mv /app /gone; ln -s /tests /app",
    "the workspace is gone": "cd /; rm -r /app",
    "a process that writes later": f"(sleep 1; {FIX}) > /dev/null 2>&1 &",
    "reading /tests and /solution": "cat /tests/*.py /solution/* > calc/unused.py; "
    "echo 'from calc.unused import *' >> calc/__init__.py",
    "the fix in .git": GIT,
    "the original from site-packages": f"cp {SITE}/calc/* calc",
    "a compiled test": written("make.py", COMPILE) + "python3 make.py test",
    "a compiled module with the time of its source": written("make.py", COMPILE) + "python3 make.py module",
    "a module of the library's name": written("pdb.py", FORGE) + LIBRARY,
    "a package of the library's name": written("pdb/__init__.py", FORGE)
    + "mkdir encodings; for name in code cmd readline pytest _pytest pluggy unittest xml encodings/idna "
    "unittest/mock xml/etree _pytest/junitxml; do cp -r pdb $name; done",
    "a plugin's entry point in capitals": written("evil.py", ALL_PASS)
    + written("evil-1.DIST-INFO/entry_points.txt", "[pytest11]\nevil = evil")
    + written("evil-1.DIST-INFO/METADATA", "Name: evil\nVersion: 1"),
}
"""What the agent does in the workspace, /app. FEEBLE: those that score nothing either where tests run in its
own sandbox and their exit code is the verdict."""
FEEBLE = {
    *(
        "deleted tests",
        "forged report",
        "files in /tests",
        "python in the workspace",
        "the workspace is gone",
    ),
    *("variables in files of shells", "the workspace is a link to /tests", "a process that writes later"),
    *("reading /tests and /solution", "the original from site-packages"),
}
FAST = ("all pass in conftest.py", "tests made anew", "the workspace is a link to /tests")
REPLACED = ("a module of the library's name", "a package of the library's name")
UNSTOPPED = {
    "a report from the code under test": f"echo {shlex.quote(FORGE)} >> calc/__init__.py",
    "pytest patched by the code under test": "echo 'import _pytest.runner as r; "
    "r.CallInfo.excinfo = property(lambda self: None, lambda self, value: None)' >> calc/__init__.py",
}
"""They run in the process of the tests."""

HONEST = {
    "a fix": FIX,
    "a fix with a new file": written("calc/more.py", "def add(a, b):\n    return a + b")
    + written("calc/__init__.py", "from calc.more import add\nfrom calc.sums import double"),
    "a fix that deletes and moves": f"{FIX}; rm calc/unused.py; mv calc/sums.py calc/numbers.py; "
    "sed -i s/sums/numbers/ calc/__init__.py",
    "a fix in a directory made anew": f"cp -r calc old; rm -r calc; mv old calc; {FIX}",
    "a fix behind a link": f"{FIX}; mv calc/sums.py calc/real.py; ln -s real.py calc/sums.py",
}


@dataclass
class Bench:
    """Plays an agent in the image, and judges what it left."""

    task: Task
    tests: TaskTests

    async def changes(self, script: str) -> dict[str, str]:
        sandbox = TaskSandbox(self.task, LIMITS, ISOLATION)
        async with sandbox.jail as jail:
            await jail.run("shell", self.placed(script), 20)
            return await sandbox.collect_changes()

    def placed(self, script: str) -> str:
        return script.replace("/app", self.task.directory)

    async def judged(self, result: Any, tests: TaskTests | None = None, **options: Any) -> dict[str, Any]:
        extra = msgspec.json.encode({TASK_KEY: self.task}).decode()
        truth = msgspec.json.encode(tests or self.tests).decode()
        reward_input = RewardInput(Sample(0, "tasks", (), truth, extra_info_json=extra), "", result=result)
        return await JudgedByTests(**options)(reward_input)

    async def all(self, scripts: dict[str, str], judge: Any = None) -> dict[str, dict[str, Any]]:
        """Play and judge several, two at a time."""
        free_sandboxes = asyncio.Semaphore(2)

        async def one(script: str) -> dict[str, Any]:
            async with free_sandboxes:
                return dict(await (judge or self.played)(script))

        results = await asyncio.gather(*map(one, scripts.values()))
        return dict(zip(scripts, results, strict=True))

    async def played(self, script: str) -> dict[str, Any]:
        return await self.judged(await self.changes(script))

    async def exit_code(self, script: str) -> dict[str, Any]:
        """What the tests' exit code says in the agent's own sandbox."""
        sandbox = TaskSandbox(self.task, LIMITS, ISOLATION)
        async with sandbox.jail as jail:
            await jail.run("shell", self.placed(script), 20)
            files = (*pack_directory(Path(self.tests.tests), "tests/test.sh"), *EMPTY_LOGS)
            await jail.apply_changes(
                pack_entries(
                    change._replace(kind=DIRECTORY) if change.kind == OPAQUE else change for change in files
                )
            )
            try:
                result = await JudgedByTests()._run_tests(sandbox, TaskTests(self.tests.tests, 60.0))
            except NoVerdict as error:
                return {"score": 0.0, "tests": str(error)}
            return {"score": result.score}


@pytest.fixture(scope="module")
def image(images: Path) -> Image:
    small_image(images, "small-python", python=True, packages=("pytest",))
    return image_of(images, "calc", "app")


def image_of(images: Path, name: str, top: str, more: Mapping[str, str] = MappingProxyType({})) -> Image:
    new_image = bare_image(images, name, f"{top}/calc", f"{top}/tests", over="small-python", directory="/app")
    for file, text in (APP | {**more}).items():
        Path(new_image.root, top, file).write_text(text)
    return new_image


def bench_of(image: Image, directory: Path, files: dict[str, str]) -> Bench:
    for name, text in files.items():
        (directory / name).write_text(text)
    task = Task("calc", image.digest, "/app", environment=CARELESS)
    return Bench(task, TaskTests(str(directory), 60.0, turn_green=TURN, stay_green=STAY))


@pytest.fixture
def bench(image: Image, tmp_path: Path) -> Bench:
    return bench_of(image, tmp_path, CAREFUL)


CARELESS = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": "/app"}  # variables of an image


@pytest.fixture(scope="module")
def quick_start(image: Image, images: Path, tmp_path_factory: pytest.TempPathFactory) -> TaskFolder:
    """The task that the commands of docs/guides/tasks.md make."""
    (images / "names/debian-pytest").symlink_to(f"../{find_image('small-python').digest}")
    directory = tmp_path_factory.mktemp("quick-start")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(
        ["bash", "-euc", QUICK_START], cwd=directory, env=os.environ | {"PATH": path}, check=True, timeout=60
    )
    (folder,) = read_tasks(directory / "tasks")
    return folder


@pytest.fixture(scope="module")
def tools_task(image: Image, tmp_path_factory: pytest.TempPathFactory) -> TaskFolder:
    """A task that tools/make_swe_tasks.py makes of APP: the bug of `add`."""
    return made_task(tmp_path_factory.mktemp("tools-task"), "tools-task", APP, TURN, STAY)


def made_task(
    directory: Path, name: str, files: Mapping[str, str], turn_green: Sequence[str], stay_green: Sequence[str]
) -> TaskFolder:
    for file, text in files.items():
        (directory / "tree" / file).parent.mkdir(parents=True, exist_ok=True)
        (directory / "tree" / file).write_text(text.replace("a - b", "a + b"))
    packages = script("swe_tasks.packages")
    tool = script("make_swe_tasks")
    package = packages.Package("calc-1.0", directory / "tree", directory / "tests")
    package.passing = dict.fromkeys((*turn_green, *stay_green), 0.1)
    package.versions = {"python": "3", "pytest": "9"}
    (path,) = (file for file in files if file.endswith("calc/sums.py"))
    possible = packages.mutations((directory / "tree" / path).read_bytes())
    (mutation,) = (mutation for mutation in possible if mutation.after == "    return a - b")
    bug = packages.Bug(path, mutation, dict.fromkeys(turn_green, "assert -1 == 5"), tuple(stay_green))
    tool.write_task(directory / "task", name, package, bug)
    layer = directory / "task/environment/testbed.tar.gz"
    import_image(str(layer), name, find_image("small-python").digest)
    (folder,) = read_tasks(directory / "task")
    return folder


@pytest.fixture
def benches(bench: Bench, quick_start: TaskFolder, tools_task: TaskFolder) -> dict[str, Bench]:
    """Return a bench for each of TAUGHT. That of the quick start has the package that cheats change, too."""
    package = msgspec.structs.replace(quick_start.task, image=bench.task.image, environment=CARELESS)
    variables = CARELESS | {"PYTHONPATH": tools_task.task.directory}
    changed_task = msgspec.structs.replace(tools_task.task, environment=variables)
    return dict(
        zip(
            TAUGHT,
            (bench, Bench(package, quick_start.tests), Bench(changed_task, tools_task.tests)),
            strict=True,
        )
    )


TAUGHT = ("tests in the workspace", "the quick start", "make_swe_tasks.py")


def scores(results: dict[str, dict[str, Any]]) -> dict[str, float]:
    return {name: result["score"] for name, result in results.items()}


async def test_honest_solutions_score_and_cheats_do_not(bench: Bench) -> None:
    results = await bench.all({"a fix": FIX} | {name: CHEATS[name] for name in FAST})
    assert scores(results) == {"a fix": 1.0} | dict.fromkeys(FAST, 0.0), results


async def test_the_quick_start_is_solved_by_its_solution_and_not_by_an_exit(
    quick_start: TaskFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await check_tasks([quick_start], jobs=1, repeats=1, as_json=False) == 0
    assert capsys.readouterr().out.endswith("ok\n1 of 1 tasks passed\n")
    bench = Bench(quick_start.task, quick_start.tests)
    assert (await bench.played("echo 'import os; os._exit(0)' > calc.py"))["score"] == 0.0


@pytest.mark.parametrize("name", TAUGHT[1:])
async def test_no_file_of_the_workspace_replaces_a_module_of_the_library(
    benches: dict[str, Bench], name: str
) -> None:
    verdicts = await benches[name].all({"a fix": FIX} | {cheat: CHEATS[cheat] for cheat in REPLACED})
    assert scores(verdicts) == {"a fix": 1.0} | dict.fromkeys(REPLACED, 0.0), verdicts


@pytest.mark.full
@pytest.mark.parametrize("user", ["", "root"])
@pytest.mark.parametrize("name", TAUGHT)
@pytest.mark.parametrize(("scripts", "score"), [(HONEST, 1.0), (CHEATS, 0.0)], ids=["honest", "cheats"])
async def test_all_honest_solutions_score_and_all_cheats_do_not(
    benches: dict[str, Bench], scripts: dict[str, str], score: float, name: str, user: str
) -> None:
    bench = benches[name]
    bench.task = msgspec.structs.replace(bench.task, user=user)
    verdicts = await bench.all(scripts)
    assert scores(verdicts) == dict.fromkeys(scripts, score), verdicts


@pytest.mark.full
async def test_tests_whose_root_is_further_down_cannot_be_edited(
    image: Image, images: Path, tmp_path: Path
) -> None:
    below = {name: text.replace("/app", "/app/src") for name, text in CAREFUL.items()}
    down = bench_of(image_of(images, "down", "app/src"), tmp_path, below)
    cheats = {name: CHEATS[name] for name in ("edited test", "edited helper", "tests behind a link")}
    results = await down.all(
        {name: f"cd src; {script}" for name, script in ({"a fix": FIX} | cheats).items()}
    )
    assert scores(results) == {"a fix": 1.0} | dict.fromkeys(cheats, 0.0), results


@pytest.mark.full
async def test_tests_that_are_copied_into_the_workspace_are_the_ones_that_run(bench: Bench) -> None:
    copied = script_bench(
        bench,
        "mkdir -p /app/new; cp /tests/test_new.py /app/new\n"
        + CAREFUL["test.sh"].replace("tests/test_calc", "new/test_new"),
        turn_green=("new/test_new.py::test_add",),
    )
    test = "from calc import add\n\ndef test_add():\n    assert add(2, 3) == 5\n"
    (Path(bench.tests.tests) / "test_new.py").write_text(test)
    forged = (
        "mkdir other; echo 'def test_add(): pass' > other/test_new.py; chmod a-w other/test_new.py other; "
    )
    cheats = {"a link": forged + "ln -s other new", "a directory": forged + "mv other new"}
    results = await copied.all({"a fix": FIX} | cheats)
    assert scores(results) == {"a fix": 1.0} | dict.fromkeys(cheats, 0.0), results


@pytest.mark.full
async def test_a_protected_helper_is_the_one_that_is_imported(
    image: Image, images: Path, tmp_path: Path
) -> None:
    """It lies beside the package; a package of its name would be imported before it, and so would a link."""
    test = APP["tests/test_calc.py"].replace("tests.helpers", "helpers")
    beside = image_of(
        images, "beside", "app", {"helpers.py": APP["tests/helpers.py"], "tests/test_calc.py": test}
    )
    files = CAREFUL | {"run_pytest.py": CAREFUL["run_pytest.py"].replace('"tests"', '"helpers"')}
    bench = bench_of(beside, tmp_path, files)
    bench.tests = msgspec.structs.replace(bench.tests, protected=("helpers.py",))
    forged = "helped = lambda result: 5 if result == -1 else result"
    cheats = {
        "a module": written("helpers.py", forged),
        "a package": written("helpers/__init__.py", forged),
        "a link to a package": written("other/__init__.py", forged) + "ln -s other helpers",
    }
    verdicts = await bench.all({"a fix": FIX, **cheats, "both": f"{cheats['a package']}\n{FIX}"})
    assert scores(verdicts) == {"a fix": 1.0} | dict.fromkeys(cheats, 0.0) | {"both": 1.0}, verdicts
    open_bench = bench_of(beside, tmp_path, files)
    assert (await open_bench.played(cheats["a package"]))["score"] == 1.0, "the cheat does work"


HELPED = "helped = lambda result: result"
FORGED_HELPER = "helped = lambda result: 5 if result == -1 else result"
LAYOUTS = {
    "a directory of another name": (
        "calc_tests/test_calc.py",
        {"calc_tests/__init__.py": "", "calc_tests/helpers.py": HELPED},
        "from calc_tests.helpers import helped",
        ("calc_tests/helpers.py", "src/calc_tests/helpers.py", "src/calc_tests/__init__.py"),
    ),
    "beside it, as a module of its own": (
        "checks/test_calc.py",
        {"checks/helpers.py": HELPED},
        "from helpers import helped",
        ("checks/helpers.py", "helpers.py", "src/helpers.py"),
    ),
    "inside the package": (
        "calc/checks/test_calc.py",
        {"calc/checks/__init__.py": "", "calc/checks/helpers.py": HELPED},
        "from calc.checks.helpers import helped",
        ("calc/checks/helpers.py", "calc/checks/helpers/__init__.py"),
    ),
    "at the top": (
        "test_calc.py",
        {"helpers.py": HELPED},
        "from helpers import helped",
        ("helpers.py", "helpers/__init__.py", "src/helpers.py"),
    ),
    "in src": (
        "checks/test_calc.py",
        {"src/helpers.py": HELPED},
        "from helpers import helped",
        ("src/helpers.py", "helpers.py", "helpers/__init__.py"),
    ),
    "above the tests": (
        "tests/unit/test_calc.py",
        {"tests/conftest.py": APP["tests/conftest.py"], "tests/helpers.py": HELPED},
        "from helpers import helped",
        ("tests/helpers.py", "helpers.py", "tests/unit/helpers.py"),
    ),
}
"""Where helpers of tests lie: the file of tests, more files, how tests import the helper, what is forged."""


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_helpers_of_tests_are_the_images_in_tasks_of_the_tool(
    image: Image, tmp_path: Path, layout: str
) -> None:
    file, files, imports, forged = LAYOUTS[layout]
    root = "src/" if layout == "in src" else ""
    package = {f"{root}{file}": APP[file] for file in ("calc/__init__.py", "calc/sums.py")}
    text = f"from calc import add\n{imports}\n\n" + (
        "def test_add():\n    assert helped(add(2, 3)) == 5\n\ndef test_zero():\n    assert add(2, 0) == 2\n"
    )
    names = [f"{file}::test_add"], [f"{file}::test_zero"]
    folder = made_task(tmp_path, "helped", {**package, **files, file: text}, *names)
    cheats = {path: written(path, FORGED_HELPER) for path in forged}
    scripts = {"a fix": f"cd ./{root}; {FIX}", **cheats}
    verdicts = asyncio.run(Bench(folder.task, folder.tests).all(scripts))
    assert scores(verdicts) == {"a fix": 1.0} | dict.fromkeys(cheats, 0.0), verdicts


@pytest.mark.full
async def test_most_cheats_score_where_tests_run_in_the_agents_sandbox(image: Image, tmp_path: Path) -> None:
    bench = bench_of(image, tmp_path, NAIVE)
    results = await bench.all(CHEATS, bench.exit_code)
    assert scores(results) == {name: float(name not in FEEBLE) for name in CHEATS}, results


@pytest.mark.full
async def test_code_in_the_process_of_the_tests_is_not_stopped(bench: Bench) -> None:
    results = await bench.all(UNSTOPPED)
    assert scores(results) == dict.fromkeys(UNSTOPPED, 1.0), results


def test_each_cheat_is_in_the_documentation() -> None:
    section = (Path(__file__).parents[2] / "docs/dev/sandbox.md").read_text().partition("## Cheats")[2]
    table, _, not_stopped = section.partition("**Not stopped**")
    rows = [row.strip("| ").split(" | ") for row in table.splitlines() if row.startswith("| ")][1:]
    named = {name.strip(): float(score) for names, _, score in rows for name in names.split(";")}
    assert named == {name: float(name not in FEEBLE) for name in CHEATS}
    assert all(name in " ".join(not_stopped.split()) for name in UNSTOPPED)


# -- whose fault it is ---------------------------------------------------------------------------------------


def full(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.full)


def script_bench(bench: Bench, script: str, **options: Any) -> Bench:
    """A task with this test.sh, in seconds that are short."""
    directory = Path(bench.tests.tests)
    (directory / "test.sh").write_text(script)
    return Bench(bench.task, TaskTests(str(directory), **{"seconds": 20.0, **options}))


async def test_without_named_tests_the_scripts_own_verdict_counts(bench: Bench) -> None:
    scripted = script_bench(bench, "cat score > /logs/verifier/reward.txt")
    changes = await scripted.changes(
        "echo 0.5 > score; mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.json"
    )
    result = await scripted.judged(changes)
    assert (result["score"], result["components"].keys()) == (0.5, {"seconds", "network"})


@pytest.mark.parametrize(
    ("script", "options", "why"),
    [
        full("sleep 60 > /dev/null &\nsleep 60", {"seconds": 0.4}, "did not finish within 0.4 s"),
        full("dd if=/dev/zero of=big bs=1M count=80; sleep 60", {}, "used more than 64 MiB"),
        ("exit 0", {}, "no verdict"),
    ],
)
async def test_tests_that_end_only_without_the_changes_score_nothing(
    bench: Bench, script: str, options: dict[str, Any], why: str
) -> None:
    test = "test ! -e go.sh || . ./go.sh; echo 1 > /logs/verifier/reward.txt"
    scripted = script_bench(bench, test, **options)
    result = await scripted.judged(await scripted.changes(written("go.sh", script)), memory_mb=64)
    assert result["score"] == 0.0 and why in result["tests"]


async def test_a_sandbox_that_ends_while_tests_run_is_no_fault_of_the_agent(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = await bench.changes(FIX)
    execute = Jail.execute

    async def killed(self: Jail, *given: Any) -> RunResult:
        running = asyncio.ensure_future(execute(self, *given))
        assert self.pid is not None
        os.kill(self.pid, signal.SIGKILL)
        return await running

    monkeypatch.setattr(Jail, "execute", killed)
    with pytest.raises(RewardError, match="SandboxError: the sandbox for the tests stopped") as caught:
        await bench.judged(changes)
    assert caught.value.reason is FailReason.SETUP_FAILED


async def test_tests_that_end_as_the_machine_has_no_memory_are_no_fault_of_the_agent(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = script_bench(bench, "sleep 600")
    changes = await slow.changes(FIX)
    monkeypatch.setattr("asyncrl.isolation.sandbox.jail.GUARD_PROGRAM", SHORT_OF_MEMORY)
    with pytest.raises(
        RewardError, match="nearly out of memory; lower at_once for the reward 'tests'"
    ) as caught:
        await slow.judged(changes)
    assert caught.value.reason is FailReason.SETUP_FAILED


@pytest.mark.parametrize(
    ("test", "options", "why"),
    [
        ("echo no python", {}, "no verdict: .*; the tests wrote: no python"),
        full("sleep 60", {"seconds": 0.3}, "did not finish within"),
    ],
)
async def test_tests_without_a_verdict_on_the_untouched_image_are_no_fault_of_the_agent(
    bench: Bench, test: str, options: dict[str, Any], why: str
) -> None:
    scripted = script_bench(bench, test, **options)
    with pytest.raises(RewardError, match=f"task calc fails even without changes: .*{why}") as caught:
        await scripted.judged(await scripted.changes(FIX))
    assert caught.value.reason is FailReason.TESTS_FAILED_TO_RUN


@pytest.mark.full
async def test_changes_that_do_not_fit_are_the_agents_fault(bench: Bench) -> None:
    small = Bench(msgspec.structs.replace(bench.task, disk_mb=1), bench.tests)
    large = await bench.changes("dd if=/dev/urandom of=large bs=1K count=2000")
    assert "more than" in large["failed"]
    result = await small.judged(large)
    assert result["score"] == result["components"]["turn_green"] == 0.0
    assert "cannot be judged" in result["tests"]
    (Path(bench.tests.tests) / "large").write_bytes(bytes(500_000))
    result = await small.judged(await bench.changes(f"{FIX}; dd if=/dev/urandom of=large bs=1K count=600"))
    assert result["score"] == 0.0 and "No space left" in result["tests"]


async def test_a_sandbox_that_cannot_be_made_is_no_fault_of_the_agent(bench: Bench, tmp_path: Path) -> None:
    changes = await bench.changes(FIX)
    without_image = Bench(msgspec.structs.replace(bench.task, image="gone"), bench.tests)
    lost = Bench(bench.task, msgspec.structs.replace(bench.tests, tests=str(tmp_path / "lost")))
    for broken, why in ((without_image, "no image named 'gone'"), (lost, "lost")):
        with pytest.raises(RewardError, match=why) as caught:
            await broken.judged(changes)
        assert caught.value.reason is FailReason.SETUP_FAILED


AGENT = """
import json, os, subprocess, urllib.request
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"messages": [{"role": "user", "content": "1 + 1"}]}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
urllib.request.urlopen(request).read()
if os.urandom(1)[0] % 2:
    subprocess.run(["sed", "-i", "s/a - b/a + b/", "calc/sums.py"], check=True)
"""


@pytest.mark.full
def test_what_episodes_changed_is_judged_again_by_regrade(image: Image, tmp_path: Path) -> None:
    """The agent solves a task or not, by chance."""
    toml = '[environment]\ndocker_image = "calc"\nnetwork_mode = "no-network"\n[verifier]\ntimeout_sec = 60\n'
    for number in range(4):
        config = {"FAIL_TO_PASS": TURN, "PASS_TO_PASS": STAY}
        folder = task_folder(tmp_path / f"tasks/{number}", toml, test=CAREFUL["test.sh"], config=config)
        for name in ("pytest.ini", "run_pytest.py"):
            (folder / "tests" / name).write_text(CAREFUL[name])
    (tmp_path / "agent.py").write_text(AGENT)
    agent = f"rollout.agent={{command: {{line: python {tmp_path}/agent.py, sandbox: jail}}}}"
    options = ["rollout.tools=[]", "rollout.reward=tests", agent, "rollout.max_new_tokens=8"]
    data = [f"data.train={tmp_path}/tasks", "data.test=''"]
    with Run(tmp_path, "total_steps=2", "validation.every=0", *data, *options) as run:
        trained = run.completed(2)["flow"]["trained"]  # fewer than 32 where an agent failed at every attempt
        out = tmp_path / "regraded.jsonl"
        assert cli.main(["regrade", str(run.path), "--reward", "tests", "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) >= trained > 24 and {row["score"] for row in rows} == {0.0, 1.0}
    assert [row["score"] for row in rows] == [row["score_new"] for row in rows]
