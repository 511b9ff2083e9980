"""A key of an earlier version is answered in one line, and a run that was recorded with it can be read."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from asyncrl import cli
from asyncrl.config import old_keys, parse, read_config
from asyncrl.config.composition import compose, default_tree
from asyncrl.config.run import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.store.launches import config_tree

NAMED = ["name=n", "model.path=m", "data.train=t"]
OLD_KEY = "trainer.step_size"
NEW_KEY = "trainer.lr"
ANSWER = f"unknown key {OLD_KEY}; the key is now called {NEW_KEY}"


@pytest.fixture
def renamed_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(old_keys.RENAMED_KEYS, OLD_KEY, NEW_KEY)


@pytest.mark.usefixtures("renamed_key")
def test_a_renamed_key_is_answered_in_one_line_wherever_it_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", *NAMED, f"{OLD_KEY}=0.1"]) == 2
    error_text = capsys.readouterr().err
    assert error_text.count("\n") == 1 and error_text.endswith(f"{ANSWER}\n")

    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/mine.yaml").write_text("# @package _global_\ntrainer: {step_size: 0.1}\n")
    with pytest.raises(ConfigError, match=ANSWER):
        compose([*NAMED, "experiment=mine"], tmp_path)
    with pytest.raises(ConfigError, match=ANSWER):
        compose(NAMED, values={"trainer": {"step_size": 0.1}})
    with pytest.raises(ConfigError, match=ANSWER):
        parse({"name": "n", "model": {"path": "m"}, "data": {"train": "t"}, "trainer": {"step_size": 0.1}})


@pytest.mark.usefixtures("renamed_key")
def test_a_run_recorded_with_old_keys_can_be_read(tmp_path: Path) -> None:
    config = compose([*NAMED, "trainer.lr=0.125"])
    recorded = config_tree(config)
    recorded["trainer"]["step_size"] = recorded["trainer"].pop("lr")
    recorded["critic"]["backbone"] = "own"
    (tmp_path / "config.yaml").write_bytes(msgspec.yaml.encode(recorded))
    assert read_config(tmp_path) == config

    recorded["critic"]["never_a_key"] = 1
    (tmp_path / "config.yaml").write_bytes(msgspec.yaml.encode(recorded))
    with pytest.raises(ConfigError, match="never_a_key"):
        read_config(tmp_path)


def test_a_renamed_section_moves_with_its_keys() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(old_keys, "RENAMED_KEYS", {"learner.lr": "trainer.lr"})
        config = old_keys.with_current_keys({"learner": {"lr": 1.0}, "critic": {"coef": 1.0, "lr": 2.0}})
        assert config == {"trainer": {"lr": 1.0}, "critic": {"lr": 2.0}}


def test_old_keys_are_no_keys_and_new_ones_are() -> None:
    def is_key(dotted_key: str) -> bool:
        tree = default_tree(RunConfig)
        for name in dotted_key.split("."):
            if not isinstance(tree, dict) or name not in tree:
                return False
            tree = tree[name]
        return True

    assert not [key for key in (*old_keys.RENAMED_KEYS, *old_keys.REMOVED_KEYS) if is_key(key)]
    assert all(map(is_key, old_keys.RENAMED_KEYS.values()))
