"""The largest micro-batch is tried before the first step, and leaves nothing behind."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from asyncrl.config import RunConfig
from asyncrl.trainer import memory
from asyncrl.trainer.memory import largest_tokens, try_largest
from asyncrl.trainer.world import World
from tests.fakes.forked import FORKED
from tests.fakes.training import (
    VOCABULARY,
    full_state,
    make_learner,
    plain_model,
    save_tiny_model,
    tiny_config,
)

CRITIC: dict[str, Any] = {"algorithm": {"advantage": "gae"}, "buffer": {"filter_zero_variance": False}}


def config_of(folder: Path, **sections: Any) -> RunConfig:
    """Three rows of 20 tokens fit."""
    limits = {"max_tokens": 20, "max_new_tokens": 10} | sections.pop("rollout", {})
    path = save_tiny_model(folder)
    return tiny_config(path, rollout=limits, trainer={"micro_batch_tokens": 70}, **sections)


def test_it_is_as_large_as_may_be(tmp_path: Path) -> None:
    assert config_of(tmp_path).largest_rows(70) == 3
    assert config_of(tmp_path).largest_rows(10) == 1  # after a lack of memory
    forking = config_of(tmp_path, rollout={"history": "fork", "max_rows": 5})
    assert forking.largest_rows(70) == 5
    led = config_of(tmp_path, rollout={"agent": "a.py:b", "max_rows": 32})
    assert (led.largest_rows(70), led.largest_rows(10)) == (3, 1), "32 full rows would fit nowhere"
    for packing in ("padded", "packed", "tree"):
        tokens = largest_tokens(3, 20, packing)
        assert tokens.ids.numel() == 3 * 20 and len(tokens.labels) == 3 * 19


def test_all_models_run_it_and_nothing_is_left(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory, "LAYER_MIN_PARAMETERS", 0)
    learner = make_learner(config_of(tmp_path, **CRITIC), world)
    assert learner.critic is not None
    sizes = list[int]()
    before = full_state(learner.policy)
    for model in (learner.policy, learner.critic):
        model.register_forward_hook(lambda model, args, out: sizes.append(args[0].ids.numel()))
    learner.note_work = lambda: sizes.append(0)
    with caplog.at_level(logging.INFO):
        try_largest(learner)
    assert sizes == [3, 3, 0, 60, 60, 0], "servers join, and beats go out, after each"
    assert "3 rows of 20 tokens, in" in caplog.text
    assert all(p.grad is None for m in (learner.policy, learner.critic) for p in m.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in full_state(learner.policy).items())


def test_a_teacher_of_more_words_is_tried_by_classes(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "LAYER_MIN_PARAMETERS", 0)
    (tmp_path / "policy").mkdir()
    wide = plain_model(save_tiny_model(tmp_path))
    wide.resize_token_embeddings(VOCABULARY + 8)
    wide.save_pretrained(tmp_path / "wide")
    kl = {"where": "loss", "coef": 1.0, "estimator": "js", "top_k": 4, "reference": str(tmp_path / "wide")}
    config = config_of(tmp_path / "policy", kl=kl, buffer={"filter_zero_variance": False})
    try_largest(make_learner(config, world))


def test_too_little_memory_is_that_of_a_micro_batch(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = make_learner(config_of(tmp_path), world)

    def lack(*about: Any) -> None:
        raise MemoryError

    learner.policy.register_forward_hook(lack)
    try_largest(learner)  # too small a model to be tried
    monkeypatch.setattr(memory, "LAYER_MIN_PARAMETERS", 0)
    with pytest.raises(MemoryError):
        try_largest(learner)
    assert learner.micro_batch_size == (60, 3), "what TrainerRank.report tells, for the coordinator to halve"


def make_holes(model_directory: Path) -> None:
    """64 MB of blocks too small to be mapped one by one, with one block above them that stays."""
    blocks = [bytes([1]) * 100_000 for _ in range(640)]
    last = bytes([1]) * 100_000
    blocks.clear()
    held = psutil.Process().memory_info().rss
    memory.trim_heap()
    model_directory.write_text(str(held - psutil.Process().memory_info().rss))
    del last


def test_freed_memory_goes_back_to_the_system(tmp_path: Path) -> None:
    process = FORKED.Process(target=make_holes, args=(tmp_path / "freed",))
    process.start()
    process.join(60)
    assert int((tmp_path / "freed").read_text()) > 40e6
