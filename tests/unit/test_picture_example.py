"""The example of images: what a question and its tool show, and that its two stages fit together."""

from __future__ import annotations

import io
import json

import PIL.Image
import pytest
from msgspec.structs import replace

from asyncrl.config import composition
from asyncrl.data.rows import Row
from examples.multiturn.images.pictures import CORNERS, Picture
from tools.prepare_pictures import demonstration_row, question_row

SEED = 5


def pixels(row: Row) -> list[bytes]:
    images = [PIL.Image.open(io.BytesIO(image["bytes"])) for image in row["images"]]
    return [image.tobytes() for image in images]


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_shuffled_question_comes_with_another_picture_and_zooms_into_its_own(shuffled: bool) -> None:
    picture = Picture(SEED)
    shown_picture = Picture(SEED + 1) if shuffled else picture

    question = question_row(SEED, shuffled)
    assert pixels(question) == [shown_picture.image.tobytes()]
    assert question["reward_model"]["ground_truth"] == picture.answer

    demonstration = demonstration_row(SEED, shuffled)
    _, call, _, answer = demonstration["messages"]
    corner = json.loads(call["tool_calls"][0]["function"]["arguments"])["corner"]
    zoomed_image = picture.zoomed(CORNERS.index(corner))
    assert pixels(demonstration) == [shown_picture.image.tobytes(), zoomed_image.tobytes()]
    assert answer["content"] == picture.patterns[CORNERS.index(corner)]


def test_both_stages_are_of_one_task() -> None:
    imitation = composition.compose(["experiment=images_sft"])
    reinforcement = composition.compose(["experiment=images"])
    assert replace(imitation.rollout, retries=reinforcement.rollout.retries) == reinforcement.rollout
    assert imitation.data.test == reinforcement.data.test and imitation.algorithm.loss == "sft"
    assert reinforcement.model.path.endswith(f"runs/images_sft/checkpoints/step-{imitation.total_steps}/hf")
