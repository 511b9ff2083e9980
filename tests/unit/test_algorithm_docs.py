"""The pages about algorithms say what the code does: generated blocks, and examples that are run."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from asyncrl.algorithms.advantages import advantages
from asyncrl.algorithms.correction import corrections
from asyncrl.algorithms.kl import DIVERGENCES, ESTIMATORS
from asyncrl.algorithms.recipe import aggregations, losses
from asyncrl.conversation.commands import CallTools, Done, EpisodeScored, ToolsReplied, TurnGenerated
from asyncrl.conversation.episode import advance_episode
from asyncrl.episodes.reward import EpisodeReward
from asyncrl.registry import Registry
from asyncrl.rewards import RewardInput, in_loop
from asyncrl.rewards.shaping import shapings
from asyncrl.tools import call_tool
from asyncrl.types import Sample
from tests.fakes.chat import call, rules, start
from tests.fakes.engine import generation
from tests.fakes.scripts import script

ROOT = Path(__file__).resolve().parents[2]
REGISTRIES: list[Registry[Any]] = [advantages, losses, corrections, aggregations, shapings]
PARTS = [
    *((registry.kind, name, registry.get(name)) for registry in REGISTRIES for name in registry),
    *(("estimator", name, function) for name, function in (ESTIMATORS | DIVERGENCES).items()),
]
CAPITAL = Sample(0, "facts", (), ground_truth_json='"Oslo"', extra_info_json='{"num_turns": 2}')
SOURCE = re.compile(
    r"\([^()]*(arXiv \d{4}\.\d{5}|(ICML|ICLR|NeurIPS) \d{4}|https?://|\.net/|plain \w+|no paper)[^()]*\)"
)


@pytest.fixture(scope="module")
def docs() -> ModuleType:
    return script("make_algorithm_docs")


def test_the_pages_are_up_to_date(docs: ModuleType) -> None:
    for page in docs.TARGETS:
        text = page.read_text()
        assert docs.render(text) == text, f"{page}: run `make docs`"


def test_every_block_is_on_one_page(docs: ModuleType) -> None:
    names = [name for page in docs.TARGETS for _, name, _ in docs.BLOCK.findall(page.read_text())]
    assert sorted(names) == sorted(docs.BLOCKS)


def test_every_name_has_formula_source_and_use(docs: ModuleType) -> None:
    for kind, name, part in PARTS:
        entry = docs.describe(name, part)
        assert entry.formula, f"{kind} {name}: the docstring must begin with the formula"
        assert SOURCE.search(entry.formula), (
            f"{kind} {name}: no source, as (Name, arXiv NNNN.NNNNN) or (no paper), in {entry.formula!r}"
        )
        assert re.search(r"staleness|on-policy|\blag\b", entry.use, re.IGNORECASE), (
            f"{kind} {name}: no paragraph `Use:` says when to use it, and at which staleness"
        )


def test_a_stale_block_is_replaced_and_prose_is_kept(docs: ModuleType) -> None:
    text = "before\n<!-- generated: presets -->\nold\n<!-- end -->\nafter\n"
    rendered = docs.render(text)
    assert rendered.startswith("before\n<!-- generated: presets -->\n| preset |") and rendered.endswith(
        "<!-- end -->\nafter\n"
    )
    assert "old\n" not in rendered and docs.render(rendered) == rendered


def test_the_example_of_rewards_earns_what_is_written_below_it(docs: ModuleType) -> None:
    """The tool and the reward function of the text, through an episode of two turns."""
    text = docs.FORMULAS.read_text().partition("<!-- example of rewards -->\n```python\n")[2]
    namespace: dict[str, Any] = {}
    exec(text.partition("```")[0], namespace)
    episode_rules = rules(max_turns=2)
    query = call("search", '{"query": "capital of Norway"}')
    episode = advance_episode(episode_rules, start(episode_rules), TurnGenerated(generation(query)))
    assert isinstance(episode.command, CallTools)
    reply = asyncio.run(call_tool(namespace["search"], episode.command.calls[0], 60.0))
    answered = advance_episode(
        episode_rules,
        advance_episode(episode_rules, episode, ToolsReplied((reply,))),
        TurnGenerated(generation("Oslo")),
    )
    given = RewardInput(CAPITAL, "Oslo", turns=2)
    verdict = asyncio.run(EpisodeReward([in_loop(namespace["compute_score"])], 60.0).score_episode(given))
    done = advance_episode(episode_rules, answered, EpisodeScored(verdict)).command
    assert isinstance(done, Done) and done.result.components == {"correct": 1.0, "brief": 1.0}
    assert done.result.turn_rewards == pytest.approx((0.05, 1.15)) and done.result.reward == pytest.approx(
        1.2
    )
    assert "has turn rewards 0.05 and 1.15, and R = 1.2." in " ".join(text.split())


def test_who_reads_turns_and_components(docs: ModuleType) -> None:
    entries = {name: advantages.get(name) for name in advantages}
    by_turn = ", ".join(f"`{name}`" for name, entry in entries.items() if entry.turns)
    parts = ", ".join(f"`{name}`" for name, entry in entries.items() if entry.components)
    text = docs.FORMULAS.read_text()
    assert f"| the reward of each turn | {by_turn} |" in text
    assert f"| `components`, but not R | {parts} |" in text


def test_the_readme_counts_the_presets() -> None:
    (count,) = re.findall(r"\[(\d+) algorithm presets\]", (ROOT / "README.md").read_text())
    assert int(count) == len(list((ROOT / "configs" / "algorithm").glob("*.yaml")))


def test_what_is_refused_names_keys_as_code(docs: ModuleType) -> None:
    text = docs.refusals()
    assert (
        "- `algorithm.loss` … already contains pi/mu, so a weight in `algorithm.correction` would apply the"
        in text
    )
