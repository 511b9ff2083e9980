"""The recipes for larger models: keys and numbers of GPUs that fit, and the sizes that were estimated."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.config.composition import compose
from asyncrl.launch.models import check_model
from asyncrl.weights.trained_tensors import parameter_count
from tests.fakes.scripts import script

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/guides/gpus.md").read_text()
SIZED = ROOT / "tools/size_model.py"
RECIPES = re.findall(
    r"^##+ (\S+) on (\d+) GPUs?$.*?^asyncrl train (.*?)^```$(?:\s+^```\n(.*?)^```$)?", PAGE, re.M | re.S
)


def overrides(command: str) -> list[str]:
    return shlex.split(command.replace("\\\n", " "))


@pytest.mark.parametrize(("size", "gpus", "command", "_"), RECIPES, ids=[recipe[0] for recipe in RECIPES])
def test_a_recipe_is_a_configuration_for_its_gpus(size: str, gpus: str, command: str, _: str) -> None:
    config = compose(overrides(command))
    servers = config.engine.servers * config.engine.tp
    shared = "mem-fraction-static" in config.engine.server_args
    assert int(gpus) == (servers if shared else servers + config.trainer.ranks)
    assert config.model.path.endswith(f"-{size}")


def test_there_are_three() -> None:
    assert [recipe[:2] for recipe in RECIPES] == [("0.6B", "1"), ("8B", "8"), ("32B", "16")]


def test_the_first_run_of_the_readme_is_the_recipe_for_one_gpu_and_fits_eight() -> None:
    section = (ROOT / "README.md").read_text().partition("## On GPUs")[2].partition("\n## ")[0]
    (command,) = re.findall(r"^asyncrl train (name=.*?)^```$", section, re.M | re.S)
    named = [key for key in overrides(command) if not key.startswith("name=")]
    assert named == [key for key in overrides(RECIPES[0][2]) if not key.startswith("name=")]
    (eight,) = re.findall(r"`(engine=sglang .*?)`", section)
    at = next(index for index, key in enumerate(named) if key.startswith("engine="))
    config = compose(["name=gsm8k", *named[:at], *eight.split()])
    assert config.engine.servers * config.engine.tp + config.trainer.ranks == 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("Qwen3-0.6B", 596_049_920),
        pytest.param("Qwen3-8B", 8_190_735_360, marks=pytest.mark.long),
        pytest.param("Qwen3-32B", 32_762_123_264, marks=pytest.mark.long),
    ],
)
def test_a_model_without_weights_has_the_size_of_the_real_one(
    name: str, published: int, tmp_path: Path
) -> None:
    path = tmp_path / name
    assert script("size_model").write(name, path) == parameter_count(str(path)) == published
    check_model(compose([f"model.path={path}", "data.train=x"]))
    assert sum(file.stat().st_blocks for file in path.iterdir()) * 512 < 1e6, "a hole takes no disk"


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_smallest_estimate_is_what_the_page_says(tmp_path: Path) -> None:
    _, _, command, printed = RECIPES[0]
    model = tmp_path / "model"
    subprocess.run([sys.executable, SIZED, "Qwen3-0.6B", "--out", model], cwd=ROOT, check=True, timeout=120)
    data = ROOT / "examples/multiturn/calculator/data/train.parquet"
    changed = [f"model.path={model}", f"data.train={data}", "data.test=", "launch=ray"]
    server = "engine.server_command=[python]"  # it is not started, and SGLang may not be installed
    done = subprocess.run(
        [sys.executable, "-m", "asyncrl.cli", "train", *overrides(command), *changed, server, "--dry-run"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert done.returncode == 0, done.stderr
    for line in printed.splitlines():
        assert line in done.stdout
