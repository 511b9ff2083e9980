"""Tools that return images: functions, objects and processes; what the model reads, and what fails."""

from __future__ import annotations

import asyncio
import importlib.util
import threading
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
from msgspec.structs import replace

from asyncrl import ImageFile
from asyncrl.errors import ProtocolError
from asyncrl.tools import Rewarded, Tool, Toolbox, load_tool, tool
from asyncrl.tools.base import MAX_REPLY_BYTES, read_answer
from asyncrl.tools.snapshots import hash_history
from asyncrl.types import IMAGE_MARK, Generation, ImageRef, Sample, StopReason, ToolCall, ToolReply, Turn
from asyncrl.vision import files
from asyncrl.vision.files import StoredImage
from asyncrl.vision.layout import ImageLayout
from tests.fakes.chat import IMAGE_LAYOUT

EXAMPLE = Path(__file__).parents[3] / "examples/multiturn/images/pictures.py"
PAINT = load_tool(f"{Path(__file__).with_name('process_tools.py')}:paint")
RED = PIL.Image.new("RGB", (64, 48), "red")


def call(name: str, arguments: str = "{}") -> ToolCall:
    return ToolCall(name, arguments)


def play(
    tools: list[Tool], *calls: ToolCall, layout: ImageLayout | None = IMAGE_LAYOUT, seed: int = 0
) -> tuple[list[ToolReply], dict[str, StoredImage]]:
    """Return the replies to calls, one after another, and the images that the episode got, by digest."""
    episode_images: dict[str, StoredImage] = {}

    def add_image(image: StoredImage) -> ImageRef:
        episode_images[image.ref.digest] = image
        return image.ref

    async def main() -> list[ToolReply]:
        toolbox = Toolbox({tool.name: tool for tool in tools}, 20.0, layout)
        sample = Sample(0, "", (), "null", extra_info_json=f'{{"seed": {seed}}}')
        session = toolbox.session(sample, add_image=add_image)
        try:
            await session.open()
            return [await session.call(tool_call) for tool_call in calls]
        finally:
            await session.close()
            await toolbox.close()

    return asyncio.run(main()), episode_images


def returning(value: Any, **options: Any) -> Tool:
    @tool(name="show", **options)
    def show() -> Any:
        """Show."""
        return value

    return show


@pytest.mark.parametrize("blocking", [False, True])
def test_a_reply_has_marks_and_images(blocking: bool) -> None:
    value = Rewarded(["left: ", RED, " right: ", RED.resize((32, 32))], reward=0.5)
    (reply,), episode_images = play([returning(value, blocking=blocking)], call("show"))
    assert (reply.content, reply.reward, reply.error) == (
        f"left: {IMAGE_MARK} right: {IMAGE_MARK}",
        0.5,
        None,
    )
    assert [(image.width, image.height) for image in reply.images] == [(64, 48), (32, 32)]
    assert [image.digest for image in reply.images] == list(episode_images)


def test_a_model_of_text_reads_a_note() -> None:
    (reply,), episode_images = play([returning(["map: ", RED])], call("show"), layout=None)
    assert (reply.content, reply.images, episode_images) == ("map: [image]", (), {})


def test_images_are_prepared_outside_of_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    prepare = files._prepare_decoded

    def noting(*arguments: Any, **keywords: Any) -> StoredImage:
        threads.append(threading.current_thread())
        return prepare(*arguments, **keywords)

    monkeypatch.setattr(files, "_prepare_decoded", noting)
    play([returning(RED)], call("show"))
    assert len(threads) == 1 and threads[0] is not threading.main_thread()


def test_the_example_zooms_into_a_picture() -> None:
    spec = importlib.util.spec_from_file_location("pictures", EXAMPLE)
    assert spec is not None and spec.loader is not None
    pictures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pictures)

    corners = [call("zoom", f'{{"corner": "{corner}"}}') for corner in pictures.CORNERS]
    replies, episode_images = play([*tool(pictures.Magnifier)], *corners, seed=3)
    for corner, reply in enumerate(replies):
        assert (reply.content, reply.error) == (IMAGE_MARK, None)
        drawn = pictures.Picture(3).zoomed(corner)
        (image,) = reply.images
        assert (image.height, image.width) == drawn.size[::-1]
    assert len(episode_images) == len({reply.images for reply in replies})


def test_a_process_returns_images_as_files() -> None:
    calls = [call("paint", f'{{"colour": "{colour}"}}') for colour in ("red", "red", "black")]
    replies, episode_images = play([PAINT], *calls)  # a black picture is a damaged file
    assert [reply.content for reply in replies[:2]] == [f"red:{IMAGE_MARK}"] * 2
    assert replies[0].images == replies[1].images
    (image,) = episode_images.values()
    assert image.file.startswith(b"\x89PNG") and image.ref == replies[0].images[0]

    assert replies[2].content.startswith("error: ") and "not an image file" in replies[2].content
    assert replies[2].failed


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (ImageFile(b"\x89PNG\r\n\x1a\n damaged"), "damaged|not an image file"),
        (PIL.Image.new("1", (20_000, 1)), "20000 x 1 pixels"),
        ([RED] * 17, "at most 16 images"),
        ([RED, {"a": 1}], "not dict"),
    ],
)
def test_a_bad_image_is_a_failed_call_that_the_model_reads(value: Any, complaint: str) -> None:
    (reply,), episode_images = play([returning(value)], call("show"))
    assert reply.failed and reply.content.startswith("error: ")
    assert any(part in reply.content for part in complaint.split("|")), reply.content
    assert not episode_images


def test_a_long_text_is_cut_beside_its_images() -> None:
    answer = read_answer(["a" * MAX_REPLY_BYTES, RED, "b" * MAX_REPLY_BYTES], IMAGE_LAYOUT)
    assert answer.content.endswith("b" + IMAGE_MARK)
    assert answer.content.count(IMAGE_MARK) == len(answer.images) == 1
    assert len(answer.content) < 1.1 * MAX_REPLY_BYTES


def test_a_repeated_call_must_return_the_same_image() -> None:
    colours = ["red", "red", "blue"]

    @tool(name="show", replay="reapply")
    def show() -> Any:
        """Show."""
        return PIL.Image.new("RGB", (64, 48), colours.pop(0))

    async def main() -> None:
        session = Toolbox({"show": show}, 20.0, IMAGE_LAYOUT).session(Sample(0, "", (), "null"))
        await session.open()
        reply = await session.call(call("show"))
        await session.redo([reply])
        with pytest.raises(ProtocolError, match="different reply"):
            await session.redo([reply])

    asyncio.run(main())


def test_histories_with_different_images_have_different_names() -> None:
    def history(digest: str) -> str:
        reply = ToolReply(call("show"), IMAGE_MARK, images=(ImageRef(digest, 32, 32),))
        return hash_history("", replace(turn, replies=(reply,)))

    turn = Turn(0, (), Generation((), (), (), StopReason.STOP))
    assert history("0" * 29) == history("0" * 29) != history("1" * 29)
