"""The example of components of one's own: it composes, and it trains a learner by one step."""

from __future__ import annotations

import re
import shlex
import statistics
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.algorithms.advantages import advantages, configured_advantage
from asyncrl.algorithms.correction import corrections
from asyncrl.algorithms.recipe import compose, imitates, losses
from asyncrl.config import composition
from asyncrl.errors import ConfigError
from asyncrl.trainer.world import World
from tests.fakes import reference
from tests.fakes.training import (
    Episode,
    Recorder,
    difference,
    final_gradients,
    make_learner,
    plain_model,
    save_tiny_model,
    tiny_config,
)

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "custom_algorithm"
FILE = FOLDER / "my_algorithms.py"


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the example registers is known in one test only."""
    for registry in (advantages, corrections, losses):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    yield
    for name in [name for name in sys.modules if "my_algorithms" in name]:
        del sys.modules[name]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example as pip would install it, its entry points read from its pyproject.toml."""
    project = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]
    name = project["name"]
    version = project["version"]
    info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    (tmp_path / FILE.name).write_text(FILE.read_text())
    monkeypatch.syspath_prepend(tmp_path)


def section(prefix: str) -> dict[str, Any]:
    """The config of an algorithm made of the example's parts; the prefix says where they come from."""
    return {
        "advantage": f"{prefix}median_baseline",
        "loss": {f"{prefix}cautious": {"negative": 0.3}},
        "correction": {"soft_cap": {"cap": 1.5}},
    }


def batch_loss(model: Any, episodes: list[Episode]) -> torch.Tensor:
    """The example's formulas once more, token by token."""
    total = torch.zeros((), dtype=torch.float64)
    count = 0
    for episode in episodes:
        row, _ = episode
        a = row.own.reward - statistics.median(member.reward for member in row.siblings)
        for logp, mu, _ in reference.token_log_probs(model, episode):
            count += 1
            weight = 1.5 * torch.tanh(torch.exp(logp.detach() - mu) / 1.5) * (0.3 if a < 0 else 1.0)
            total = total - weight * a * logp
    return total / count


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("prefix", [f"{FILE}:", "my_algorithms:", ""], ids=["file", "module", "entry point"])
def test_it_composes_and_trains(prefix: str, world: World, tmp_path: Path) -> None:
    config = tiny_config(save_tiny_model(tmp_path / "model"), algorithm=section(prefix))
    model = plain_model(config.model.path)
    episodes = Recorder(model, seed=1, noise=0.8).groups(3, 4, (0,))
    wanted = reference.gradients(model, batch_loss(model, episodes))
    assert difference(final_gradients(make_learner(config, world), [[episodes]]), wanted) < 1e-10


@pytest.mark.usefixtures("installed")
def test_the_commands_of_its_readme(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER.parents[1])
    text = (FOLDER / "README.md").read_text().replace("\\\n", " ")
    commands = [shlex.split(line)[2:] for line in text.splitlines() if line.startswith("asyncrl train")]
    assert len(commands) == 2
    for overrides in commands:
        recipe = compose(composition.compose(overrides))
        assert recipe.loss.of.func.__name__ == "cautious"
        assert recipe.advantage.of.func.__name__ == "median_baseline"
        assert [rule.of.func.__name__ for rule in recipe.rules] == ["mask", "soft_cap"]


@pytest.mark.parametrize("key", ["advantage", "loss", "correction"])
@pytest.mark.parametrize("first", ["coordinator", "worker", "trainer"])
def test_whichever_key_names_the_file_each_role_knows_all_names(first: str, key: str, tmp_path: Path) -> None:
    file = tmp_path / FILE.name  # not in the working directory
    file.write_text(FILE.read_text())
    named = section(f"{file}:") | {"correction": {f"{file}:soft_cap": {}}}
    parts = section("") | {key: named[key]}
    config = tiny_config("m", algorithm=parts)
    match first:
        case "coordinator":
            assert configured_advantage(config).of.func.__name__ == "median_baseline"
        case "worker":
            assert not imitates(config)
        case "trainer":
            assert compose(config).loss.of.func.__name__ == "cautious"


def test_a_rule_alone_is_named_by_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER)
    (override,) = re.findall(r"`'(algorithm.correction={.*?)'`", (FOLDER / "README.md").read_text())
    (rule,) = compose(composition.compose(["experiment=calculator", override])).rules
    assert rule.of.func.__name__ == "soft_cap" and rule.kind == "weight"


def test_a_wrong_option_is_named() -> None:
    wrong = section(f"{FILE}:") | {"loss": {f"{FILE}:cautious": {"negatvie": 1.0}}}
    complaint = r"algorithm\.loss\..*:cautious: unknown option 'negatvie'; options: negative"
    with pytest.raises(ConfigError, match=complaint):
        compose(tiny_config("m", algorithm=wrong))


def test_a_part_of_another_kind_is_refused() -> None:
    wrong = section(f"{FILE}:") | {"loss": f"{FILE}:median_baseline"}
    with pytest.raises(
        ConfigError, match=r"loss '.*:median_baseline' is of type Advantage; decorate .* @loss"
    ):
        compose(tiny_config("m", algorithm=wrong))


def test_it_is_short() -> None:
    assert len(FILE.read_text().splitlines()) < 40
