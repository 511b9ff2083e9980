"""Whole runs of `asyncrl train` on real servers that read images; one request at a time: test_families.py."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from asyncrl.vision.layout import SERVED_ROPE_THETA
from tests.integration.runs import Run, once
from tests.integration.test_images import (
    assert_images_are_stored,
    assert_same_logprobs,
    gallery_overrides,
    let_half_of_the_ids_end_turns,
    write_gallery,
)
from tools.prepare_pictures import write_example

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200), pytest.mark.usefixtures("alone")]
SGLANG = ("engine=sglang_cpu", "rollout.slots=16", "launch.start_timeout=300")
DEADLINE = 400.0


def compute_the_tower_as_servers_do(model: Path) -> None:
    model_config = json.loads((model / "config.json").read_text())
    model_config["vision_config"]["rope_parameters"]["rope_theta"] = SERVED_ROPE_THETA
    (model / "config.json").write_text(json.dumps(model_config))


@pytest.mark.parametrize("train_vision", [False, True], ids=["frozen tower", "trained tower"])
def test_a_run_trains_on_images_and_survives_the_end_of_its_server(
    tmp_path: Path, train_vision: bool
) -> None:
    example = tmp_path / "example"
    write_example(example, seed=0, demonstrations=8, questions=64)
    let_half_of_the_ids_end_turns(example / "model")
    compute_the_tower_as_servers_do(example / "model")
    overrides = gallery_overrides(example, gallery=write_gallery(tmp_path))
    vision = f"model.train_vision={train_vision}"
    with Run(tmp_path, *overrides, vision, *SGLANG, "total_steps=6") as run:
        run.until(lambda: run.step >= 2, "step 2", DEADLINE)
        server = run.children()["engine-0"].children()[0]
        os.kill(server.pid, signal.SIGKILL)
        run.wait(DEADLINE)
        run.completed(6)
    once(run.path, 6)
    assert_images_are_stored(run, kills=1)
    assert_same_logprobs(run)
