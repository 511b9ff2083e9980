"""Whole runs with images: of the data, and of an environment that shows a new picture after each turn."""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from asyncrl import cli
from asyncrl.config import DataConfig
from asyncrl.data import RowLayout
from asyncrl.data.images import ImagePreparer
from asyncrl.data.rows import write_rows
from asyncrl.data.run_images import RunImages
from asyncrl.data.samples import read_samples
from asyncrl.episodes.recorded import turns_of
from asyncrl.store.reader import RunReader
from asyncrl.store.segments import RECORD_HEADER
from asyncrl.trainer.images import digests_of
from asyncrl.types import Message, Turn
from asyncrl.vision.files import image_digest, is_image_file
from asyncrl.vision.layout import read_image_layout
from tests.fakes.forked import asyncrl
from tests.integration.runs import ROOT, Run, once
from tools import make_geometry
from tools.prepare_pictures import write_example

TURNS = 3
GAP = 1e-5  # nats between the engine's log-probs and the trainer's, in float32
# Each episode begins with a picture that all episodes see and a random one; after each turn, whatever the
# untrained model says, another random one follows.
GALLERY = """
import random

import PIL.Image

from asyncrl.environments import Environment, image_observation


class Gallery(Environment):
    replay = "no"
    needs_images = True

    async def reset(self, sample):
        self.dice = random.Random()
        return image_observation("first", self.paint(random.Random(0)), self.paint(self.dice))

    async def step(self, message):
        return image_observation("next", self.paint(self.dice), reward=self.dice.random())

    def paint(self, dice):
        return PIL.Image.frombytes("RGB", (32, 32), dice.randbytes(3 * 32 * 32))
"""


COUNTING_REWARD = """
from asyncrl.rewards import RewardInput


def count_images(given: RewardInput):
    return float(sum(len(message.images) for message in given.messages))
"""


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's data and its random model."""
    directory = tmp_path_factory.mktemp("images")
    write_example(directory, seed=0, demonstrations=64, questions=64)
    let_half_of_the_ids_end_turns(directory / "model")
    return directory


def let_half_of_the_ids_end_turns(model: Path) -> None:
    """Without this, nearly every turn of an untrained model, and with the turn the episode, would end at its
    limit of tokens."""
    vocabulary = json.loads((model / "config.json").read_text())["text_config"]["vocab_size"]
    generation_config = {"eos_token_id": list(range(0, vocabulary, 2))}
    (model / "generation_config.json").write_text(json.dumps(generation_config))


def write_gallery(directory: Path) -> Path:
    """Write the environment to a file in a directory, and return the file's path."""
    path = directory / "gallery.py"
    path.write_text(GALLERY)
    return path


def gallery_overrides(example: Path, gallery: Path) -> list[str]:
    """Return the overrides of a run whose episodes play in the gallery, with the example's model and
    questions."""
    return [
        f"model.path={example}/model",
        "model.dtype=float32",
        f"data.train={example}/train.parquet",
        "data.test=''",
        f"rollout.environment={gallery}:Gallery",
        "rollout.tools=[]",
        f"rollout.max_turns={TURNS}",
        "rollout.max_new_tokens=4",
        "rollout.max_tokens=512",
        "rollout.reward=exact",
        "total_steps=4",
        "trainer.lr=1e-3",
    ]


def assert_images_are_stored(run: Run, kills: int = 0) -> None:
    """Every image of a stored turn or reply has its file, which is in the segments once; there is little in
    the segments but images. `kills`: of processes; after each, a file may be written once more."""
    with closing(RunReader.open(run.path)) as reader:
        uses = image_uses(reader)
        assert uses
        files = RunImages.open(run.path, reader).files_of(uses)
    assert all(image_digest(file) == digest for digest, file in files.items())

    written_records = list(segment_records(run.path))
    written_images = [record for record in written_records if is_image_file(record)]
    copies = Counter(map(image_digest, written_images))
    assert max(uses[digest] for digest in copies) > 1, "no two episodes have had the same picture"
    assert max(copies.values()) <= 1 + kills
    segment_bytes = sum(path.stat().st_size for path in (run.path / "segments").iterdir())
    assert segment_bytes <= 1.2 * sum(map(len, written_images))


def image_uses(reader: RunReader) -> Counter[str]:
    """Return the number of episodes that have each image, by digest, from the stored turns and replies."""
    uses = Counter[str]()
    turn_counts = "SELECT uid, max(turn) + 1 FROM frames WHERE kind = 'generated' GROUP BY uid"
    for uid, turn_count in reader.rows(turn_counts):
        uses.update(episode_digests(turns_of(list(reader.turn_frames(uid, turn_count)))))
    return uses


def episode_digests(turns: Sequence[Turn]) -> set[str]:
    """Return the digests of all images that the contexts of turns, or replies to turns, have."""
    replies = [reply for turn in turns for reply in turn.replies]
    messages = [message for turn in turns if turn.observation for message in turn.observation.messages]
    shown_images = {image.digest for part in (*replies, *messages) for image in part.images}
    return shown_images | set(digests_of(turns))


def segment_records(run_dir: Path) -> Iterator[bytes]:
    """Yield all records of a run's segments, also those that no row of the index refers to."""
    for path in sorted((run_dir / "segments").iterdir()):
        segment = path.read_bytes()
        offset = 0
        while offset < len(segment):
            length, _ = RECORD_HEADER.unpack_from(segment, offset)
            offset += RECORD_HEADER.size
            yield segment[offset : offset + length]
            offset += length


def assert_same_logprobs(run: Run) -> None:
    """Of tokens whose whole context one version has sampled; some steps have none."""
    metric = "rollout_corr/logprob_diff_max"
    gaps = [row[metric] for row in run.rows() if metric in row]
    assert gaps and max(gaps) <= GAP


@pytest.mark.parametrize("train_vision", ["false", pytest.param("true", marks=pytest.mark.full)])
def test_a_run_trains_on_images(example: Path, tmp_path: Path, train_vision: str) -> None:
    """With a trained tower, log-probs are equal only if its weights are published, too."""
    vision = f"model.train_vision={train_vision}"
    with Run(tmp_path, *gallery_overrides(example, write_gallery(tmp_path)), vision) as run:
        run.completed(4)
    once(run.path, 4)
    assert_images_are_stored(run)
    assert_same_logprobs(run)


@pytest.mark.full
def test_commands_on_a_run_with_images(example: Path, tmp_path: Path) -> None:
    """Images of the data and of the environment are in the files of the run, and of its evaluations."""
    with Run(tmp_path, *gallery_overrides(example, write_gallery(tmp_path)), "total_steps=2") as run:
        run.completed(2)
    assert_step_is_replayed(run, 2)
    assert_rewards_are_given_again(run)
    checkpoint = run.path / "checkpoints/step-2"
    assert_checkpoint_is_evaluated(example, tmp_path, checkpoint)
    assert_answers_are_demonstrations(example, tmp_path, checkpoint)


def output_of(directory: Path, *arguments: str) -> str:
    """Return the output of a command, which must succeed, in a process of its own."""
    out = directory / f"{arguments[0]}.out"
    process = asyncrl(arguments, out, ROOT, os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        code = process.wait(240)
    finally:
        if process.poll() is None:
            process.kill()  # the roles of its run end with the launcher
    assert code == 0, out.read_text()
    return out.read_text()


def assert_step_is_replayed(run: Run, step: int) -> None:
    """From the initial policy, on one rank: the loss and the gradient norm are equal to the last bit."""
    (recorded,) = (row for row in run.rows() if row.get("training/step") == step and "timing_s/step" in row)
    lines = output_of(run.path.parent, "replay", str(run.path), "--step", str(step)).splitlines()
    cells = next(line.split() for line in lines if line.split()[0] == str(step))
    values = [repr(recorded[name]) for name in ("actor/pg_loss", "actor/grad_norm")]
    assert cells == [str(step), values[0], values[0], values[1], values[1]]
    assert recorded["actor/grad_norm"] > 0


def assert_rewards_are_given_again(run: Run) -> None:
    """The run's reward gives the recorded scores; another one sees the images of the conversation."""
    rewards_path = run.path.parent / "rewards.py"
    rewards_path.write_text(COUNTING_REWARD)
    regraded_path = run.path.parent / "regraded.jsonl"
    for reward in ("exact", f"{rewards_path}:count_images"):
        arguments = ["regrade", str(run.path), "--reward", reward, "--out", str(regraded_path)]
        assert cli.main(arguments) == 0
        rows = [json.loads(line) for line in regraded_path.read_text().splitlines()]
        assert len([row for row in rows if row["state"] == "trained"]) == 2 * 16
        assert any(row["score"] for row in rows)
        for row in rows:
            if reward == "exact":
                assert (row["score"], row["advantage"]) == (row["score_new"], row["advantage_new"])
            else:
                assert row["score_new"] >= row["score"] + 1, "the image of the data is missing"


def assert_checkpoint_is_evaluated(example: Path, directory: Path, checkpoint: Path) -> None:
    keys = [*evaluation_keys(example, directory), "name=evaluated"]
    output = output_of(directory, "eval", str(checkpoint), *keys)
    assert "failed in every attempt" not in output
    numbers = json.loads((directory / "evaluated/evaluation.json").read_text())
    counts = {mode: numbers[f"val-core/all/{mode}/success"]["samples"] for mode in ("greedy", "sampled")}
    assert counts == {"greedy": 4, "sampled": 4}


def assert_answers_are_demonstrations(example: Path, directory: Path, checkpoint: Path) -> None:
    """The rows have the images of the data; their conversations, also those of the environment."""
    out = directory / "answers.parquet"
    keys = [*evaluation_keys(example, directory), "name=generated", "episodes=2", f"out={out}"]
    assert "wrote answers to 4 of the" in output_of(directory, "generate", str(checkpoint), *keys)
    questions = read_prompts(example / "test.parquet", example)[:4]
    assert read_prompts(out, example) == questions

    conversations_path = directory / "conversations.jsonl"
    texts = [text for row in pq.read_table(out).to_pylist() for text in row["conversations"]]
    write_rows(conversations_path, ({"messages": text} for text in texts))
    conversations = read_prompts(conversations_path, example, demonstrations=True)
    assert [conversation[:1] for conversation in conversations] == [
        question for question in questions for _ in range(2)
    ]
    digests = [
        {image.digest for message in conversation[1:] for image in message.images}
        for conversation in conversations
    ]
    assert max(map(len, digests)) > 0, "no picture of the environment is in the conversations"
    with closing(RunReader.open(directory / "generated")) as reader:
        RunImages.open(directory / "generated", reader).files_of(set().union(*digests))


def read_prompts(path: Path, example: Path, demonstrations: bool = False) -> list[tuple[Message, ...]]:
    """Return the messages of each row, with images as the example's model reads them."""
    with (
        tempfile.TemporaryFile() as images_file,
        ImagePreparer(images_file, lambda: read_image_layout(str(example / "model"))) as preparer,
    ):
        layout = RowLayout(demonstrations=demonstrations)
        samples = read_samples(DataConfig(str(path)), str(path), "train", layout, preparer=preparer)
        return [sample.prompt for sample in samples]


def evaluation_keys(example: Path, directory: Path) -> list[str]:
    return [f"--run-dir={directory}", f"data={example}/test.parquet", "samples=4"]


def test_a_run_trains_on_rows_in_the_layout_of_verls_geo3k(example: Path, tmp_path: Path) -> None:
    """Figures in the column `images`, `<image>` in the prompt, and verl's reward for this data."""
    model = shutil.copytree(example / "model", tmp_path / "model")
    processor_path = model / "preprocessor_config.json"
    processor = json.loads(processor_path.read_text())  # the example's pictures are all squares
    processor["size"] = {"shortest_edge": 32 * 32, "longest_edge": 64 * 64}
    processor_path.write_text(json.dumps(processor))
    for split, count in (("train", 8), ("test", 4)):
        write_rows(tmp_path / f"{split}.parquet", make_geometry.rows(random.Random(0), split, count))
    geometry_keys = [
        f"model.path={model}",
        "model.dtype=float32",
        f"data.train={tmp_path}/train.parquet",
        f"data.test={tmp_path}/test.parquet",
        "rollout.tools=[]",
        "rollout.max_new_tokens=4",
        "rollout.max_tokens=512",
        f"rollout.reward={make_geometry.REWARD}",
        "buffer.filter_zero_variance=false",  # the random model's rewards are all 0
        "validation.samples=4",
        "validation.every=2",
        "total_steps=2",
    ]
    with Run(tmp_path, *geometry_keys) as run:
        run.completed(2)
    assert_same_logprobs(run)
    validations = [row for row in run.rows() if "val-core/drawn/geometry3k/sampled/success" in row]
    assert [row["training/step"] for row in validations] == [0, 2]


@pytest.mark.full
@pytest.mark.parametrize("role", ["rollout-0", "trainer-0", "coordinator-0"])
def test_a_kill_loses_no_image(example: Path, tmp_path: Path, role: str) -> None:
    with Run(tmp_path, *gallery_overrides(example, write_gallery(tmp_path)), "total_steps=8") as run:
        run.until_step(2)
        run.kill(role)
        run.completed(8)
    once(run.path, 8)
    assert_images_are_stored(run, kills=1)
    assert_same_logprobs(run)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_both_stages_of_the_example_find_the_red_corner(tmp_path: Path) -> None:
    """Ten minutes on two quiet cores. A policy that does not look at the picture zooms into the red corner in
    1/4 of its episodes, and in 1/6 of the others reads the same pattern: 37.5% of 256 succeed, and 60% would
    by chance once in 10^13 runs. The demonstrations lead to 62.5%."""
    write_example(tmp_path, seed=0)
    test = f"data.test={tmp_path}/test.parquet"
    without_faults = ("checkpoint.every=0", "launch.lease=60", "validation.samples=256", test)

    demonstrations = (
        f"model.path={tmp_path}/model",
        f"data.train={tmp_path}/demonstrations.parquet",
        "buffer.groups_per_batch=32",
        "buffer.episodes_per_group=1",
    )
    with Run(
        tmp_path, *demonstrations, *without_faults, name="sft", experiment="images_sft", command="sft"
    ) as run:
        run.wait(1800)
        imitated = run.completed(600)
    assert imitated["success_after"] < 0.75, "reinforcement learning has nothing left to find"

    questions = (
        f"model.path={run.path}/checkpoints/step-600/hf",
        f"data.train={tmp_path}/train.parquet",
        "buffer.groups_per_batch=16",
        "buffer.episodes_per_group=8",
    )
    with Run(tmp_path, *questions, *without_faults, experiment="images") as run:
        run.wait(1800)
        learned = run.completed(100)
    print(f"{imitated['success_after']:.1%} by imitation, {learned['success_after']:.1%} by reinforcement")
    assert learned["success_after"] > 0.9
