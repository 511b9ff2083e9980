"""Images of the data before a start: which models read them, what is saved, and what counts them."""

from __future__ import annotations

import base64
import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncrl.data import Samples, open_images, samples_path
from asyncrl.data.storage import images_path, save_sequence_image_ids, stored_sequence_image_ids
from asyncrl.episodes.parts import EpisodeParts
from asyncrl.errors import ConfigError
from asyncrl.launch.data import check_data
from asyncrl.launch.inputs import Inputs
from asyncrl.launch.preflight import check_settings, show_images
from asyncrl.launch.run_directory import run_directory
from asyncrl.store.runstore import RunStore
from asyncrl.trainer.learner import sequence_image_ids
from asyncrl.types import ImageRef, Message, Sample
from tests.fakes.checked import Given, questions
from tests.fakes.image_data import LAYOUT, image_file, make_image_model


@pytest.fixture(scope="session")
def image_model(tmp_path_factory: pytest.TempPathFactory, chat_model: Path) -> Path:
    directory = tmp_path_factory.mktemp("images") / "model"
    shutil.copytree(chat_model, directory)
    make_image_model(directory)
    return directory


def rows_with_images(*sizes: int) -> list[dict[str, Any]]:
    """One row per side of a square image; 0: without an image."""
    rows: list[dict[str, Any]] = []
    for number, size in enumerate(sizes):
        file = image_file(size or 1, size or 1, f"#{number:06x}")
        rows.append(
            {
                "prompt": "<image>?" if size else "?",
                "images": [base64.b64encode(file).decode()] if size else None,
                "ground_truth": 1,
            }
        )
    return rows


def read_images(given: Given, model: Path, rows: list[dict[str, Any]], **keys: Any) -> EpisodeParts:
    given.write(rows)
    given.keys |= {"model.path": str(model)} | keys
    return EpisodeParts(given.config())


def test_a_model_of_text_and_the_row_are_named(given: Given) -> None:
    given.write([*questions(4), *rows_with_images(64)])
    (note,) = given.notes("data")[-1:]
    assert note.level == "error" and note.text.startswith("data.train: ")
    assert "train.jsonl, sample 4: image 1 of 1 in the images column cannot be read: " in note.text
    assert f"{given.model}: the model (type qwen2) reads text only; use a vision-language model" in note.text


def test_images_are_saved_beside_the_samples(given: Given, image_model: Path) -> None:
    parts = read_images(given, image_model, rows_with_images(64, 0, 1000, 64))
    run_data = check_data(parts)
    assert run_data.image_lines == [
        "data.train: 3 different images (1 scaled); tokens per image: 4 to 64, median 4"
    ]

    inputs = Inputs(given.config())
    vars(inputs)["run_data"] = run_data
    assert [note.text for note in show_images(inputs)] == run_data.image_lines

    assert run_data.sequence_image_ids == 64  # of the largest image
    run_dir = given.runs / "x"
    run_data.save_samples(run_dir)
    assert stored_sequence_image_ids(run_dir) == 64
    images = open_images(run_dir, "train")
    assert images is not None and open_images(run_dir, "test") is None
    for sample in Samples.open(samples_path(run_dir, "train")):
        for image in sample.prompt[0].images:
            assert images.file_of(image.digest)

    given.write(questions(4))
    check_data(EpisodeParts(given.config())).save_samples(run_dir)  # a restart without images
    assert not images_path(run_dir, "train").exists()
    assert stored_sequence_image_ids(run_dir) == 0


def test_ranks_warn_if_the_number_of_image_ids_is_missing(
    given: Given, image_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = given.config()
    assert sequence_image_ids(config) == 0 and not caplog.text, "the model reads text only"

    config = read_images(given, image_model, rows_with_images(64, 64, 64, 64)).config
    assert sequence_image_ids(config) == 0
    assert "x has no file data/sequence_image_ids, so the memory estimate" in caplog.text

    run_dir = Path(config.run_dir) / config.name
    (run_dir / "data").mkdir(parents=True)
    save_sequence_image_ids(run_dir, 12)
    assert [path.name for path in (run_dir / "data").iterdir()] == ["sequence_image_ids"]
    assert sequence_image_ids(config) == 12


def test_of_an_environment_with_images_plan_and_ranks_count_the_same(given: Given) -> None:
    given.write(questions(4))
    parts = EpisodeParts(given.config())
    vars(parts)["environment_shows_images"] = True
    run_data = check_data(parts)
    assert run_data.sequence_image_ids == parts.config.rollout.max_tokens
    run_data.save_samples(given.runs / "x")
    assert stored_sequence_image_ids(given.runs / "x") == parts.config.rollout.max_tokens


def test_image_tokens_count_as_prompt_tokens(given: Given, image_model: Path) -> None:
    keys = {"data.filter_overlong": True, "rollout.max_tokens": 100, "rollout.max_new_tokens": 16}
    rows = rows_with_images(64, 64, 64, 64, 1000, 64)  # 4 tokens each, and 64
    run_data = check_data(read_images(given, image_model, rows, **keys))
    assert len(run_data.train) == 5 and "1 prompt has more than 84 tokens" in run_data.warnings[0]

    parts = read_images(given, image_model, rows, **keys, **{"model.max_image_tokens": 16})
    run_data = check_data(parts)
    assert len(run_data.train) == 6 and not run_data.warnings
    assert run_data.train[4].prompt[0].images[0].height == 128


def test_short_texts_with_many_images_are_measured(given: Given, image_model: Path) -> None:
    """Though the text alone, with the references to the images, could not have so many tokens."""
    file = base64.b64encode(image_file(256, 256, "red")).decode()  # 64 tokens
    rows = [
        *rows_with_images(64, 64, 64, 64),
        {"prompt": "<image>" * 20, "images": [file] * 20, "ground_truth": 1},
    ]
    keys = {"data.filter_overlong": True, "rollout.max_tokens": 1116, "rollout.max_new_tokens": 16}
    run_data = check_data(read_images(given, image_model, rows, **keys))
    assert len(run_data.train) == 4 and "1 prompt has more than 1100 tokens" in run_data.warnings[0]


def test_a_limit_of_tokens_that_engines_would_undo_is_refused(given: Given, image_model: Path) -> None:
    parts = read_images(given, image_model, rows_with_images(64), **{"model.max_image_tokens": 7})
    with pytest.raises(ConfigError, match=r"model\.max_image_tokens=7 is too small .* set at least 8"):
        check_data(parts)


@pytest.mark.parametrize("max_ids", [LAYOUT.smallest_limit, 9, 11, 16, 37])
def test_scaled_images_stay_between_the_limits(max_ids: int) -> None:
    """Below the processor's own minimum, an engine would enlarge the images again."""
    limited = LAYOUT.with_max_ids(max_ids)
    for height in range(16, 700, 23):
        for width in range(16, 700, 19):
            size = limited.final_size(height, width)
            assert LAYOUT.run_length(*size) <= max_ids or min(size) == LAYOUT.factor, (height, width)
            assert LAYOUT.min_pixels <= size[0] * size[1] and LAYOUT.final_size(*size) == size, (
                height,
                width,
            )


def test_a_changed_limit_is_named_at_a_resume(given: Given, image_model: Path) -> None:
    config = read_images(given, image_model, rows_with_images(*[1000] * 4)).config
    run_directory(config).mkdir(parents=True)
    with closing(RunStore(run_directory(config))) as store:
        store.put_meta("data", check_data(EpisodeParts(config)).train.fingerprint)
        store.commit()
    (run_directory(config) / "config.yaml").write_bytes(msgspec.yaml.encode(config))
    given.keys |= {"resume": "auto"}
    assert len(check_data(EpisodeParts(given.config())).train) == 4
    given.keys |= {"model.max_image_tokens": 8}
    with pytest.raises(
        ConfigError, match=r"the sizes of images depend on model\.max_image_tokens, which was 0 and"
    ):
        check_data(EpisodeParts(given.config()))


def test_a_template_that_writes_no_images_is_refused(given: Given, image_model: Path) -> None:
    template = given.folder / "text.jinja"
    template.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}"
        "{% else %}{% for part in m.content %}{{ part.text or '' }}{% endfor %}{% endif %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    from asyncrl.episodes.parts import check_images_written

    rows = [*questions(4), *rows_with_images(64)]
    parts = read_images(given, image_model, rows, **{"model.template": template.read_text()})
    with pytest.raises(ConfigError, match=r"data\.train, sample 4: the chat template writes 0 image placeh"):
        check_images_written(parts, "data.train", check_data(parts).train)


def test_attached_servers_of_a_trained_tower_need_an_environment_variable(
    given: Given, image_model: Path
) -> None:
    keys = {"engine.name": "sglang", "engine.urls": ["http://127.0.0.1:1"], "model.train_vision": True}
    read_images(given, image_model, rows_with_images(64, 64, 64, 64), **keys)
    texts = [note.text for note in check_settings(Inputs(given.config())) if note.level == "warning"]
    assert [text for text in texts if "start the servers with SGLANG_VLM_CACHE_SIZE_MB=0" in text]


def test_a_machine_without_the_image_processor_is_no_machine_that_shows_notes(
    given: Given, image_model: Path, tmp_path: Path
) -> None:
    """The launcher has decided for all machines that the model reads images."""
    shutil.copytree(image_model, tmp_path / "copy")
    (tmp_path / "copy" / "preprocessor_config.json").unlink()
    given.keys["model.path"] = str(tmp_path / "copy")
    with pytest.raises(ConfigError, match=r"preprocessor_config\.json"):
        print(EpisodeParts(given.config()).image_layout)

    given.keys["model.read_images"] = False
    assert EpisodeParts(given.config()).image_layout is None


def test_lists_of_episodes_show_where_images_stand(tmp_path: Path) -> None:
    image = ImageRef("0" * 29, 480, 640)
    with closing(RunStore(tmp_path)) as store:
        store.put_question(0, Sample(0, "s", (Message("user", "\ufffcWhich?", images=(image,)),), "1"))
        store.commit()
        (row,) = store.reader._db.execute("SELECT * FROM questions").fetchall()
    assert "[image 640x480]Which?" in json.dumps(tuple(row))
