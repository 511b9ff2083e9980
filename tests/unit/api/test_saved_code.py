"""Functions and classes of notebook cells, as a real IPython shell runs the cells, saved as source."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from asyncrl.api.saved_code import loadable_name
from asyncrl.errors import ConfigError

CELLS = """\
import asyncrl, re
import json as js, xml.dom
from collections import Counter
from dataclasses import dataclass
from typing import Literal
BONUS = 0.25
LEVELS = {"easy": (1, 2), "hard": (3, 4)}
NUMBER = re.compile(r"\\d+")
Shelf = Literal["left", "right"]
===
def clean(text: str) -> str:
    return text.strip().lower()

@dataclass
class Point:
    x: int = 1
===
class Base:
    def __init__(self): self.counts = Counter()
    def count(self, shelf: Shelf) -> int:
        "Count a shelf."
        self.counts[shelf] += 1
        return self.counts[shelf]
===
def plain(answer): return float(answer == "4")
def helped(answer):
    numbers = NUMBER.findall(clean(answer))
    return BONUS * len(numbers) + LEVELS["hard"][0] + Point().x + js.loads("1") * bool(xml.dom)
class Warehouse(Base):
    SIZE = LEVELS["easy"]
    def find(self, item: str) -> str:
        "Find it."
        return f"{item} {super().count('left')}"
===
@asyncrl.tool(timeout=3.0)
def shout(text: str) -> str:
    "Shout."
    return clean(text).upper()
def recursive(depth): return depth and recursive(depth - 1) + mutual(depth)
def mutual(depth): return 1 if depth < 2 else recursive(depth - 1)
===
table = object()
def with_table(answer): return table is answer
def with_gone(answer): return missing_name
def outer():
    level = 3
    def inner(answer): return level
    return inner
inner = outer()
nameless = lambda answer: 0
old_plain = plain
def plain_two(answer): return plain(answer) + 1
===
def plain(answer): return 2.0 * float(answer == "4")
===
from random import randint, random
import xml.etree.ElementTree
Pairs = list[tuple[str, int]]
LEVEL = 7
def scaled(function):
    import functools
    @functools.wraps(function)
    def wrapper(answer): return 2 * function(answer)
    return wrapper
def by_assignment(answer): return 1.0
by_assignment = scaled(by_assignment)
@scaled
def by_decorator(answer): return 1.0
class Levels:
    LEVEL = LEVEL
    class Inner: value: int = 1
    def find(self, pairs: "Pairs", inner: Inner = None) -> "Pairs":
        "Find."
        try: open("/no/such/file")
        except OSError: pass
        xml.etree.ElementTree.fromstring("<a/>")
        return pairs * randint(2, 2) + [(__name__, int(random() * 0))]
class First:
    def other(self): return Second()
class Second(First):
    def nothing(self): ...
===
from __future__ import annotations
from PIL import Image
def postponed(shelf: Shelf) -> float: return 1.5 if Image else 0.0
"""
SHELL = """\
import json, sys
from pathlib import Path
from IPython.core.interactiveshell import InteractiveShell
from asyncrl.api.saved_code import loadable_name
from asyncrl.errors import ConfigError

shell = InteractiveShell.instance()
sys.modules["__main__"] = shell.user_module
for cell in sys.stdin.read().split("===\\n"):
    assert shell.run_cell(cell).success
results = {}
for name in sys.argv[2:]:
    try:
        spec, path = loadable_name(shell.user_ns[name], "rollout.reward", Path(sys.argv[1]))
        results[name] = [spec, str(path)]
    except ConfigError as error:
        results[name] = str(error)
print(json.dumps(results))
"""
SAVED = (
    "plain",
    "helped",
    "Warehouse",
    "shout",
    "recursive",
    "plain_two",
    "postponed",
    "by_decorator",
    "Levels",
    "First",
)
REFUSED = ("with_table", "with_gone", "inner", "nameless", "old_plain", "table", "by_assignment")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("code")
    shell = subprocess.run(
        [sys.executable, "-c", SHELL, str(directory), *SAVED, *REFUSED],
        input=CELLS,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert shell.returncode == 0, shell.stdout + shell.stderr
    results: dict[str, Any] = json.loads(shell.stdout.splitlines()[-1])
    return results


def load_saved(results: dict[str, Any], name: str) -> Any:
    """Import the saved file as a run does: as a module of its own, without the notebook."""
    assert isinstance(results[name], list), results[name]
    spec, path = results[name]
    assert spec == f"{Path(path).parent.name}/task.py:{name}"
    module_spec = importlib.util.spec_from_file_location(f"saved_{name}", path)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses look their module up
    module_spec.loader.exec_module(module)
    return getattr(module, name)


def test_a_function_is_saved_with_all_that_it_names(results: dict[str, Any]) -> None:
    helped = load_saved(results, "helped")
    assert helped(" 4 OR 5 ") == 0.25 * 2 + 3 + 1 + 1
    text = Path(results["helped"][1]).read_text()
    assert "import xml.dom" in text
    assert "import json as js" in text
    assert "Warehouse" not in text  # helped does not name it
    assert "Shelf" not in text


def test_a_class_is_saved_with_its_bases_and_annotations(results: dict[str, Any]) -> None:
    warehouse = load_saved(results, "Warehouse")()
    assert warehouse.find("nail") == "nail 1"
    assert warehouse.SIZE == (1, 2)
    text = Path(results["Warehouse"][1]).read_text()
    assert "Shelf = typing.Literal['left', 'right']" in text


def test_decorators_are_saved(results: dict[str, Any]) -> None:
    shout = load_saved(results, "shout")
    assert shout.timeout == 3.0
    assert shout.function(" hey ") == "HEY"


def test_functions_may_call_each_other(results: dict[str, Any]) -> None:
    assert load_saved(results, "recursive")(2) == 2


def test_the_newest_definition_counts(results: dict[str, Any]) -> None:
    assert load_saved(results, "plain")("4") == 2.0
    assert load_saved(results, "plain_two")("4") == 3.0


def test_annotations_may_be_postponed(results: dict[str, Any]) -> None:
    postponed = load_saved(results, "postponed")
    assert postponed.__annotations__["shelf"] == "Shelf"
    assert postponed.__globals__["Shelf"].__args__ == ("left", "right")


def test_names_are_found_where_python_finds_them(results: dict[str, Any]) -> None:
    levels = load_saved(results, "Levels")
    assert levels.LEVEL == 7
    assert levels().find([("a", 1)]) == [("a", 1), ("a", 1), ("saved_Levels", 0)]
    assert levels.find.__globals__["Pairs"] == list[tuple[str, int]]
    assert load_saved(results, "by_decorator")("") == 2.0


def test_classes_that_name_each_other_are_written_once(results: dict[str, Any]) -> None:
    first = load_saved(results, "First")
    assert isinstance(first().other(), first)


def test_other_code_has_another_path(results: dict[str, Any]) -> None:
    digests = {results[name][0].partition("/")[0] for name in SAVED}
    assert len(digests) == len(SAVED)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("with_table", "with_table uses table, which is of type object; add it to the rows as a column"),
        ("with_gone", "with_gone uses missing_name, which is not defined (any more)"),
        ("inner", "outer.<locals>.inner is defined inside another function or class"),
        ("nameless", "a lambda cannot be loaded by name; write a function"),
        ("old_plain", "plain in __main__ has been replaced or removed"),
        ("by_assignment", "by_assignment was changed after its definition; put the change in a decorator"),
        ("table", "unexpected type object; pass a function or a class"),
    ],
)
def test_what_cannot_be_saved_is_refused_by_name(results: dict[str, Any], name: str, problem: str) -> None:
    assert results[name].startswith("rollout.reward: ")
    assert problem in results[name]


def test_code_of_modules_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert loadable_name(textwrap.dedent, "rollout.reward", tmp_path) == ("textwrap:dedent", None)
    assert not any(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=r"rollout\.reward: load_saved\.<locals>"):
        loadable_name(local_function(), "rollout.reward", tmp_path)


def local_function() -> Any:
    def scored(answer: str) -> float:
        return 0.0

    scored.__qualname__ = "load_saved.<locals>.scored"
    return scored


def test_a_prompt_without_source_is_refused() -> None:
    code = """
def score(answer): return 0.0
from pathlib import Path
from asyncrl.api.saved_code import loadable_name
try:
    loadable_name(score, "rollout.reward", Path("."))
except Exception as error:
    print(error)
"""
    shell = subprocess.run([sys.executable], input=code, capture_output=True, text=True, timeout=60)
    if sys.version_info < (3, 13):
        assert "rollout.reward: score was typed at a prompt that does not keep the source" in shell.stdout, (
            shell.stderr
        )
