"""What `asyncrl eval` makes of its arguments; tests/integration/test_evaluate.py runs it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncrl.commands import eval as eval_command
from asyncrl.commands import generate
from asyncrl.commands.eval import (
    Result,
    Target,
    argument_parser,
    by_task,
    configuration,
    print_result,
    resolve_target,
    summarize_metrics,
)
from asyncrl.config import RunConfig, composition
from asyncrl.errors import ConfigError
from asyncrl.observe.held_out import SAMPLED, HeldOut, JudgedEpisode, bootstrap_interval, numbers_per_sample
from asyncrl.types import EpisodeResult
from asyncrl.viewer.overview import overview
from tests.unit.commands.test_view import make_run

ROOT = Path(__file__).resolve().parents[3]
MODEL = str(ROOT / "examples/multiturn/calculator/model")
CALCULATOR = ("experiment=calculator", "rollout.temperature=0.5")


def configured(target: Target, *overrides: str) -> RunConfig:
    options = argument_parser("eval", "").parse_intermixed_args([target.model, *overrides])
    return configuration(target, options)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with checkpoints of two steps, of which only manifests and exports are looked at."""
    directory = tmp_path / "mine"
    for step in (2, 10):
        hf = directory / "checkpoints" / f"step-{step}" / "hf"
        hf.mkdir(parents=True)
        (hf.parent / "manifest.json").write_text("{}")
        for file in Path(MODEL).iterdir():
            (hf / file.name).symlink_to(file)
    config = composition.compose([*CALCULATOR, "model.lora_rank=4", "algorithm=ppo_critic", "kl.where=loss"])
    (directory / "config.yaml").write_bytes(msgspec.yaml.encode(config))
    return directory


def test_what_is_named_is_found(run_dir: Path) -> None:
    newest, older = (str(run_dir / "checkpoints" / f"step-{step}" / "hf") for step in (10, 2))
    assert resolve_target("mine", run_dir.parent) == Target(newest, run_dir)
    assert resolve_target(str(run_dir), Path("elsewhere")) == Target(newest, run_dir)
    assert resolve_target(str(Path(older).parent), Path("elsewhere")) == Target(older, run_dir)
    assert resolve_target(older, run_dir.parent) == Target(older, None)
    assert resolve_target("Qwen/Qwen3-0.6B", run_dir.parent) == Target("Qwen/Qwen3-0.6B", None)
    (Path(older) / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"step-2/hf: .* asyncrl merge"):
        resolve_target(str(Path(older).parent), run_dir.parent)


def test_a_checkpoint_is_played_as_its_run_played(run_dir: Path) -> None:
    """And nothing is loaded that only training needs."""
    found = configured(resolve_target(str(run_dir), run_dir), "rollout.slots=3")
    assert (found.total_steps, found.model.path) == (0, str(run_dir / "checkpoints" / "step-10" / "hf"))
    assert (found.rollout.temperature, found.rollout.slots, found.rollout.tools) == (0.5, 3, ["calculator"])
    assert (found.model.lora_rank, found.kl.where, found.algorithm.advantage) == (0, "none", "dr_grpo")
    assert found.data.train == found.data.test and found.data.test
    assert found.validation.samples > 10**6, "all of them"
    some = configured(resolve_target(str(run_dir), run_dir), "samples=3", "episodes=2").validation
    assert (some.samples, some.episodes) == (3, 2)
    assert found.name.startswith("eval-mine-step-10-") and found.resume == "auto"


def test_the_same_command_names_the_same_run_and_another_another() -> None:
    model = Target(MODEL, None)
    name = configured(model, *CALCULATOR).name
    assert (
        name == configured(model, *CALCULATOR, "trainer.lr=1.0", "rollout.workers=2", "rollout.slots=7").name
    )
    others = ("rollout.temperature=0.6", "seed=1", "validation.episodes=2", "data=other.parquet")
    assert len({name, *(configured(model, *CALCULATOR, other).name for other in others)}) == 5
    own = configured(model, *CALCULATOR, "name=own", "data=a.parquet")
    assert (own.name, own.resume, own.data.test) == ("own", "never", "a.parquet")


def test_files_that_were_edited_are_another_run(tmp_path: Path) -> None:
    folder = tmp_path / "a:b [x] ü=(1)'"
    folder.mkdir()
    data = folder / "[rows].jsonl"
    reward = folder / "mine.py"
    given = (*CALCULATOR, f"data={data}", f"rollout.reward={reward}:score")
    names = []
    for path in (data, reward, data):
        path.write_text("")
        names += [configured(Target(MODEL, None), *given).name for _ in range(2)]
        path.write_text("edited" * len(names))
    assert names[0::2] == names[1::2] and len(set(names)) == 3


def test_a_model_and_runs_in_directories_of_any_name_are_evaluated(run_dir: Path) -> None:
    odd = run_dir.rename(run_dir.with_name("a b ü%20#?='(,)\n${x}"))
    options = argument_parser("eval", "").parse_args([str(odd), "samples=3", "--run-dir", str(odd.parent)])
    found = configuration(resolve_target(str(odd), odd), options)
    assert found.model.path == str(odd / "checkpoints" / "step-10" / "hf") and found.run_dir == str(
        odd.parent
    )
    assert found.name.startswith("eval-a b ü%20#?='(,)-${x}-step-10-")
    options.overrides = ["data=~/[1]=ü.jsonl", "rollout.reward=奖励.py:score"]
    model = configuration(Target(found.model.path, None), options)
    assert (model.model.path, model.run_dir) == (found.model.path, found.run_dir)
    assert model.data.test == f"{Path.home()}/[1]=ü.jsonl"


def test_a_run_of_another_version_is_refused_with_its_file(run_dir: Path) -> None:
    (run_dir / "config.yaml").write_text("name: x\nolder: 1\n")
    with pytest.raises(ConfigError, match=r"mine/config.yaml: this version of asyncrl cannot read"):
        resolve_target("mine", run_dir.parent)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nosuch"], r"^nosuch: no such model, checkpoint or run; .* a run in \S+: mine"),
        (["RUNS/nosuch"], r"/nosuch: no such model, checkpoint or run"),
        (["./nosuch"], r"^./nosuch: no such model"),
        (["data.path=x"], "unknown key data.path; in asyncrl it is data.test .data=FILE in asyncrl eval"),
        (["model.path=m", "data=x", "samples=3"], "model.path=m: name the model first"),
        (
            [MODEL, "data.path=x", "data.n_samples=2"],
            r"data.n_samples: in asyncrl it is .*\n  data.path: in asyncrl it is",
        ),
        ([MODEL, "--data.path=x"], "without dashes.*: --data.path: in asyncrl it is data.test"),
        (
            [MODEL, "--custom_reward_function.path=x"],
            "--custom_reward_function.path: in asyncrl it is rollout.reward",
        ),
        (
            [MODEL, "--config-path=/x", "--config-name", "y"],
            r"--config-path: use --config-dir DIR .*\n  --config-name",
        ),
        ([MODEL, "--model.path", "x"], r"--model.path: write model.path="),
    ],
)
@pytest.mark.parametrize("command", [eval_command, generate])
def test_lines_of_other_tools_are_answered(
    command: Any, arguments: list[str], complaint: str, run_dir: Path
) -> None:
    words = [word.replace("RUNS", str(run_dir.parent)) for word in arguments]
    words += ["out=x.jsonl"] * (command is generate)
    with pytest.raises(ConfigError, match=re.compile(complaint, re.DOTALL)):
        command.main([*words, "--run-dir", str(run_dir.parent)])


def test_without_data_there_is_nothing_to_evaluate_on() -> None:
    with pytest.raises(ConfigError, match=r"data\.test"):
        configured(Target(MODEL, None))


def test_a_comparison_is_of_the_samples_that_both_have() -> None:
    numbers = {"val-core/all/sampled/success": {0: 1.0, 1: 0.5, 2: 0.0, 3: 1.0}}
    baseline = {"val-core/all/sampled/success": {0: 0.0, 1: 0.5, 3: 0.5}}
    (summary,) = summarize_metrics(numbers, baseline).values()
    assert (summary["mean"], summary["samples"], summary["difference"]) == (0.625, 4, 0.5)
    assert (summary["difference_low"], summary["difference_high"]) == bootstrap_interval([1.0, 0.0, 0.5])


def test_tasks_of_one_name_are_kept_apart() -> None:
    numbers = {"val-core/all/sampled/success": {0: 1.0, 1: 0.0, 2: 0.5}}
    metrics_by_task = by_task({0: ("a", "fix"), 1: ("b", "fix"), 2: ("b", "sum")}, numbers)
    assert metrics_by_task == {
        "a/fix#0": {"sampled/success": 1.0},
        "b/fix#1": {"sampled/success": 0.0},
        "sum": {"sampled/success": 0.5},
    }


def test_tasks_are_shown_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the command, and in the page of its run."""
    run_dir = make_run(tmp_path, "a")
    scores = {0: (1.0, 0.0), 1: (1.0, 1.0), 2: (0.0, 0.0)}
    episodes = [
        JudgedEpisode(HeldOut(0, SAMPLED, row, draw), "swe", EpisodeResult(score))
        for row, both in scores.items()
        for draw, score in enumerate(both)
    ]
    numbers = numbers_per_sample(episodes, 0.5)
    print_result(
        Result(run_dir, "", episodes, numbers, by_task({0: ("a", "org/fix"), 1: ("a", "sum")}, numbers))
    )
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert shown[-5:-1] == [
        [],
        ["task", "sampled/pass@2", "sampled/success"],
        ["org/fix", "1.0000", "0.5000"],
        ["sum", "1.0000", "1.0000"],
    ]
    results_by_label = {one["label"]: one for one in overview(run_dir, "")["held_out"]}
    assert results_by_label["sampled/success"]["tasks"] == {"org/fix": 0.5, "sum": 1.0}
    passed = results_by_label["sampled/pass@2"]
    assert passed["tasks"]["org/fix"] == passed["after"]["interval"][1] == 1.0
