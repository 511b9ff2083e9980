"""Content of tools and environments: texts and images, for models that read images and for others."""

from __future__ import annotations

import base64
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import PIL.Image
import pytest

from asyncrl.types import IMAGE_MARK
from asyncrl.vision import content as contents
from asyncrl.vision.content import BASE64_STEP, ImageFile, has_image_parts, read_content
from asyncrl.vision.files import ImageError, StoredImage, image_digest, prepare_decoded
from asyncrl.vision.layout import ImageLayout
from tests.fakes.chat import IMAGE_LAYOUT
from tests.fakes.image_data import encode_image

RED = PIL.Image.new("RGB", (64, 48), "red")
BLUE = PIL.Image.new("RGB", (32, 32), "blue")


def sizes(images: tuple[StoredImage, ...]) -> list[tuple[int, int]]:
    return [(image.ref.width, image.ref.height) for image in images]


@pytest.mark.parametrize(
    ("value", "text", "image_sizes"),
    [
        ("plain", "plain", []),
        (RED, IMAGE_MARK, [(64, 48)]),
        (ImageFile(encode_image(BLUE)), IMAGE_MARK, [(32, 32)]),
        (("a ", RED, " b ", BLUE), f"a {IMAGE_MARK} b {IMAGE_MARK}", [(64, 48), (32, 32)]),
        ([f"a{IMAGE_MARK}b", RED], f"ab{IMAGE_MARK}", [(64, 48)]),  # a mark in the text is no image
    ],
)
def test_texts_and_images_follow_each_other(
    value: Any, text: str, image_sizes: list[tuple[int, int]]
) -> None:
    content = read_content(value, IMAGE_LAYOUT)
    assert (content.text, sizes(content.images)) == (text, image_sizes)


def test_a_model_of_text_reads_a_note() -> None:
    content = read_content(["a ", RED, ImageFile(b"damaged")], layout=None)
    assert (content.text, content.images) == ("a [image][image]", ())


def test_long_base64_is_decoded_in_steps() -> None:
    file = random.Random(0).randbytes(BASE64_STEP)
    encoded_file = base64.b64encode(file).decode()
    assert len(encoded_file) > BASE64_STEP
    assert ImageFile(encoded_file).read_bytes() == file
    with pytest.raises(ImageError, match="not valid base64"):
        ImageFile(f"{encoded_file[:-8]}!{encoded_file[-7:]}").read_bytes()


def test_a_file_that_fits_is_kept_as_it_is_also_from_base64() -> None:
    file = encode_image(RED)
    encoded_file = base64.b64encode(file).decode()
    for image_file in (ImageFile(file), ImageFile(encoded_file)):
        (image,) = read_content(image_file, IMAGE_LAYOUT).images
        assert image.file == file
        assert image.ref.digest == image_digest(file)


def test_only_images_count_as_images() -> None:
    values = (RED, ImageFile(b""), [RED], ("a", RED), "a", ["a"], b"\x89PNG", {"image": RED}, None)
    assert [has_image_parts(value) for value in values] == [True] * 4 + [False] * 5


@pytest.mark.parametrize(
    ("value", "error", "complaint"),
    [
        (ImageFile(encode_image(RED)[:60]), ImageError, "damaged"),
        (ImageFile("no base64!"), ImageError, "not valid base64"),
        ([RED] * 17, ImageError, "at most 16 images"),
        ([RED, 7], TypeError, "content must be text, images, or a list of both, not int"),
        (RED.convert("F"), ImageError, "more than 8 bits"),
    ],
)
def test_a_bad_image_is_an_error(value: Any, error: type[Exception], complaint: str) -> None:
    with pytest.raises(error, match=complaint):
        read_content(value, IMAGE_LAYOUT)


def test_the_bytes_of_a_reply_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "MAX_CONTENT_BYTES", 2 * len(encode_image(RED)))
    assert len(read_content([RED, RED], IMAGE_LAYOUT).images) == 2
    with pytest.raises(ImageError, match="return fewer or smaller images"):
        read_content([RED, RED, RED], IMAGE_LAYOUT)


def test_base64_is_bounded_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "MAX_FILE_BYTES", 300)
    assert len(ImageFile("A" * 400).read_bytes()) == 300
    with pytest.raises(ImageError, match="more than 300 bytes"):
        ImageFile("A" * 408).read_bytes()


def test_few_images_are_decoded_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    decoding_images = threading.Semaphore(0)
    may_end = threading.Event()

    def decode(image: Any, layout: ImageLayout) -> StoredImage:
        decoding_images.release()
        assert may_end.wait(60)
        return prepare_decoded(image, layout)

    monkeypatch.setattr(contents, "prepare_decoded", decode)
    with ThreadPoolExecutor(contents.MAX_DECODERS) as threads:
        first_images = [threads.submit(read_content, RED, IMAGE_LAYOUT) for _ in range(contents.MAX_DECODERS)]
        try:
            for _ in first_images:
                assert decoding_images.acquire(timeout=60)
            monkeypatch.setattr(contents, "DECODER_SECONDS", 0.0)
            with pytest.raises(ImageError, match="the image waited for other images for more than 0 s"):
                read_content(ImageFile(encode_image(RED)), IMAGE_LAYOUT)
        finally:
            may_end.set()
        assert all(image.result(60).text == IMAGE_MARK for image in first_images)

    for _ in range(contents.MAX_DECODERS + 1):  # a damaged image makes room for the next as well
        with pytest.raises(ImageError, match="not an image file"):
            read_content(ImageFile(b"damaged"), IMAGE_LAYOUT)
