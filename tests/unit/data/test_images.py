"""Images in rows: the layouts that are read, what is prepared and stored, and faults."""

from __future__ import annotations

import base64
import io
import json
import random
import tempfile
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.commands.generate import conversation_json, prompt_columns
from asyncrl.config import DataConfig
from asyncrl.data import RowLayout, Samples, StoredImages
from asyncrl.data import images as images_module
from asyncrl.data.images import MAX_WAITING_IMAGES, ImagePreparer, RowImages
from asyncrl.data.rows import write_rows
from asyncrl.data.run_images import RunImages
from asyncrl.data.samples import read_samples
from asyncrl.data.sources import RowOrigin
from asyncrl.errors import ConfigError
from asyncrl.store.reader import RunReader
from asyncrl.store.schema import StoreError
from asyncrl.types import IMAGE_MARK, ImageRef, Message, Sample, ToolCall, ToolReply, readable_content
from asyncrl.vision.files import StoredImage, image_digest, prepare_decoded, prepare_image
from tests.fakes.image_data import LAYOUT, animated_file, encode_image, image_file, noise
from tools import make_geometry

RED = image_file(color="red")
BLUE = image_file(color="blue", kind="JPEG")
RED_TEXT = base64.b64encode(RED).decode()
RED_URL = f"data:image/png;base64,{RED_TEXT}"
TEXT_PART = {"type": "text", "text": "Which colour?"}


class Split:
    """The samples of a file and their images."""

    def __init__(self, path: Path, layout: RowLayout = RowLayout(), **keys: Any) -> None:
        config = DataConfig(str(path), **keys)
        with (
            tempfile.TemporaryFile() as samples_file,
            tempfile.TemporaryFile() as images_file,
            ImagePreparer(images_file, lambda: LAYOUT) as preparer,
        ):
            rows = read_samples(config, str(path), "train", layout, preparer=preparer)
            self.samples = Samples.write(samples_file, [rows])
            self.images = preparer.finish()
        self.summary = preparer.summary

    def files(self, message: Message) -> list[bytes | None]:
        assert self.images is not None
        return [self.images.file_of(image.digest) for image in message.images]


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def marked(images: Any) -> dict[str, Any]:
    """A row in verl's layout."""
    return {"prompt": "<image>Which colour?", "images": images}


def in_part(part: dict[str, Any], **columns: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": [part, TEXT_PART]}], **columns}


LAYOUTS = {
    "dict": marked([{"bytes": RED, "path": None}]),
    "dict_path": marked([{"bytes": None, "path": "figures/red.png"}]),
    "bytes": marked([RED]),
    "path": marked(["figures/red.png"]),
    "base64": marked([RED_TEXT]),
    "base64_bytes": marked([{"bytes": RED_TEXT}]),
    "data_url": marked([RED_URL]),
    "single": marked({"bytes": RED}),
    "json": marked(json.dumps(["figures/red.png"])),
    "openai": in_part({"type": "image_url", "image_url": {"url": RED_URL, "detail": "low"}}),
    "openai_text": in_part({"type": "image_url", "image_url": "figures/red.png"}),
    "hugging_face": in_part({"type": "image", "image": {"bytes": RED}}),
    "hugging_face_path": in_part({"type": "image", "path": "figures/red.png"}),
    "hugging_face_base64": in_part({"type": "image", "base64": RED_TEXT}),
    "anthropic": in_part(
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": RED_TEXT}}
    ),
    "trl": in_part({"type": "image"}, images=[RED]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_gives_the_same_message(tmp_path: Path, name: str) -> None:
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures/red.png").write_bytes(RED)
    split = Split(write_parquet(tmp_path / "a.parquet", [LAYOUTS[name] | {"ground_truth": "red"}]))
    image = ImageRef(image_digest(RED), 64, 64)
    (message,) = split.samples[0].prompt
    assert message == Message("user", f"{IMAGE_MARK}Which colour?", images=(image,))
    assert split.files(message) == [RED]


def test_images_of_a_users_data_set_and_of_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets  # here: it imports pandas, and few tests need either

    reader = tmp_path / "reader.py"
    reader.write_text(
        "import PIL.Image\n\n\ndef rows(path):\n    image = PIL.Image.new('RGB', (64, 64), 'red')\n"
        "    yield {'prompt': '<image>?', 'images': [image]}\n"
    )
    users_split = Split(tmp_path, dataset=f"{reader}:rows")
    (message,) = users_split.samples[0].prompt
    assert PIL.Image.open(io.BytesIO(users_split.files(message)[0] or b"")).getpixel((9, 9)) == (255, 0, 0)

    features = datasets.Features({"prompt": datasets.Value("string"), "images": [datasets.Image()]})
    rows = [marked([{"bytes": BLUE, "path": None}]), marked([{"bytes": RED, "path": None}])]
    dataset = datasets.Dataset.from_list(rows, features=features)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: dataset)
    hub_split = Split(Path("hf:a/b"))
    # The files as they came: a JPEG that was decoded and encoded again would be another.
    assert [hub_split.files(sample.prompt[0]) for sample in hub_split.samples] == [[BLUE], [RED]]


def test_geometry3k_as_verl_writes_it(tmp_path: Path) -> None:
    rows = make_geometry.rows(random.Random(0), "train", 4)
    split = Split(write_parquet(tmp_path / "train.parquet", rows), RowLayout(truth="math"))
    assert [sample.ground_truth for sample in split.samples] == [row["extra_info"]["answer"] for row in rows]
    for sample, row in zip(split.samples, rows, strict=True):
        (message,) = sample.prompt
        assert message.content == row["prompt"][0]["content"].replace("<image>", IMAGE_MARK)
        stored_image = prepare_image(row["images"][0]["bytes"], LAYOUT)
        assert message.images == (stored_image.ref,) and split.files(message) == [stored_image.file]


def test_images_of_conversations_and_renamed_columns(tmp_path: Path) -> None:
    response = [
        {"role": "assistant", "content": "Crop."},
        {"role": "tool", "content": [{"type": "image"}]},
        {"role": "assistant", "content": "Red."},
    ]
    row = {
        "prompt": "<image> and <image>?",
        "response": json.dumps(response),
        "pictures": [RED, BLUE, RED],
    }
    layout = RowLayout(columns={"images": "pictures"}, demonstrations=True)
    split = Split(write_parquet(tmp_path / "a.parquet", [row]), layout)
    question, _, reply, _ = split.samples[0].prompt
    assert split.files(question) == [RED, BLUE] and split.files(reply) == [RED]
    assert (question.content, reply.content) == (f"{IMAGE_MARK} and {IMAGE_MARK}?", IMAGE_MARK)


def test_text_without_images_stays_as_it_is(tmp_path: Path) -> None:
    texts = ["a <image> tag", f"an {IMAGE_MARK} in the text"]
    split = Split(write_jsonl(tmp_path / "a.jsonl", [{"prompt": text} for text in texts]))
    assert [sample.prompt[0].content for sample in split.samples] == texts
    assert split.images is None and split.summary.describe() == ""


PIECES = st.lists(
    st.one_of(st.sampled_from([RED, BLUE]), st.text(st.characters(exclude_categories=["Cs"]), max_size=5)),
    max_size=6,
)


@given(contents=st.lists(PIECES, min_size=1, max_size=3))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_texts_and_images_keep_their_order(tmp_path: Path, contents: list[list[bytes | str]]) -> None:
    """Whatever the texts contain: marks in them stand for no image."""
    messages = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": piece}
                if isinstance(piece, str)
                else {"type": "image", "base64": base64.b64encode(piece).decode()}
                for piece in pieces
            ],
        }
        for pieces in contents
    ]
    split = Split(write_jsonl(tmp_path / "a.jsonl", [{"prompt": messages}]))
    row_has_images = any(isinstance(piece, bytes) for pieces in contents for piece in pieces)
    for pieces, message in zip(contents, split.samples[0].prompt, strict=True):
        files = [piece for piece in pieces if isinstance(piece, bytes)]
        assert not files or split.files(message) == files
        mark_in_text = "\ufffd" if row_has_images else IMAGE_MARK
        expected_text = "".join(
            piece.replace(IMAGE_MARK, mark_in_text) if isinstance(piece, str) else "#" for piece in pieces
        )
        read_text = message.content.replace(IMAGE_MARK, "#") if row_has_images else message.content
        assert read_text == expected_text
        assert message.content.count(IMAGE_MARK) == len(files) or not row_has_images


# -- faults ------------------------------------------------------------------------------------------


FAULTS: dict[str, tuple[Any, str]] = {
    "truncated": (
        lambda: encode_image(PIL.Image.fromarray(noise(64, 64)))[:-900],
        "the image file is damaged .*write the file again",
    ),
    "large": (
        lambda: image_file(20_000, 32),
        "20000 x 32 pixels, but a side may have at most 16384; scale it down",
    ),
    "animated": (animated_file, "3 frames, but only still images are allowed; choose one frame"),
    "deep": (lambda: image_file(mode="I;16", color=7), "16 bits per channel; convert it to 8 bits"),
    "text": (lambda: b"\xff\xd8 no image", r"a supported format \(PNG, .*\); write a PNG or JPEG"),
    "narrow": (lambda: image_file(8_000, 10), "800 times the shorter side .*crop it"),
    "missing": ("figures/none.png", r"figures/none\.png cannot be read \(No such file.*correct the path"),
    "directory": (".", "cannot be read .Is a directory"),
    "http": ("https://a.b/c.png", "https://a.b/c.png is not fetched over the network; download the file"),
    "host": ("file://host/c.png", "is on another host; copy the file to this machine"),
    "url": ("data:image/png,abc", "the data: URL is not base64; write"),
    "number": (7, "an image cannot be a value of type int; write bytes, a path"),
    "empty": ({"bytes": None, "path": None}, "neither bytes nor a path; write bytes"),
    "long": ("x" * 10_000, r"… cannot be read \(File name too long\)"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_bad_image_is_one_line_with_its_row(tmp_path: Path, name: str) -> None:
    image, complaint = FAULTS[name]
    value = image() if callable(image) else image
    if isinstance(value, bytes):
        value = {"bytes": base64.b64encode(value).decode()}
    rows = [marked([{"bytes": RED_TEXT}]), {"prompt": "<image><image>?", "images": [RED_TEXT, value]}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    position = r"a\.jsonl, sample 1: image 2 of 2 in the images column: "
    with pytest.raises(ConfigError, match=f"{position}.*{complaint}.*, or remove the row$") as caught:
        Split(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


@pytest.mark.parametrize("function", ["prepare_image", "image_digest"])
def test_a_lack_of_memory_is_advice_with_the_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    monkeypatch.setattr(images_module, function, mock.Mock(side_effect=MemoryError))
    position = r"a\.jsonl, sample 0: image 1 of 1 in the images column: "
    with pytest.raises(ConfigError, match=f"{position}there is too little memory to prepare .*free memory"):
        Split(write_jsonl(tmp_path / "a.jsonl", [marked([RED_TEXT])]))


def test_a_decoded_image_is_not_called_damaged_for_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PIL.Image.Image, "tobytes", mock.Mock(side_effect=MemoryError))
    with tempfile.TemporaryFile() as file, ImagePreparer(file, lambda: LAYOUT) as preparer:
        row_images = RowImages(RowOrigin("a.jsonl", 0), None, preparer)
        with pytest.raises(ConfigError, match="sample 0: an image: there is too little memory"):
            row_images.add("a.jsonl, sample 0", PIL.Image.new("RGB", (64, 64)))


def test_a_bad_image_in_a_message_names_the_column(tmp_path: Path) -> None:
    part = {"type": "image_url", "image_url": {"url": "http://a.b/c.png"}}
    path = write_jsonl(tmp_path / "a.jsonl", [in_part(part)])
    with pytest.raises(ConfigError, match=r"sample 0: the prompt column: an image: http://a\.b/c\.png is"):
        Split(path)


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        (marked([RED_TEXT, RED_TEXT]), "the texts have 1 <image> marks, but the images column has 2 images"),
        (marked([]), "the texts have 1 <image> marks, but the images column has 0 images"),
        ({"prompt": "?", "images": [RED_TEXT]}, "0 <image> marks, but the images column has 1 images"),
        (in_part({"type": "image"}), "a part of type image without an image, and the row has no images"),
        (in_part({"type": "video", "video": "a.mp4"}), "content of type video; only text and images"),
        (marked("[1"), "the images column contains text that is not JSON"),
    ],
)
def test_marks_and_images_must_match(tmp_path: Path, row: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=rf"a\.jsonl, sample 0: .*{complaint}"):
        Split(write_jsonl(tmp_path / "a.jsonl", [row]))


def test_an_image_without_a_model_is_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [marked([RED_TEXT])])
    with pytest.raises(ConfigError, match=r"image 1 of 1 in the images column cannot be read here"):
        list(read_samples(DataConfig(str(path)), str(path), "train", RowLayout()))


# -- preparing ---------------------------------------------------------------------------------------


def test_the_same_data_give_the_same_digests(tmp_path: Path) -> None:
    rows = [marked([image_file(100 + index, 90, color)]) for index, color in enumerate(("red", "blue"))]
    path = write_parquet(tmp_path / "a.parquet", rows)
    split = Split(path)
    same_split = Split(path)
    assert split.samples.fingerprint == same_split.samples.fingerprint
    assert split.images is not None and same_split.images is not None
    assert list(split.images) == list(same_split.images)

    other_path = write_parquet(tmp_path / "b.parquet", [rows[0], marked([image_file(101, 90, "green")])])
    assert Split(other_path).samples.fingerprint != split.samples.fingerprint


def test_an_image_is_prepared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared_files: list[bytes] = []

    def prepare(file: bytes, layout: Any) -> StoredImage:
        prepared_files.append(file)
        return prepare_image(file, layout)

    monkeypatch.setattr(images_module, "prepare_image", prepare)
    (tmp_path / "red.png").write_bytes(RED)
    rows = [marked([RED_URL]), marked([RED_TEXT]), marked(["red.png"]), marked(["red.png"])] * 3
    split = Split(write_jsonl(tmp_path / "a.jsonl", rows))
    assert prepared_files == [RED, RED]  # once as bytes, once by its path
    assert split.images is not None and list(split.images) == [image_digest(RED)]
    assert len({sample.prompt for sample in split.samples}) == 1


def test_images_that_differ_outside_of_their_pixels_stay_apart() -> None:
    upright = PIL.Image.new("RGB", (64, 96))
    upright.paste("red", (0, 0, 64, 48))
    rotated = upright.copy()
    rotated.getexif()[0x0112] = 3  # to be turned by 180 degrees

    red_palette = PIL.Image.new("P", (64, 64))
    red_palette.putpalette([255, 0, 0])
    blue_palette = PIL.Image.new("P", (64, 64))
    blue_palette.putpalette([0, 0, 255])
    transparent = red_palette.copy()
    transparent.info["transparency"] = 0
    half_transparent = PIL.Image.new("P", (64, 64))
    half_transparent.putpalette([255, 0, 0, 128], "RGBA")

    pictures = [upright, rotated, red_palette, blue_palette, transparent, half_transparent]
    with tempfile.TemporaryFile() as file, ImagePreparer(file, lambda: LAYOUT) as preparer:
        refs = [preparer.submit("row 1", picture) for picture in pictures]
        assert preparer.submit("row 2", red_palette.copy()) == refs[2]
        messages = tuple(Message("user", IMAGE_MARK, images=(ref,)) for ref in refs)
        (sample,) = preparer.with_final_images([Sample(0, "s", messages, "1")])

    expected_refs = [prepare_decoded(picture, LAYOUT).ref for picture in pictures]
    assert [message.images[0] for message in sample.prompt] == expected_refs
    assert len(set(refs)) == len(pictures)


def test_the_summary_counts_changes_and_tokens(tmp_path: Path) -> None:
    files = [
        RED,
        image_file(100, 100, "red"),  # 96 x 96
        image_file(1000, 1000, "red"),  # 256 x 256
        image_file(mode="RGBA", color=(255, 0, 0, 9)),
        image_file(mode="L", color=9),
    ]
    split = Split(write_parquet(tmp_path / "a.parquet", [marked([file]) for file in files]))
    assert split.summary.describe() == (
        "5 different images (1 converted to RGB, 1 put on white, 2 scaled); tokens per image: 4 to 64, "
        "median 4"
    )


def test_rows_keep_their_order_and_few_images_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first image is prepared last, and reading waits for it."""
    read_count = 0
    read_counts_at_waits: list[int] = []
    first_may_end = threading.Event()

    def prepare(image: bytes, layout: Any) -> StoredImage:
        if image == b"0" and not first_may_end.wait(60):
            raise AssertionError("reading did not wait")
        return StoredImage(ImageRef(image_digest(image), 64, 64), image)

    class WatchedPreparer(ImagePreparer):
        def _final_ref(self, provisional_digest: str) -> ImageRef:
            read_counts_at_waits.append(read_count)
            first_may_end.set()
            return super()._final_ref(provisional_digest)

    def samples(preparer: ImagePreparer) -> Iterable[Sample]:
        nonlocal read_count
        for read_count in range(4 * MAX_WAITING_IMAGES):
            image = preparer.submit("", str(read_count).encode())
            yield Sample(read_count, "", (Message("user", IMAGE_MARK, images=(image,)),), "1")

    monkeypatch.setattr(images_module, "_prepare", prepare)
    with tempfile.TemporaryFile() as file, WatchedPreparer(file, lambda: LAYOUT) as preparer:
        rows = [sample.row for sample in preparer.with_final_images(samples(preparer))]
    assert read_counts_at_waits[0] == MAX_WAITING_IMAGES
    assert rows == list(range(4 * MAX_WAITING_IMAGES))


def test_a_file_of_images_is_read_by_digest(tmp_path: Path) -> None:
    split = Split(write_parquet(tmp_path / "a.parquet", [marked([RED]), marked([BLUE])]))
    assert split.images is not None
    split.images.save(path := tmp_path / "train.images")
    images = StoredImages.open(path)
    assert (images.file_of(image_digest(RED)), images.file_of("0" * 29), len(images)) == (RED, None, 2)

    whole_file = path.read_bytes()
    damages: list[Callable[[], bytes]] = [lambda: b"", lambda: whole_file[:-9], lambda: whole_file[9:]]
    for damage in damages:
        path.write_bytes(damage())
        with pytest.raises(ConfigError, match=r"train\.images: not readable"):
            StoredImages.open(path)


def test_readable_content() -> None:
    image = ImageRef("0" * 29, 480, 640)
    message = Message("user", f"a {IMAGE_MARK} b{IMAGE_MARK}", images=(image, image))
    assert readable_content(message) == "a [image 640x480] b[image 640x480]"
    assert readable_content(ToolReply(ToolCall("f", "{}"), IMAGE_MARK, images=(image,))) == "[image 640x480]"
    assert readable_content(Message("user", f"a {IMAGE_MARK}")) == f"a {IMAGE_MARK}"


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_what_generate_writes_is_read_again(tmp_path: Path, suffix: str) -> None:
    rows = [marked([RED]), {"prompt": "a <image> tag", "images": None}, marked([BLUE])]
    split = Split(write_parquet(tmp_path / "a.parquet", rows))
    written = tmp_path / f"b.{suffix}"
    write_rows(written, [prompt_columns(sample, split.images) for sample in split.samples])
    written_split = Split(written)
    assert [sample.prompt for sample in written_split.samples] == [sample.prompt for sample in split.samples]
    assert written_split.files(written_split.samples[2].prompt[0]) == [BLUE]
    assert list(prompt_columns(split.samples[1], None)) == ["prompt"]


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_a_conversation_that_generate_writes_is_a_demonstration(tmp_path: Path, suffix: str) -> None:
    """Images of the prompt and of a tool's reply come back, and `<image>` that stands for none stays text."""
    prompts = Split(
        write_parquet(tmp_path / "prompts.parquet", [marked([RED, BLUE]) | {"prompt": 2 * "<image>?"}])
    )
    (question,) = prompts.samples[0].prompt
    zoom = ToolCall("zoom", '{"corner": 1}', "call-0")
    seen = Message(
        "tool", f"{IMAGE_MARK} enlarged", tool_call_id="call-0", name="zoom", images=question.images[1:]
    )
    conversation = (
        question,
        Message("assistant", "", (zoom,), reasoning="too small"),
        seen,
        Message("assistant", "an <image> tag"),
    )
    assert prompts.images is not None
    run_images = RunImages([prompts.images], mock.Mock(spec=RunReader))
    written = tmp_path / f"demonstrations.{suffix}"
    write_rows(written, [{"messages": conversation_json(conversation, run_images)}])
    demonstrations = Split(written, RowLayout(demonstrations=True))
    messages = demonstrations.samples[0].prompt
    assert messages == conversation
    assert [demonstrations.files(message) for message in messages] == [[RED, BLUE], [], [BLUE], []]


def test_a_conversation_whose_image_is_lost_is_not_written() -> None:
    reader = mock.Mock(spec=RunReader)
    reader.image_file.return_value = None
    message = Message("tool", IMAGE_MARK, images=(ImageRef("0" * 29, 32, 32),))
    with pytest.raises(StoreError, match="set a larger store"):
        conversation_json([message], RunImages([], reader))


@pytest.mark.full
def test_two_thousand_images(tmp_path: Path) -> None:
    rng = random.Random(0)
    rows = [
        marked([image_file(rng.randint(70, 200), rng.randint(70, 200), f"#{index:06x}")])
        for index in range(2000)
    ]
    split = Split(write_parquet(tmp_path / "a.parquet", rows))
    assert split.images is not None and len(split.images) == 2000
    for sample, row in zip(split.samples, rows, strict=True):
        assert split.files(sample.prompt[0]) == [prepare_image(row["images"][0], LAYOUT).file]
