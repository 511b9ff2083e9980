"""docs/algorithms.md says what the code does: generated blocks, and formulas that are evaluated."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import pytest
from msgspec import Meta

from asyncrl.algorithms.correction import corrections
from asyncrl.algorithms.kl import ESTIMATORS
from asyncrl.algorithms.recipe import advantages, aggregations, losses
from asyncrl.registry import Registry
from asyncrl.rewards.shaping import shapings

ROOT = Path(__file__).resolve().parents[2]
REGISTRIES: list[Registry[Any]] = [advantages, losses, corrections, aggregations, shapings]
PARTS = [
    *((registry.kind, name, registry.get(name)) for registry in REGISTRIES for name in registry),
    *(("estimator", name, function) for name, function in ESTIMATORS.items()),
]
SOURCE = re.compile(r"\([^()]*(arXiv \d{4}\.\d{5}|(ICML|ICLR|NeurIPS) \d{4}|https?://|\.net/|plain)[^()]*\)")


@pytest.fixture(scope="module")
def docs() -> Any:
    """The generator; it imports its neighbour in tools/ as a script does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "tools")
        yield importlib.import_module("make_algorithm_docs")


def test_the_file_is_up_to_date(docs: ModuleType) -> None:
    text = docs.TARGET.read_text()
    assert docs.render(text) == text, "run `make docs`"


def test_every_block_is_in_the_file(docs: ModuleType) -> None:
    assert sorted(name for _, name, _ in docs.BLOCK.findall(docs.TARGET.read_text())) == sorted(docs.BLOCKS)


@pytest.mark.parametrize(("kind", "name", "part"), PARTS, ids=[f"{kind}-{name}" for kind, name, _ in PARTS])
def test_every_name_has_formula_source_and_use(docs: ModuleType, kind: str, name: str, part: Any) -> None:
    entry = docs.describe(name, part)
    assert entry.formula, f"{kind} {name}: the docstring must begin with the formula"
    assert SOURCE.search(entry.formula), (
        f"{kind} {name}: no source, as (Name, arXiv NNNN.NNNNN) or (plain), in {entry.formula!r}"
    )
    assert re.search(r"staleness|on-policy|\blag\b", entry.use, re.IGNORECASE), (
        f"{kind} {name}: no paragraph `Use:` says when to use it, and at which staleness"
    )


def test_every_preset_says_when_to_use_it(docs: ModuleType) -> None:
    for path in (ROOT / "configs" / "algorithm").glob("*.yaml"):
        what, _, use = docs.preset_comment(path).partition("Use:")
        assert what.strip() and "staleness" in use, (
            f"{path.name}: leading comment lines, `Use:` with the staleness"
        )


def test_a_stale_block_is_replaced_and_prose_is_kept(docs: ModuleType) -> None:
    text = "before\n<!-- generated: presets -->\nold\n<!-- end -->\nafter\n"
    found = docs.render(text)
    assert found.startswith("before\n<!-- generated: presets -->\n| preset |") and found.endswith(
        "<!-- end -->\nafter\n"
    )
    assert "old\n" not in found and docs.render(found) == found


def test_a_component_is_read_from_its_docstring_and_signature(docs: ModuleType) -> None:
    def component(given: Any, *, cap: Annotated[float, Meta(gt=0)] = 2.0, level: int) -> None:
        """L = min(a|b, C)
        (Name, arXiv 1234.56789).

        Use: always,
        at any staleness.
        """

    entry = docs.describe("mine", component)
    assert (
        entry.formula == "L = min(a|b, C) (Name, arXiv 1234.56789)."
        and entry.use == "always, at any staleness."
    )
    assert entry.options == (("cap", "float > 0", "2.0"), ("level", "int", "?"))
    assert docs.table({"mine": component}, "L").splitlines()[-1] == (
        "| `mine` | L = min(a\\|b, C) (Name, arXiv 1234.56789). "
        "| `cap` = 2.0 (float > 0)<br>`level` = ? (int) | always, at any staleness. |"
    )


def test_what_is_refused_names_keys_as_code(docs: ModuleType) -> None:
    text = docs.refusals()
    assert (
        "- `algorithm.loss` … contains pi/mu itself; a weight in `algorithm.correction` would count it twice"
        in text
    )
    assert "$." not in text
