"""Fill the generated blocks of the pages about algorithms: tables from the registries, presets, the example.

python tools/make_algorithm_docs.py [--check]

docs/reference/algorithms.md says when to use each component, docs/background/formulas.md gives the formulas,
docs/dev/algorithms.md lists the refusals and what differs from published algorithms.

A docstring is the formula with its source, then a paragraph that begins with `Use:`; options come from the
signature. The prose around the blocks, `<!-- generated: NAME -->` … `<!-- end -->`, is written by hand.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from make_config_docs import type_text

from asyncrl.algorithms import recipe
from asyncrl.algorithms.advantages import advantages
from asyncrl.algorithms.aggregation import Aggregation
from asyncrl.algorithms.correction import corrections
from asyncrl.algorithms.credit import Advantage
from asyncrl.algorithms.kl import DIVERGENCES, ESTIMATORS
from asyncrl.algorithms.recipe import aggregations, losses
from asyncrl.config import RunConfig, parse
from asyncrl.registry import Registry
from asyncrl.rewards.shaping import shapings

ROOT = Path(__file__).resolve().parents[1]
CHOICES = ROOT / "docs" / "reference" / "algorithms.md"
FORMULAS = ROOT / "docs" / "background" / "formulas.md"
NOTES = ROOT / "docs" / "dev" / "algorithms.md"
TARGETS = (CHOICES, FORMULAS, NOTES)
EXAMPLE = ROOT / "examples" / "custom_algorithm" / "my_algorithms.py"
BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

# What a component declares of itself, in words; fields that are False or not named here say nothing.
FACTS: dict[str, dict[object, str]] = {
    "scale": {
        "batch_std": "÷ batch std",
        "nonzero": "÷ share of groups with variance",
        "whiten": "whitened (barrier)",
        "whiten_running": "whitened with earlier batches",
    },
    "siblings": {True: "siblings"},
    "late": {True: "partial groups"},
    "critic": {True: "critic"},
    "greedy": {True: "greedy episode"},
    "whole_group": {True: "whole groups"},
    "turns": {True: "rewards per turn"},
    "components": {True: "components"},
    "ratio": {"prox": "takes a weight", "mu": "contains pi/mu: masks only"},
    "clips": {True: "several steps per batch"},
    "level": {"geometric": "geometric-mean weight"},
    "reference": {True: "reference policy"},
    "kind": {"weight": "weight", "mask": "mask", "scale": "scale"},
}


@dataclass(frozen=True)
class Entry:
    """A registered name, as its table row shows the name.

    `options`: (name, type and bounds, default or '').
    """

    name: str
    formula: str
    use: str
    options: tuple[tuple[str, str, str], ...]
    facts: tuple[str, ...]


def main() -> int:
    parser = argparse.ArgumentParser(description="Fill the generated blocks of the pages about algorithms.")
    parser.add_argument("--check", action="store_true", help="fail if a page is not up to date")
    check = parser.parse_args().check
    texts = {path: render(path.read_text()) for path in TARGETS}
    outdated = [path for path, text in texts.items() if path.read_text() != text]

    for path in outdated:
        if check:
            print(f"{path} is out of date; run `make docs`", file=sys.stderr)
        else:
            path.write_text(texts[path])

    return int(check and bool(outdated))


def render(text: str) -> str:
    """Return the document with every generated block renewed. KeyError: a block has no generator."""
    return BLOCK.sub(lambda match: f"{match[1]}{BLOCKS[match[2]]()}\n{match[3]}", text)


def components(registry: Registry[Any]) -> dict[str, Any]:
    return {name: registry.get(name) for name in registry}


def describe(name: str, component: Any) -> Entry:
    """Read the component's docstring, signature and declaration."""
    function = getattr(component, "of", component)
    formula, _, use = (inspect.getdoc(function) or "").partition("Use:")
    return Entry(
        name=name,
        formula=_prose(formula),
        use=_prose(use),
        options=() if isinstance(component, Aggregation) else tuple(_options(function)),
        facts=tuple(_facts(component)),
    )


def _options(function: Callable[..., Any]) -> Iterable[tuple[str, str, str]]:
    for option in inspect.signature(function, eval_str=True).parameters.values():
        if option.kind is inspect.Parameter.KEYWORD_ONLY:
            default = "" if option.default is option.empty else f"{option.default}" or '""'
            yield option.name, type_text(option.annotation).strip(), default


def _facts(component: Any) -> Iterable[str]:
    for key, words in FACTS.items():
        value = getattr(component, key, None)
        if value in words:
            yield words[value]

    whole_group = isinstance(component, Advantage) and component.whole_group
    if whole_group or getattr(component, "prepare", None) is not None:
        yield "whole batch (barrier)"
    if isinstance(component, Aggregation):  # nobody sets these: the run does
        yield from (f"`{name}` from the run" for name, _, _ in _options(component.of))


def formula_table(parts: Mapping[str, Any], symbol: str) -> str:
    """Return a Markdown table with a row per component: its name and its formula."""
    entries = [describe(name, part) for name, part in parts.items()]
    return _table({"name": [f"`{entry.name}`" for entry in entries], symbol: [e.formula for e in entries]})


def choice_table(parts: Mapping[str, Any]) -> str:
    """Return a Markdown table with a row per component: when to use it, its options and what it needs."""
    entries = [describe(name, part) for name, part in parts.items()]
    return _table(
        {
            "name": [f"`{entry.name}`" for entry in entries],
            "when to use it": [entry.use for entry in entries],
            "options": [_option_cell(entry) for entry in entries],
            "properties": [", ".join(entry.facts) for entry in entries],
        }
    )


def _table(columns: Mapping[str, list[str]]) -> str:
    """Return a Markdown table without the columns whose cells are all empty."""
    used_columns = {head: cells for head, cells in columns.items() if any(cells)}
    rows = [list(used_columns), ["---"] * len(used_columns), *zip(*used_columns.values(), strict=True)]
    return "\n".join(map(_row, rows))


def _option_cell(entry: Entry) -> str:
    """Write the options with their defaults; of types only the choices and those of required options."""
    cells = []
    for name, kind, default in entry.options:
        if not default:
            cells.append(f"`{name}`, required ({kind})")
        elif kind.startswith("`"):
            cells.append(f"`{name}={default}` ({kind})")
        else:
            cells.append(f"`{name}={default}`")
    return ", ".join(cells)


def presets(column: str, part: int) -> str:
    """Return a row per file of configs/algorithm: one part of its comment, under this heading."""
    comments = preset_comments()
    names = [f"`{name}`" for name in comments]
    return _table({"preset": names, column: [texts[part] for texts in comments.values()]})


def example() -> str:
    """Return the loss of the example with its imports left out."""
    source = EXAMPLE.read_text()
    return f"```python\n{source[source.index('@loss(') :]}```"


def preset_comments() -> dict[str, tuple[str, str, str]]:
    """Return the leading comment of each preset, cut at `Differs:` and `Use:` into three parts."""
    parts = {}
    for path in sorted((ROOT / "configs" / "algorithm").glob("*.yaml")):
        comment, _, use = preset_comment(path).partition("Use:")
        description, _, differs = comment.partition("Differs:")
        parts[path.stem] = (_prose(description), _prose(differs), _prose(use))
    return parts


def preset_comment(path: Path) -> str:
    """The leading comment lines of a file, without Hydra's package line."""
    lines = []
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith("# @package"):
            lines.append(line.removeprefix("#").strip())
    return " ".join(lines)


def refusals() -> str:
    """Return every reason of `compose` to refuse a configuration, with … for the names of components."""
    config = parse({"name": "run", "model": {"path": "m"}, "data": {"train": "d"}})
    anything = msgspec.structs.replace(config.algorithm, aggregation="…", prox="…")
    composed = replace(recipe.compose(config), scale="whiten", advantage_name="…", loss_name="…")
    messages = recipe._refusals(msgspec.structs.replace(config, algorithm=anything), composed)
    return "\n".join(f"- {_keys(message)}" for message in messages)


def _keys(message: str) -> str:
    """Configuration keys as code."""
    sections = "|".join(RunConfig.__struct_fields__)
    return re.sub(rf"\b((?:{sections})(?:\.\w+)+)", r"`\1`", message).replace("'…'", "…")


def _prose(text: str) -> str:
    return " ".join(text.split())


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


BLOCKS: dict[str, Callable[[], str]] = {
    "advantages": lambda: choice_table(components(advantages)),
    "losses": lambda: choice_table(components(losses)),
    "corrections": lambda: choice_table(components(corrections)),
    "kl": lambda: choice_table(ESTIMATORS),
    "divergences": lambda: choice_table(DIVERGENCES),
    "aggregations": lambda: choice_table(components(aggregations)),
    "shapings": lambda: choice_table(components(shapings)),
    "advantage_formulas": lambda: formula_table(components(advantages), "A"),
    "loss_formulas": lambda: formula_table(components(losses), "L per token"),
    "correction_formulas": lambda: formula_table(components(corrections), "rule"),
    "kl_formulas": lambda: formula_table(ESTIMATORS, "k per token"),
    "divergence_formulas": lambda: formula_table(DIVERGENCES, "D per state"),
    "aggregation_formulas": lambda: formula_table(components(aggregations), "w, D"),
    "shaping_formulas": lambda: formula_table(components(shapings), "added to R"),
    "preset_contents": lambda: presets("what it is", 0),
    "differences": lambda: presets("what differs from the published runs", 1),
    "presets": lambda: presets("when to use it", 2),
    "refusals": refusals,
    "example": example,
}


if __name__ == "__main__":
    sys.exit(main())
