"""The example of images: what a question and its tool show, and that its two stages fit together."""

from __future__ import annotations

import io
import json
from statistics import mean

import PIL.Image
import pytest
from msgspec.structs import replace

from asyncrl.config import composition
from asyncrl.data.rows import Row
from examples.multiturn.images.pictures import CORNERS, Picture
from tools.prepare_pictures import demonstrated_corner, question_row, red_corner_row, zoom_row

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

    conversation = zoom_row(SEED, shuffled)
    _, call, _, answer = conversation["messages"]
    corner = CORNERS.index(json.loads(call["tool_calls"][0]["function"]["arguments"])["corner"])
    assert pixels(conversation) == [shown_picture.image.tobytes(), picture.zoomed(corner).tobytes()]
    assert answer["content"] == picture.patterns[corner]

    conversation = red_corner_row(SEED, shuffled)
    assert pixels(conversation) == [shown_picture.image.tobytes()]
    assert json.loads(conversation["messages"][-1]["content"]) == {"corner": CORNERS[picture.corner]}


def test_demonstrations_of_all_pictures_zoom_into_the_red_corner_equally_often() -> None:
    """About 55% of the 80 pictures of each of 24 orders of the colours. Drawn from the picture's own random
    numbers, the corner followed from the order."""
    red_zooms: dict[tuple[str, ...], list[bool]] = {}
    for seed in range(2000):
        picture = Picture(seed)
        is_red = demonstrated_corner(seed, picture) == picture.corner
        red_zooms.setdefault(tuple(picture.colours), []).append(is_red)
    assert len(red_zooms) == 24
    assert all(0.4 < mean(zooms) < 0.75 for zooms in red_zooms.values())


def test_both_stages_are_of_one_task() -> None:
    imitation = composition.compose(["experiment=images_sft"])
    reinforcement = composition.compose(["experiment=images"])
    assert replace(imitation.rollout, retries=reinforcement.rollout.retries) == reinforcement.rollout
    assert imitation.data.test == reinforcement.data.test and imitation.algorithm.loss == "sft"
    assert reinforcement.model.path.endswith(f"runs/images_sft/checkpoints/step-{imitation.total_steps}/hf")
