"""The map names what is there, links have targets, keys and defaults are ours, and promises name tests of the
gate."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta

from asyncrl import cli
from asyncrl.config import parse
from asyncrl.observe.metrics import (
    CHARTS,
    FIGURES,
    OF_STEP,
    PHASES,
    TRACED,
    catalogue,
    expand_names,
    label,
    sections,
)
from asyncrl.observe.summary import HELD_OUT_RESULTS, TRAINING_RESULTS
from asyncrl.observe.table import DIAGNOSTICS, SUMMARY_NUMBERS
from asyncrl.viewer.overview import FIGURE_UNITS
from tests.fakes.scripts import script

ROOT = Path(__file__).resolve().parents[2]
WALKS = (ROOT / "docs" / "dev" / "walks.md").read_text()
NAMED = re.compile(r"`([a-z_/]+(?:\.py|/))(?:: ([\w.]+))?`")


def defined(path: Path) -> set[str]:
    """Functions, classes and `Class.method` of a file."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
            found |= {f"{node.name}.{inner.name}" for inner in ast.walk(node) if hasattr(inner, "name")}
    return found


RECIPES = (ROOT / "CONTRIBUTING.md").read_text()


WORDED = re.compile(r"(?:`|^|\$ )asyncrl ([a-z]+)((?:[^`\n#|]|\\\n)*)", re.MULTILINE)  # in code


@pytest.mark.parametrize(
    "page", [*ROOT.glob("*.md"), *(ROOT / "docs").glob("[!d]*/*.md")], ids=lambda page: page.name
)
def test_commands_and_their_options_are_there(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = re.sub(
        r"^(?!    ).*(?<!`)\basyncrl (?:has|is|was|itself)\b", "", page.read_text(), flags=re.MULTILINE
    )
    wrong = []
    for command, words in WORDED.findall(code):
        if command not in cli.COMMANDS:
            wrong.append(command)
        elif options := re.findall(r"(?<![\w-])--[a-z][a-z-]*", words):
            with suppress(SystemExit):
                cli.main([command, "--help"])
            known = re.findall(r"--[a-z][a-z-]*", capsys.readouterr().out)
            wrong += [f"{command} {option}" for option in options if option not in known]
    assert not wrong


def test_there_is_a_recipe_for_all_that_is_added() -> None:
    added = re.findall(r"^- \*\*(.*?)\*\*:", RECIPES, re.M)
    assert {"A message", "A transport of weights", "A metric", "A configuration key"} <= set(added)


@pytest.mark.parametrize("text", [WALKS, RECIPES], ids=["walks", "recipes"])
def test_files_and_names_of_the_map_exist(text: str) -> None:
    missing = []
    for path, name in NAMED.findall(text):
        bases = [base for base in (ROOT / "asyncrl", ROOT) if (base / path).exists()]
        if not bases or (name and name not in defined(bases[0] / path)):
            missing.append(f"{path}: {name}")
    assert not missing, missing


def test_a_trajectory_crosses_at_most_thirty_files() -> None:
    walk = WALKS.partition("### A trajectory")[2].partition("###")[0]
    assert 15 < len({path for path, _ in NAMED.findall(walk) if path.endswith(".py")}) <= 30


PAGES = {name: (ROOT / "docs" / "start" / f"from_{name}.md").read_text() for name in ("verl", "trl")}
RUN = parse({"name": "n", "model": {"path": "m"}, "data": {"train": "t"}})
SECTIONS = tuple(name for name in RUN.__struct_fields__ if isinstance(getattr(RUN, name), msgspec.Struct))
OURS = re.compile(rf"`((?:{'|'.join(SECTIONS)})\.\w+|total_steps|resume)(?:=([^`]+))?`")


def ours(text: str) -> list[tuple[str, str]]:
    """Keys, and their values where given, of the last column but notes: all that have our sections' names."""
    return OURS.findall(text)


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_keys_for_users_of_other_trainers_exist(page: str) -> None:
    columns = [row.split(" | ")[1] for row in page.splitlines() if row.count(" | ") == 2]
    keys = {key for column in columns for key, _ in ours(column)}
    assert len(keys) > 40
    for key in keys:
        attrgetter(key)(RUN)  # AttributeError: there is no such key


@pytest.mark.parametrize(("name", "least"), [("verl", 15), ("trl", 10)])
def test_defaults_for_users_of_other_trainers_are_ours(name: str, least: int) -> None:
    table = PAGES[name].partition("## Defaults that differ")[2].partition("##")[0]
    defaults = [
        (key, value) for row in table.splitlines() for key, value in ours(row.rpartition(" | ")[2]) if value
    ]
    assert len(defaults) > least
    for key, value in defaults:
        if key != "kl.where":  # off by default
            assert json.dumps(attrgetter(key)(RUN)).strip('"') == value, key


def test_the_catalogue_has_each_metric_of_a_real_run_once() -> None:
    """The fixture: all names of `asyncrl train experiment=calculator`. It has all that verl calls so, too."""
    written = (ROOT / "tests" / "fixtures" / "metric_names.txt").read_text().split()
    names = [name for rows in sections().values() for row in rows for name in expand_names(row.names)]
    assert len(names) == len(set(names)) == len(catalogue())
    patterns = [re.compile(re.sub(r"<[^>]*>", "[^/]+", re.escape(name))) for name in names]
    assert [name for name in written if not any(pattern.fullmatch(name) for pattern in patterns)] == []
    same = {name for name, row in catalogue().items() if row.verl == "same" and "with a" not in row.meaning}
    models = re.compile(r".*/(ref|values|update_critic|save_checkpoint|max_memory_.*)")  # only with these
    assert not {name for name in same - set(written) if not models.fullmatch(name)} and len(same) > 40
    assert {n for own in CHARTS.values() for names in own.values() for n in names if "*" not in n} <= set(
        names
    )


def test_each_metric_that_people_see_has_a_label() -> None:
    charted = {name for charts in CHARTS.values() for names in charts.values() for name in names}
    summarized = {number.metric_name for number in (*SUMMARY_NUMBERS, *DIAGNOSTICS)} - {""}
    shown = {*charted, *summarized, *FIGURES, *OF_STEP, *TRACED, *PHASES, *FIGURE_UNITS}
    shown |= {*HELD_OUT_RESULTS.values(), *TRAINING_RESULTS.values()}
    assert not [name for name in shown if "*" not in name and not label(name)]


def test_names_are_spread() -> None:
    assert expand_names("a/{b,c}/{d,e}, f") == ["a/b/d", "a/b/e", "a/c/d", "a/c/e", "f"]


PROMISES = sorted(
    {
        name
        for page in ("docs/dev/promises.md", "docs/dev/faults.md")
        for name in re.findall(r"`(tests/[^`]+::[^`]+)`", (ROOT / page).read_text())
    }
)


def test_promises_are_named_with_tests() -> None:
    assert len(PROMISES) > 10


@pytest.mark.parametrize("name", PROMISES)
def test_the_test_of_a_promise_is_in_the_gate(name: str) -> None:
    """It is there, and neither it nor its file is left to `make full` or `make long`."""
    file, _, function = name.partition("::")
    tree = ast.parse((ROOT / file).read_text())
    marks = [
        node.value for node in tree.body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node)
    ]
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    (found,) = [node for node in tree.body if isinstance(node, kinds) and node.name == function]
    own = [mark for mark in found.decorator_list if not isinstance(mark, ast.Call)]  # a table has its own
    assert not re.search(r"mark\.(full|long)\b", " ".join(map(ast.unparse, (*marks, *own))))


@pytest.fixture(scope="module")
def config_docs() -> ModuleType:
    return script("make_config_docs")


def test_docs_of_the_configuration_are_up_to_date(config_docs: ModuleType) -> None:
    assert config_docs.render() == config_docs.TARGET.read_text(), "run `make docs`"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Annotated[int, Meta(ge=1)], "int ≥ 1"),
        (Annotated[float, Meta(gt=0, lt=1)], "float > 0, < 1"),
        (Literal["a", "b"], "`a` | `b`"),
        (int | None, "int | null"),
        (list[str], "list of str"),
    ],
)
def test_types_are_written_for_people(config_docs: ModuleType, kind: Any, text: str) -> None:
    assert config_docs.type_text(kind) == text


# -- links ---------------------------------------------------------------------------------------------

FILES = [
    *ROOT.glob("*.md"),
    *(path for folder in ("docs", "docker", "examples") for path in (ROOT / folder).rglob("*.md")),
]
CODE = re.compile(r"^(```|~~~).*?^\1|`[^`\n]+`", re.M | re.S)
LINK = re.compile(r"!?\[[^\]]*\]\(([^()\s]+)\)|<(?:img|a|source)[^>]* (?:src|srcset|href)=\"([^\"]+)\"")


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them: lower case, words joined by `-`, repeated ones numbered."""
    text = re.sub(r"^(```|~~~).*?^\1", "", page.read_text(), flags=re.M | re.S)
    seen: Counter[str] = Counter()
    found = set()
    for heading in re.findall(r"^#+ +(.+?) *$", text, re.M):
        plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def broken(page: Path) -> list[str]:
    """Links of a page without a target."""
    wrong = []
    for link in (a or b for a, b in LINK.findall(CODE.sub("", page.read_text()))):
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        if "://" in link or link.startswith("mailto:"):
            continue
        if not target.exists() or (anchor and (target.suffix != ".md" or anchor not in anchors(target))):
            wrong.append(link)
    return wrong


@pytest.mark.parametrize("page", FILES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_has_a_target(page: Path) -> None:
    assert not broken(page)


def test_dead_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One `two`: three\n# One two three\n[a](#one-two-three) [b](#one-two-three-1) [c](#one)\n"
        "[d](missing.md) [e](https://example.org/x) `[f](missing.md)`\n"
    )
    assert broken(page) == ["#one", "missing.md"]


def test_every_page_is_in_the_navigation() -> None:
    """Of the site: `make site` fails otherwise."""
    nav = (ROOT / "mkdocs.yml").read_text()
    pages = [page.relative_to(ROOT) for page in (ROOT / "docs").rglob("*.md")]
    assert not [page for page in pages if f": {page}\n" not in nav]


def test_pages_for_users_are_short_enough_to_read() -> None:
    """A word has a letter or a digit: bars of tables are none. Pages for developers are not counted."""
    parts = ("start", "guides", "reference", "background")
    pages = [ROOT / "README.md", *(page for part in parts for page in (ROOT / "docs" / part).glob("*.md"))]
    words = [word for page in pages for word in page.read_text().split() if re.search(r"[^\W_]", word)]
    assert len(pages) > 25 and len(words) <= 60_000, len(words)


def gpu_cells() -> list[str]:
    """What the table of parts says of a GPU, part by part."""
    table = (ROOT / "docs/dev/what_has_run.md").read_text().partition("| part | 2 CPU cores | a GPU |")[2]
    rows = table.partition("\n\n")[0].splitlines()[2:]
    return [row.split(" | ")[2] for row in rows]


def test_there_are_parts() -> None:
    assert len(gpu_cells()) >= 9


@pytest.mark.parametrize("cell", gpu_cells())
def test_what_the_docs_say_of_a_gpu_is_in_a_report(cell: str) -> None:
    """Of each part: end to end, in part, or CPU only. The numbers that it names are those of the report."""
    if cell == "CPU only":
        return
    assert cell.startswith(("in part: ", "end to end: "))
    links = re.findall(r"\]\((gpu/[\w.-]+\.md)\)", cell)
    assert links, "it names no report"
    report = "".join((ROOT / "docs" / "dev" / link).read_text() for link in links)
    text = re.sub(r"\]\(.*?\)", "", cell)
    claims = re.findall(r"\d{4}-\d{2}-\d{2}|\d[\d.]*%|\d[\d.]* GiB|\d+ of \d+ steps|kill -9|gloo", text)
    assert [claim for claim in claims if claim not in report] == []
    assert re.search(r"\d{4}-\d{2}-\d{2}", text), "it names no date"
