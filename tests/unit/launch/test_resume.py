"""What a run is, is in its store: a resume is checked by that, and says what it changes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncrl.config import RunConfig, parse, read_config
from asyncrl.coordinator.state import load_state
from asyncrl.errors import ConfigError
from asyncrl.launch import run_directory as run_directories
from asyncrl.launch.models import check_model
from asyncrl.launch.run_directory import (
    check_resumed,
    describe_resumed_changes,
    prepare_and_lock,
    run_directory,
)
from asyncrl.store.launches import config_tree
from asyncrl.store.runstore import RunStore
from tests.fakes.data import give, rows
from tests.fakes.mail import Sent
from tests.fakes.planted import MODEL
from tests.fakes.power import DurableFiles


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "m").mkdir()
    for file in MODEL.glob("*.json"):
        shutil.copy(file, tmp_path / "m")
    return tmp_path / "m"


@pytest.fixture
def run(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunConfig]:
    """Makes configurations that resume a run in tmp_path / "x", of which the first transaction is there."""

    def made(**keys: Any) -> RunConfig:
        least = {"name": "x", "run_dir": str(tmp_path), "resume": "auto"}
        least |= {"model": {"path": str(model)}, "data": {"train": "t"}}
        return parse(least | keys)

    give(monkeypatch, rows(5))
    with prepare_and_lock(made()):
        state = load_state(made(), tmp_path / "x", RunStore(tmp_path / "x"), Sent())  # type: ignore[arg-type]
        state.journal.persist()
        state.journal.store.close()
    return made


@pytest.mark.parametrize("content", [None, b""])
def test_without_its_config_yaml_a_run_goes_on_as_what_it_is(
    run: Callable[..., RunConfig], content: bytes | None
) -> None:
    path = run_directory(run()) / "config.yaml"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"episodes_per_group: .* started with 8 and would continue with 4"):
        check_resumed(run(buffer={"episodes_per_group": 4}))
    check_resumed(run(trainer={"lr": 0.5}))
    with prepare_and_lock(run(trainer={"lr": 0.5})):
        assert read_config(path.parent).trainer.lr == 0.5


def test_config_yaml_is_written_whole_and_only_if_it_changes(
    run: Callable[..., RunConfig], tmp_path: Path
) -> None:
    path = run_directory(run()) / "config.yaml"
    before = path.stat()
    with prepare_and_lock(run()):
        after = path.stat()
    assert after.st_ino == before.st_ino and after.st_mtime_ns > before.st_mtime_ns, "the newest run"
    files = DurableFiles(path.parent)
    with files.recorded(), prepare_and_lock(run(seed=7)):
        assert files.data[path.with_suffix(".tmp")] == msgspec.yaml.encode(run(seed=7)), "before its rename"
        assert path.name in files.names[path.parent] and path.stat().st_ino != before.st_ino
    path.with_suffix(".tmp").symlink_to("/dev/full")
    with pytest.raises(ConfigError, match="No space left"), prepare_and_lock(run(seed=8)):
        pass
    assert read_config(path.parent).seed == 7


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    tree = json.loads(path.read_text())
    change(tree)
    path.write_text(json.dumps(tree))


def swap(tokenizer: Any) -> None:
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


@pytest.mark.parametrize(
    ("file", "change", "named"),
    [
        (
            "config.json",
            lambda tree: tree["rope_parameters"].update(rope_theta=5e5),
            r"config\.json: rope_parameters\.rope_theta: 10000\.0 → 500000\.0; restore .* name=",
        ),
        ("config.json", lambda tree: tree.update(hidden_size=128), r"config\.json: hidden_size: 64 → 128;"),
        ("config.json", lambda tree: tree.update(sliding_window=32), r"sliding_window: None → 32;"),
        ("generation_config.json", lambda tree: tree.update(eos_token_id=7), "eos_token_id: 2 → 7;"),
        ("tokenizer.json", swap, r"tokenizer\.json: model\.vocab: \w{16} → \w{16};"),
        ("tokenizer_config.json", lambda tree: tree.update(chat_template="{{ 1 }}"), "chat_template: "),
        ("config.json", lambda tree: tree.update(transformers_version="9", _name_or_path="/else"), ""),
        ("config.json", lambda tree: tree.update(dtype="float16", torch_dtype="float16"), ""),
        ("tokenizer.json", lambda tree: None, ""),  # the same, written with other spaces
    ],
)
def test_a_resume_finds_the_model_that_the_run_was_begun_with(
    run: Callable[..., RunConfig], model: Path, file: str, change: Callable[[Any], Any], named: str
) -> None:
    """Under the same path."""
    edit(model / file, change)
    if not named:
        check_resumed(run())
        return
    with pytest.raises(ConfigError, match=rf"^model\.path: {model} has changed since .*{named}"):
        check_resumed(run())


def test_a_template_beside_the_model_is_part_of_it(run: Callable[..., RunConfig], model: Path) -> None:
    (model / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja: text: None → \{\{ messages \}\};"):
        check_resumed(run())


def test_a_resume_says_what_it_changes(run: Callable[..., RunConfig], model: Path) -> None:
    changed = run(model={"path": str(model), "dtype": "float32"}, trainer={"lr": 0.5}, total_steps=7)
    check_resumed(changed)
    assert describe_resumed_changes(changed) == (
        "model.dtype: bfloat16 → float32, total_steps: 100 → 7, trainer.lr: 1e-06 → 0.5"
    )
    assert not describe_resumed_changes(run()) and not describe_resumed_changes(
        run(name="new", trainer={"lr": 0.5})
    )


@pytest.mark.parametrize(
    ("section", "key", "old", "new"),
    [
        ("data", "columns", {"prompt": "q"}, {"prompt": "q", "ground_truth": "a"}),
        ("trainer", "optimizer", {"adamw": {"eps": 1e-6}}, {"adamw": {"eps": 1e-6, "weight_decay": 0.1}}),
    ],
)
def test_an_option_added_to_a_key_that_must_stay_is_refused(
    run: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch, section: str, key: str, old: Any, new: Any
) -> None:
    more = {"train": "t"} if section == "data" else {}
    before, now = (run(**{section: {key: options, **more}}) for options in (old, new))
    monkeypatch.setattr(run_directories, "previous_config", lambda config: config_tree(before))
    with pytest.raises(ConfigError, match=rf"^{section}\.{key}: .* was started with"):
        check_resumed(now)


def test_a_new_run_names_a_width_that_the_weights_have_not(model: Path) -> None:
    """Before any process starts: the trainer would find it after a minute."""
    shutil.copy(MODEL / "model.safetensors", model)
    keys = {"model": {"path": str(model)}, "data": {"train": "t"}, "rollout": {"max_tokens": 2048}}
    config = parse({"name": "new", **keys})
    check_model(config)
    edit(model / "config.json", lambda tree: tree.update(hidden_size=2 * tree["hidden_size"]))
    with pytest.raises(
        ConfigError, match=r"hidden_size is 128 in config.json, but the embedding .* is 515 × 64,"
    ):
        check_model(config)
