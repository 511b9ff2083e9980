"""Validation of a configuration, and what keeps the file honest: documentation, size, no dead keys."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from asyncrl.config import RunConfig, Section, parse
from asyncrl.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
MINIMUM: dict[str, Any] = {"name": "x", "model": {"path": "m"}, "data": {"train": "t"}}


def with_keys(**keys: Any) -> dict[str, Any]:
    """The least configuration, plus dotted keys written with double underscores."""
    tree: dict[str, Any] = {name: dict(v) if isinstance(v, dict) else v for name, v in MINIMUM.items()}
    for name, value in keys.items():
        *path, last = name.split("__")
        place = tree
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return tree


def sections(kind: type[msgspec.Struct] = RunConfig, prefix: str = "") -> dict[str, type[msgspec.Struct]]:
    found = {prefix: kind}
    for field in msgspec.structs.fields(kind):
        if isinstance(field.type, type) and issubclass(field.type, Section):
            found |= sections(field.type, f"{prefix}{field.name}.")
        for part in get_args(field.type):
            if isinstance(part, type) and issubclass(part, Section):
                found |= sections(part, f"{prefix}{field.name}.NAME.")
    return found


def test_defaults_are_valid_and_frozen() -> None:
    config = parse(MINIMUM)
    assert (
        config.buffer.batch_size == 256
        and config.buffer.target == 0.5
        and config.buffer.max_live_groups == 160
    )
    with pytest.raises(AttributeError):
        config.name = "y"  # type: ignore[misc]


def test_text_from_the_command_line_is_converted() -> None:
    assert parse(with_keys(trainer__lr="1e-3")).trainer.lr == 1e-3


def test_synchronous_runs_admit_nothing_ahead() -> None:
    assert parse(with_keys(buffer__max_staleness=0)).buffer.target == 0


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"trainer__lrr": 1}, r"trainer: .*`lrr`"),
        ({"trainer__lr": 0}, r"trainer\.lr"),
        ({"name": ""}, r"name"),
        ({"total_steps": "many"}, r"total_steps"),
        ({"buffer__on_stale": "wait"}, r"buffer\.on_stale: .*; choose from mask, "),
        ({"observe__trackers": ["neptune"]}, r"observe\.trackers\[0\]: .*; choose from wandb, "),
        ({"rollout__tools": "my_tools.py:a"}, r"rollout\.tools: .*; write a list: rollout.tools=\[NAME\]"),
        ({"model": "dir"}, r"model: Expected `object`, got `str`; .* set its keys: model.KEY="),
        ({"buffer__target_staleness": 17}, "target_staleness"),
        ({"algorithm__correction": {"mask": {"low": [1]}}}, r"algorithm\.correction"),
        (
            {"algorithm__loss": "ppo", "algorithm__steps_per_batch": 33},
            "some steps would have no groups",
        ),
        ({"rollout__max_new_tokens": 5000}, "exceeds max_tokens"),
        ({"checkpoint__directory": "saved"}, r"checkpoint\.directory \(saved\) is relative"),
        ({"checkpoint__best": True}, r"checkpoint\.best needs validations"),
        ({"weights__transport": "collective"}, "needs servers"),
        (
            {"trainer__ranks": 4, "trainer__replicas": 3},
            r"replicas \(3\) does not divide trainer\.ranks \(4\); set it to one of \[1, 2, 4\]",
        ),
        ({"trainer__sequence_parallel": 2}, r"sequence_parallel \(2\) does not divide trainer\.ranks \(1\)"),
        (
            {"trainer__ranks": 2, "trainer__sequence_parallel": 2, "trainer__packing": "padded"},
            "set trainer.packing to packed or tree",
        ),
        ({"rollout__agent": "a.py:f", "rollout__tools": ["calculator"]}, "runs the episodes itself"),
        ({"rollout__agent": "a.py:f", "rollout__environment": {"gymnasium": {}}}, "runs the episodes itself"),
        ({"engine__urls": ["http://a:1", "http://b:1", "http://a:1/"]}, "lists a server twice"),
        (
            {"engine__name": "sglang", "weights__transport": "collective", "weights__full_every": 2},
            "cannot apply deltas",
        ),
        ({"scorers__judge__path": "m"}, r"scorers: .*reference\|reward\|teacher"),
        ({"scorers__reward__servers": 2}, r"scorers\.reward: .* set path or urls"),
        ({"scorers__reward": {"path": "m", "sources": ["a"]}}, r"only teachers take sources"),
        ({"scorers": {"teacher": {"path": "m"}, "teacher_b": {"path": "n"}}}, r"teacher and teacher_b"),
        ({"scorers__reference__path": "m", "rollout__temperature": 0.7}, r"temperature \(0\.7\): servers"),
        (
            {"rollout__reward": {"reward_model": {"url": "scorer:reward"}}},
            r"uses scorer:reward, but scorers does not define that name",
        ),
        ({"scorers__reference__path": "m", "kl__reference": "n"}, r"alternatives"),
        ({"scorers": {"teacher": {"path": "m"}, "reference": {"path": "n"}}}, r"alternatives"),
        (
            {"scorers__reference__urls": ["engines"]},
            r"the base.*set model\.lora_rank and weights\.adapters=true",
        ),
        (
            {"scorers__teacher__urls": ["engines"], "model__lora_rank": 2, "engine__name": "sglang"},
            r"^scorers\.teacher: urls=\[engines\] needs engines that hold the base",
        ),
        (
            {"scorers__reward__urls": ["engines"], "model__lora_rank": 2},
            r"^scorers\.reward: .* cannot serve a reward; remove these settings, or use separate servers",
        ),
        (
            {"scorers__reference": {"urls": ["engines"], "path": "m"}, "model__lora_rank": 2},
            "cannot be combined with other URLs, path",
        ),
        ({"trainer__router_replay": True}, r"trainer\.router_replay needs engine=sglang"),
        (
            {"engine__name": "sglang", "trainer__router_replay": True, "trainer__compile": True},
            "does not work with trainer.compile=true",
        ),
    ],
)
def test_refusals_name_the_key(keys: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        parse(with_keys(**keys))
    assert "\n" not in str(caught.value)


def test_each_data_source_has_its_teacher() -> None:
    teachers = {"teacher_math": {"path": "m", "sources": ["gsm8k"]}, "teacher": {"path": "n"}}
    config = parse(with_keys(scorers={**teachers, "reward": {"path": "w"}}))
    assert config.reader("gsm8k") == "teacher_math" and config.reader("chat") == "teacher"
    assert config.group_bytes == 8 * 4096 * (24 + 4)
    assert parse(with_keys(scorers={"reward": {"path": "w"}})).reader("gsm8k") == ""
    judged = {"reward": {"llm_judge": {"url": "scorer:teacher"}}}
    for reward, used in (({}, []), (judged, ["teacher"])):
        keys = with_keys(scorers={"teacher": {"path": "t"}}, total_steps=0, rollout=reward)
        assert parse(keys).scorers_used == used


def test_a_missing_key_is_named() -> None:
    with pytest.raises(ConfigError, match="`path`"):
        parse({**MINIMUM, "model": {}})


def test_it_survives_the_file_that_children_read() -> None:
    config = parse(with_keys(rollout__tool_args={"a": {"b": 1.5}}, buffer__target_staleness=0))
    assert msgspec.yaml.decode(msgspec.yaml.encode(config), type=RunConfig) == config


def test_there_are_few_keys_and_no_dead_ones() -> None:
    code = "\n".join(path.read_text() for path in (ROOT / "asyncrl").rglob("*.py"))
    keys = [
        prefix + field.name
        for prefix, kind in sections().items()
        for field in msgspec.structs.fields(kind)
        if not (isinstance(field.type, type) and issubclass(field.type, Section))
    ]
    assert len(keys) <= 165
    dead = [key for key in keys if not re.search(rf"\.{key.rpartition('.')[2]}\b", code)]
    assert not dead
