"""The example of components of one's own: it composes, and it trains a learner by one step."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from asyncrl import cli
from asyncrl.algorithms import advantages, correction, losses
from asyncrl.algorithms.recipe import compose
from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.trainer.world import World
from asyncrl.types import Member
from tests.fakes import reference
from tests.fakes.training import (
    Recorder,
    difference,
    final_gradients,
    make_learner,
    plain_model,
    save_tiny_model,
    tiny_config,
)

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "examples" / "custom_algorithm"
NAMES = {"advantage": "median_baseline", "loss": "cautious", "correction": "soft_cap"}


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the example registers is known in one test only."""
    for registry in (advantages.advantages, correction.corrections, losses.losses):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    for name in [name for name in sys.modules if "my_algorithms" in name]:
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in [name for name in sys.modules if "my_algorithms" in name]:
        del sys.modules[name]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example as pip would install it, its entry points read from its pyproject.toml."""
    project = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]
    info = tmp_path / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    groups = project["entry-points"].items()
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items()) for group, points in groups]
    (info / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(FOLDER)


def of_file(name: str) -> str:
    return f"{FOLDER / 'my_algorithms.py'}:{name}"


def algorithm(*, by_file: bool) -> dict[str, Any]:
    spec = of_file if by_file else str
    return {
        "advantage": spec(NAMES["advantage"]),
        "loss": spec(NAMES["loss"]),
        "loss_args": {"negative": 0.25},
        "correction": {NAMES["correction"]: {"cap": 1.5}},
    }


def batch_loss(model: Any, episodes: list[Any], config: RunConfig) -> torch.Tensor:
    """The example's formulas once more, token by token."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for episode in episodes:
        row, _ = episode
        rewards = sorted(member.reward for member in row.siblings)
        middle = (rewards[(len(rewards) - 1) // 2] + rewards[len(rewards) // 2]) / 2
        a = row.own.reward - middle
        for logp, mu, _ in reference.token_log_probs(model, episode):
            count += 1
            rho = torch.exp(logp.detach() - mu)
            weight = 1.5 * torch.tanh(rho / 1.5) * (0.25 if a < 0 else 1.0)
            total = total - weight * a * logp
    return total / count


@pytest.mark.parametrize("by_file", [True, False])
def test_it_composes_and_trains(by_file: bool, installed: None, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model")
    config = tiny_config(path, algorithm=algorithm(by_file=by_file))
    model = plain_model(path)
    episodes = Recorder(model, seed=1, noise=0.8).groups(3, 4, (0,))
    wanted = reference.gradients(model, batch_loss(model, episodes, config))
    found = final_gradients(make_learner(config, World(0, 1, torch.device("cpu"))), [[episodes]])
    assert difference(found, wanted) < 1e-10


def test_its_commands_in_the_readme_parse(monkeypatch: pytest.MonkeyPatch, installed: None) -> None:
    monkeypatch.chdir(ROOT)
    text = (FOLDER / "README.md").read_text().replace("\\\n", " ")
    commands = [shlex.split(line)[2:] for line in text.splitlines() if line.startswith("asyncrl train")]
    assert len(commands) == 2
    for overrides in commands:
        recipe = compose(cli.compose(overrides))
        assert recipe.loss.of.func.__name__ == NAMES["loss"]
        assert [rule.kind for rule in recipe.rules] == ["mask", "weight"]


def test_a_rule_alone_is_named_by_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER)
    (override,) = re.findall(r"`'(algorithm.correction={.*?)'`", (FOLDER / "README.md").read_text())
    (rule,) = compose(cli.compose([override])).rules
    assert rule.kind == "weight"


def test_a_wrong_option_of_a_plug_in_is_named() -> None:
    wrong = algorithm(by_file=True) | {"loss_args": {"negatvie": 1.0}}
    with pytest.raises(
        ConfigError, match=r"\$\.algorithm\.loss_args: unknown option 'negatvie'; options: negative"
    ):
        compose(tiny_config("m", algorithm=wrong))


def test_the_example_by_hand() -> None:
    module = loaded()
    siblings = [Member(i, reward) for i, reward in enumerate((0.0, 1.0, 9.0))]
    given = advantages.CreditInput(siblings[2], siblings, rewards=None, turn=None)
    assert module.median_baseline.of(given, scale=0.5) == 4.0  # 0.5·(9 - 1)
    assert loaded_lines() < 40


def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("my_algorithms", FOLDER / "my_algorithms.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def loaded_lines() -> int:
    return len((FOLDER / "my_algorithms.py").read_text().splitlines())
