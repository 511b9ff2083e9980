"""The command line: fast help, composition, one-line errors. Torch stays out of parsing."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from asyncrl import cli
from asyncrl.config import RunConfig, WeightedSource, composition, parse
from asyncrl.errors import ConfigError
from asyncrl.gateway import agents
from asyncrl.launch.run_directory import check_paths_are_text, lock_directory
from asyncrl.observe.files import write_status, write_summary
from asyncrl.observe.metrics import SAMPLED as SUCCESS
from tests.fakes.planted import report

ROOT = Path(__file__).resolve().parents[2]
NAMED = ["name=x", "model.path=m", "data.train=t"]


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


def test_parsing_imports_no_torch() -> None:
    heavy = "{'torch', 'transformers', 'datasets', 'ray', 'matplotlib', 'zmq'} & sys.modules.keys()"
    code = (
        "import sys; from importlib import import_module; from asyncrl import cli\n"
        "for name in cli.COMMANDS: import_module(f'asyncrl.commands.{name}')\n"
        f"from asyncrl.config.composition import compose; compose({NAMED!r}); print({heavy})"
    )
    assert python(code).strip() == "set()"


def test_help_is_fast_and_imports_neither_torch_nor_hydra() -> None:
    code = (
        "import sys\nfrom asyncrl import cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: print({'torch', 'hydra', 'omegaconf'} & sys.modules.keys())"
    )
    assert python(code).strip().endswith("set()")
    seconds = []
    for _ in range(5):
        begin = os.times()
        subprocess.run([sys.executable, "-m", "asyncrl.cli", "--help"], capture_output=True, check=True)
        end = os.times()  # of the processor: others may be busy on it
        used = end.children_user + end.children_system - begin.children_user - begin.children_system
        seconds.append(used)
    assert min(seconds) < 0.5


@pytest.mark.parametrize(("level", "code"), [("1", 0), ("2", 2)])
def test_a_python_without_docstrings_is_refused_at_once(level: str, code: int) -> None:
    """transformers cannot load a model: each role would be restarted until that is given up."""
    variables = os.environ | {"PYTHONOPTIMIZE": level, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "asyncrl.cli", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, env=variables)
    assert done.returncode == code, done.stderr
    assert code == 0 or re.fullmatch(r"asyncrl: PYTHONOPTIMIZE=2 .* set PYTHONOPTIMIZE=1\n", done.stderr)


def test_help_of_train_has_flags_keys_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    for word in (
        "--dry-run",
        "--config-dir",
        "buffer.max_staleness=0",
        "model.path=DIR",
        "launch=ray",
        "docs/reference/configuration.md",
    ):
        assert word in text


def test_defaults_come_from_the_config_module() -> None:
    mapping = {"name": "x", "model": {"path": "m"}, "data": {"train": "t"}}
    assert composition.compose(NAMED) == parse(mapping)


def test_overrides_on_what_a_run_has_recorded(tmp_path: Path) -> None:
    """What is not given stays as recorded, whatever the defaults are now."""
    recorded = parse(
        {"name": "x", "model": {"path": "m"}, "data": {"train": "t"}, "trainer": {"lr": 0.25, "ranks": 3}}
    )
    (tmp_path / "config.yaml").write_bytes(msgspec.yaml.encode(recorded))
    recomposed = composition.recompose(tmp_path, ["trainer.lr=0.5", "algorithm.loss={gspo: {clip_low: 0.1}}"])
    assert (recomposed.trainer.lr, recomposed.trainer.ranks) == (
        0.5,
        3,
    ) and recomposed.model == recorded.model
    assert recomposed.algorithm.loss == {"gspo": {"clip_low": 0.1}}
    for given, said in (("trainer.lrr=1", "unknown key trainer.lrr; did you mean trainer.lr"),
                        ("algorithm=gspo", "algorithm")):  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            composition.recompose(tmp_path, [given])


def test_a_command_without_a_model_shows_three_ways_to_begin(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "data.train=t"]) == 2
    text = capsys.readouterr().err
    for way in (
        "make demo",
        "experiment=calculator",
        "model.path=DIR data.train=FILE",
        "--config-dir examples/",
    ):
        assert way in text


def test_sft_is_train_with_its_preset(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[RunConfig] = []
    monkeypatch.setattr("asyncrl.launch.start.train", lambda config, dry_run: found.append(config) or 0)
    for given in (["model.path=m", "data.train=t"], ["algorithm=sft", "experiment=smollm2_sft"]):
        assert cli.main(["sft", *given, "name=n"]) == 0
    assert [(c.algorithm.loss, c.buffer.episodes_per_group) for c in found] == [("sft", 1)] * 2
    assert cli.main(["sft", "data.train=t"]) == 2
    assert "asyncrl sft model.path=DIR data.train=FILE.jsonl" in capsys.readouterr().err
    assert cli.main(["sft", "algorithm=grpo", "model.path=m", "data.train=t"]) == 2
    assert "asyncrl sft sets algorithm=sft; for algorithm=grpo, use asyncrl train" in capsys.readouterr().err


def test_a_model_of_ones_own_gets_nothing_of_the_demos() -> None:
    """The defaults fit 0.5 to 8B parameters; a run without a name is called by its time."""
    config = composition.compose(["model.path=m", "data.train=t"])
    demo = composition.compose(["experiment=calculator"])
    assert config == parse({"name": config.name, "model": {"path": "m"}, "data": {"train": "t"}})
    assert config.name.startswith("run-") and not config.data.test and not config.rollout.tools
    assert config.trainer.lr <= 1e-5 < demo.trainer.lr
    assert config.rollout.max_new_tokens >= 1024 > demo.rollout.max_new_tokens
    assert config.rollout.max_tokens >= 4096 > demo.rollout.max_tokens
    assert config.model.dtype == "bfloat16" and demo.model.dtype == "float32"


def test_the_demo_is_found_wherever_one_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = composition.compose(["experiment=calculator"])
    assert config.name.startswith("calculator-") and config.rollout.tools == ["calculator"]
    assert Path(config.data.train).is_file()
    assert Path(config.model.path).is_absolute()


@pytest.mark.slow
def test_every_choice_composes() -> None:
    for path in (ROOT / "configs").glob("*/*.yaml"):
        composition.compose([*NAMED, f"{path.parent.name}={path.stem}"])


def test_overrides_win_over_an_experiment() -> None:
    config = composition.compose(["experiment=calculator", "trainer.lr=1e-5", "buffer.max_staleness=0"])
    assert (config.trainer.lr, config.buffer.max_staleness) == (1e-5, 0)


@pytest.mark.parametrize("name", sorted(set(agents.names()) - {"command"}))
def test_a_harness_brings_its_limits_as_defaults(name: str) -> None:
    brought = composition.compose([*NAMED, f"rollout.agent={name}"]).rollout
    assert brought == replace(composition.compose([*NAMED, f"agent={name}"]).rollout, agent=name)
    assert brought.max_tokens > 30_000 and brought.episode_timeout == 3600


@pytest.mark.parametrize("name", ["../config", "../agent/codex", "./codex", "codex.yaml"])
def test_an_agent_that_is_a_path_brings_nothing(name: str) -> None:
    brought = composition.compose([*NAMED, f"rollout.agent={name}"]).rollout
    assert brought == replace(composition.compose(NAMED).rollout, agent=name)


@pytest.mark.parametrize("given", ["rollout.agent=null", "rollout.agent=[5]", "rollout=null"])
def test_an_agent_of_a_wrong_type_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="rollout"):
        composition.compose([*NAMED, given])


def test_what_is_said_beside_a_harness_wins(tmp_path: Path) -> None:
    agent = "rollout.agent={codex: {seconds: 60}}"
    own = composition.compose([*NAMED, agent, "rollout.max_rows=5"]).rollout
    assert (own.agent, own.max_rows, own.max_tokens) == ({"codex": {"seconds": 60}}, 5, 65536)
    assert composition.compose([*NAMED, agent, "~agent"]).rollout.max_tokens == 4096
    experiment = tmp_path / "experiment" / "mine.yaml"
    experiment.parent.mkdir()
    experiment.write_text(
        "# @package _global_\nname: mine\nmodel: {path: m}\ndata: {train: t}\n"
        "rollout: {agent: {codex: {seconds: 60}}, slots: 3}\n"
    )
    assert composition.compose(["experiment=mine", "rollout.max_rows=5"], tmp_path).rollout == replace(
        own, slots=3
    )


@pytest.mark.parametrize(
    ("override", "found"),
    [
        ("rollout.tool_args.calculator.latency_mean=0.3", {"calculator": {"latency_mean": 0.3}}),
        ("engine.server_args={mem-fraction-static: 0.4}", {"mem-fraction-static": 0.4}),
        ("model.template_args.enable_thinking=false", {"enable_thinking": False}),
        ("data.columns={prompt: question}", {"prompt": "question"}),
        ("rollout.reward={gsm8k: {}, exact: {weight: 0.2}}", {"gsm8k": {}, "exact": {"weight": 0.2}}),
        ("rollout.reward='my file.py:score'", "my file.py:score"),
        ("rollout.environment={gymnasium: {id: FrozenLake-v1}}", {"gymnasium": {"id": "FrozenLake-v1"}}),
        ("rollout.agent={command: {line: python agent.py}}", {"command": {"line": "python agent.py"}}),
    ],
)
def test_mappings_with_keys_of_ones_own_need_no_plus_sign(override: str, found: Any) -> None:
    """What may have options is a name or a mapping."""
    section, name = override.partition("=")[0].split(".")[:2]
    assert getattr(getattr(composition.compose([*NAMED, override]), section), name) == found


TEXTS = {  # as the command line has them, by key, and what they are
    "name": ("20261128", "20261128"),
    "run_dir": ("~/runs", "HOME/runs"),
    "model.template": ("1e5", "1e5"),
    "data.train": ("数据/训练.jsonl", "数据/训练.jsonl"),
    "data.test": ("a=b.jsonl", "a=b.jsonl"),
    "data.dataset": ("~/x.py:rows", "HOME/x.py:rows"),
    "data.order": ("true", "true"),
    "data.system_prompt": ("~/ is (your) home, 50% of it", "~/ is (your) home, 50% of it"),
    "data.columns.prompt": ("a,b", "a,b"),
    "data.columns.ground_truth": ("choice(a,b)", "choice(a,b)"),
    "data.columns.data_source": ("a\\=b", "a=b"),  # Hydra's own escape
    "rollout.reward": ("奖励.py:score", "奖励.py:score"),
    "rollout.tools": ("['~/tools.py:add', b]", ["HOME/tools.py:add", "b"]),
    "rollout.environment": ("it's #?.py:Game", "it's #?.py:Game"),
    "kl.prompt": ("on", "on"),
    "observe.project": ("${model.path}/=x", "m/=x"),
    "weights.directory": ("/a b", "/a b"),
    "checkpoint.directory": ("/a,b", "/a,b"),
    "algorithm.loss": ("-1", "-1"),
    "data.columns.a": ("str(5)", "str(5)"),
    "data.columns.b": (" a ", " a "),
}


def test_texts_and_paths_need_no_quotes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "HOME")
    config = composition.compose([*NAMED, *(f"{key}={text}" for key, (text, _) in TEXTS.items())])
    values = msgspec.to_builtins(config)
    found = {}
    for key in TEXTS:
        section, _, name = key.rpartition(".")
        found[key] = functools.reduce(dict.__getitem__, filter(None, section.split(".")), values)[name]
    assert found == {key: value for key, (_, value) in TEXTS.items()}


def test_home_is_expanded_in_several_sources_and_in_files_of_ones_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", "HOME")
    sources = [{"path": "~/a", "weight": 1}, {"path": "b", "weight": 2}]
    config = parse({"name": "x", "model": {"path": "~/m"}, "data": {"train": sources},
                    "rollout": {"reward": {"~/r.py:score": {"file": "~/x"}}}})  # fmt: skip
    assert config.model.path == "HOME/m"
    assert config.data.train == [WeightedSource("HOME/a", 1), WeightedSource("b", 2)]
    assert config.rollout.reward == {"HOME/r.py:score": {"file": "~/x"}}, "an option may be any text"


ODD = "a b ü%20#?&='\"(,)~${x}\\${y}\\"


def test_an_override_of_ours_sets_that_very_text() -> None:
    texts = [ODD, *ODD, "\n", "1", "true", "null", "[a]", "'a", "${asyncrl_root:}", "\\'"]
    wanted = {f"c{number}": text for number, text in enumerate(texts)}
    overrides = [composition.override(f"data.columns.{name}", text) for name, text in wanted.items()]
    assert composition.compose([*NAMED, *overrides]).data.columns == wanted


def test_a_file_of_ones_own_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    text = "\ufeff# @package _global_\nname: mine\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    assert composition.compose(["experiment=mine", *NAMED[1:]], tmp_path).name == "mine"


def test_directories_of_any_name_hold_runs_and_configurations(tmp_path: Path) -> None:
    folder = tmp_path / ODD
    (folder / "experiment").mkdir(parents=True)
    (folder / "experiment" / "mine.yaml").write_text("# @package _global_\nname: mine\n")
    prompt = composition.override("kl.prompt", ODD)
    config = composition.compose(["experiment=mine", *NAMED[1:], prompt], folder)
    assert config.name == "mine"
    config = replace(config, name="1e5")
    (folder / "config.yaml").write_bytes(msgspec.yaml.encode(config))
    assert composition.recompose(folder, []) == config


def test_keys_that_name_files_of_the_checkout_are_resolved(tmp_path: Path) -> None:
    experiment = tmp_path / "experiment" / "mine.yaml"
    experiment.parent.mkdir()
    experiment.write_text(
        "# @package _global_\nname: mine\nmodel: {path: m}\ndata: {train: t}\n"
        "rollout: {environment: {'${asyncrl_root:}/x.py:Game': {guesses: 6}}}\n"
    )
    config = composition.compose(["experiment=mine"], tmp_path)
    assert config.rollout.environment == {f"{composition.config_root()}/x.py:Game": {"guesses": 6}}


@pytest.mark.parametrize("flag", [True, False])
def test_experiments_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: bool) -> None:
    experiment = tmp_path / "configs" / "experiment" / "maze.yaml"
    experiment.parent.mkdir(parents=True)
    experiment.write_text("# @package _global_\nname: maze\nmodel: {path: m}\ndata: {train: t}\n")
    if not flag:
        monkeypatch.chdir(tmp_path)
    config = composition.compose(["experiment=maze"], tmp_path / "configs" if flag else None)
    assert config.name == "maze"


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("trainer.lrr=1", "unknown key trainer.lrr; did you mean .*trainer.lr"),
        ("nonsense=1", "unknown key nonsense"),
        ("+trainer.lrr=1", "lrr"),
        ("algorithm=nothing", "dr_grpo"),
        ("data.train=???", "data.train has no value; set data.train="),
        ("rollout.tools=[a", "cannot read the override"),
        ("=3", "override must be a string"),
        ("experimnt=calculator", "did you mean experiment"),
    ],
)
def test_errors_are_one_line(override: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=complaint):
        composition.compose([*NAMED, override])
    assert cli.main(["train", *NAMED, override]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (b"# @package _global_\nmodel: {path: [m\n", "mine.yaml, line 3: not valid YAML"),
        (
            b"# @package _global_\nname: x\nname: y\n",
            "mine.yaml, line 3: not valid YAML (found duplicate key",
        ),
        (b"\xff\xfe", "mine.yaml: not UTF-8 text"),
        (b"# @package _global_\nname: " + b"[" * 400 + b"]" * 400, "nested too deeply"),
        (b'# @package _global_\nkl: {prompt: "\\ud800"}\n', r"kl.prompt': '\ud800' is not UTF-8 text"),
        (
            b"# @package _global_\nobserve: {project: 1}\n",
            "observe.project: Expected `str`, got `int`;",
        ),
        (b"name: mine\n", "experiment=… does not begin with the line `# @package _global_`"),
        (b"# @package _global_\ntrainer: {lrr: 1}\n", "unknown key trainer.lrr; did you mean trainer.lr"),
        (b"# @package _global_\n1: 2\n", "unknown key 1"),
        (
            b"# @package _global_\ncritic: {backbone: own}\n",
            "unknown key critic.backbone; a critic is always a separate model; remove the key",
        ),
        (
            b"# @package _global_\nvalidation: {success: .nan}\n",
            "validation.success: expected a finite number",
        ),
        (b"# @package _global_\ndefaults: [/algorithm: nope]\n", "Could not find 'algorithm/nope'"),
    ],
)
def test_a_file_of_ones_own_that_is_wrong_is_named_in_one_line(
    text: bytes, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_bytes(text)
    assert cli.main(["train", "--config-dir", str(tmp_path), "experiment=mine", *NAMED]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and complaint in error and "Config search path" not in error


def test_a_directory_whose_name_is_no_text_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    os.mkdir(odd)
    config = parse({"name": "x", "model": {"path": "m"}, "data": {"train": "t"}, "run_dir": str(tmp_path)})
    check_paths_are_text(config)
    monkeypatch.chdir(odd)
    with pytest.raises(ConfigError, match=r"\\udcff' is not valid UTF-8; work in another"):
        check_paths_are_text(config)
    assert cli.main(["train", "experiment=calculator", f"run_dir={odd}"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and r"run_dir': '" in error and r"\udcff' is not UTF-8 text" in error


@pytest.mark.parametrize(
    ("raised", "code", "says"),
    [
        (UnicodeEncodeError("utf-8", "a\udcff", 1, 2, "no"), 2, r"'a\udcff': the path is not UTF-8 text"),
        (OSError(28, "No space left", "summary.json"), 1, "No space left: 'summary.json'"),
        (KeyboardInterrupt(), 130, "asyncrl: interrupted"),
    ],
)
def test_other_ends_are_one_line_too(
    raised: BaseException,
    code: int,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def end(arguments: list[str]) -> int:
        raise raised

    monkeypatch.setattr("asyncrl.commands.runs.main", end)
    assert cli.main(["runs", "list"]) == code
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and says in error


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A directory of runs, with the least one, `first`."""
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "config.yaml").write_text("{}")
    return tmp_path


def test_a_reader_that_has_enough_ends_a_list_in_silence(runs: Path) -> None:
    """As `asyncrl runs list | head -1`, where the list is longer than what a pipe holds."""
    command = [sys.executable, "-m", "asyncrl.cli", "runs", "list", "--run-dir", str(runs)]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("text", [b'{"steps"', b"\xff", b'{"steps": 3}', b"[]"])
def test_a_summary_that_cannot_be_read_is_named_and_hides_no_other_run(
    runs: Path, capsys: pytest.CaptureFixture[str], text: bytes
) -> None:
    (runs / "first" / "summary.json").write_bytes(text)
    assert cli.main(["runs", "show", "first", "--run-dir", str(runs)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "first/summary.json" in error
    (runs / "second").mkdir()
    (runs / "second" / "config.yaml").write_text("{}")
    assert cli.main(["runs", "list", "--run-dir", str(runs)]) == 0
    listed = capsys.readouterr().out
    assert "second" in listed and ("unreadable" in listed) == (text != b'{"steps": 3}')


def test_transcripts_are_printed(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "first" / "transcripts" / "training").mkdir(parents=True)
    command = ["runs", "transcripts", "first", "--run-dir", str(runs), "--of", "training"]
    assert cli.main(command) == 2
    assert capsys.readouterr().err.endswith("first: no training transcripts\n")
    for step in (9, 10):
        line = f'{{"uid": "3.0", "score": 0.5, "text": "said\u2028at {step}"}}\n'
        (runs / "first" / "transcripts" / "training" / f"step-{step}.jsonl").write_text(line)
    assert cli.main(command) == 0
    assert capsys.readouterr().out == "== training, step 10: uid 3.0, score 0.5\nsaid\u2028at 10\n\n"
    assert cli.main([*command, "--step", "9"]) == 0
    assert "said\u2028at 9" in capsys.readouterr().out
    assert cli.main([*command, "--step", "7"]) == 2
    assert "transcripts from step 7; steps with transcripts: 9, 10" in capsys.readouterr().err


def test_escape_sequences_of_a_model_are_shown_and_do_not_reach_the_terminal(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = runs / "first" / "transcripts" / "validation" / "step-1.jsonl"
    kept.parent.mkdir(parents=True)
    said = {"uid": "3.0", "ground_truth": "\x1b]0;t\x07", "text": "a\tb\n\x1b[2J\r\x9b1m\x7fé"}
    kept.write_bytes(msgspec.json.encode(said))
    assert cli.main(["runs", "transcripts", "first", "--run-dir", str(runs)]) == 0
    shown = "uid 3.0, ground_truth ^[]0;t^G\na\tb\n^[[2J^M^[1m^?é\n\n"
    assert capsys.readouterr().out == f"== validation, step 1: {shown}"


def test_escape_sequences_in_what_ended_a_run_do_not_reach_the_terminal(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error can be the tail of a log, in which users' code has written, or the last line of an agent."""
    write_summary(runs / "first", {"outcome": "failed", "error": "all attempts failed: \x1b]0;t\x07\x9b2J"})
    for command in (["status", "first"], ["runs", "list"]):
        cli.main([*command, "--run-dir", str(runs)])
        shown = capsys.readouterr().out
        assert "first" in shown and not {"\x1b", "\x07", "\x9b"} & {*shown}
        assert "all attempts failed: ^[]0;t^G^[2J" in shown or command[0] == "runs"


VALIDATED = [{"training/step": float(step), SUCCESS: step / 100} for step in (0, 20, 40)]
TRAINED = [{"training/step": float(s), "timing_s/step": 1.0, "rollout/score/mean": 0.5} for s in range(1, 45)]


@pytest.mark.parametrize(
    ("rows", "status", "summary", "line"),
    [
        ([*TRAINED, *VALIDATED], {"total_steps": 60}, None,
         "running    step 44 of 60  held-out success 40.0%"),
        (TRAINED + VALIDATED[:1], {"total_steps": 60}, None, "running    step 44 of 60  reward 0.5"),
        ([], {"total_steps": 60}, None, "running    step 0 of 60"),
        (
            [{"training/step": 0.0, SUCCESS: 0.25}], {"total_steps": 0}, None,
            "running    evaluation  held-out success 25.0%",
        ),
        ([], {"total_steps": 0}, {"outcome": "completed", "steps": 0, "success_before": 0.25},
         "completed  evaluation  held-out success 25.0%"),
        ([], {"total_steps": 9}, {"outcome": "completed", "steps": 9, "success_after": 0.5},
         "completed  step 9  held-out success 50.0%"),
        ([], {"total_steps": 9}, {"outcome": "failed", "steps": 4, "nll_last": 0.5, "reward_last": 0.0},
         "failed     step 4 of 9  loss per token 0.5"),
    ],
)  # fmt: skip
def test_each_run_is_listed_with_its_newest_number(
    rows: list[dict[str, float]],
    status: dict[str, int],
    summary: dict[str, Any] | None,
    line: str,
    runs: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    report(runs / "first", rows)
    write_status(runs / "first", status)
    if summary:
        write_summary(runs / "first", {"conserved": True} | summary)
    with lock_directory(runs / "first", "run_dir"):
        assert cli.main(["runs", "list", "--run-dir", str(runs)]) == 0
    assert capsys.readouterr().out == f"{'first':<32} {line}\n"


def test_runs_are_listed_and_shown(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["runs", "list", "--run-dir", str(runs)]) == 0
    assert "first" in capsys.readouterr().out
    for command, said in {
        ("list", "--run-dir", str(runs / "runz")): "runz: no such directory",
        ("show", "--run-dir", str(runs)): "",
        ("show", "other", "--run-dir", str(runs)): "existing runs: first",
        ("show", str(runs / "first")): "no summary.json",  # by its path
    }.items():
        assert cli.main(["runs", *command]) == 2
        assert said in capsys.readouterr().err
