"""Episodes with images of tools, environments and agents: prompts, files of requests, records, replays."""

from __future__ import annotations

import base64
import io
import re
from typing import Any

import msgspec
import PIL.Image
import pytest

from asyncrl.buffer.records import LOSSES, RESUMABLE, EpisodeRecord
from asyncrl.environments import image_observation
from asyncrl.gateway import Endpoint
from asyncrl.rollout import images
from asyncrl.tools import tool
from asyncrl.types import FailReason, Message, Observation, Sample, TurnReply
from asyncrl.vision.content import ImageFile
from asyncrl.vision.files import StoredImage, image_digest, prepare_decoded
from asyncrl.vision.image_ids import find_runs
from asyncrl.wire.messages.worker import Generated, Replied
from tests.fakes.agents import AgentBench, message
from tests.fakes.chat import IMAGE_LAYOUT, FakeChat, call
from tests.fakes.episodes import TurnBench
from tests.unit.rollout.test_images import Coordinator
from tests.unit.rollout.test_turn_player import Game, nothing

RED = PIL.Image.new("RGB", (64, 48), "red")
BLUE = PIL.Image.new("RGB", (32, 32), "blue")
STORED: list[StoredImage] = [prepare_decoded(image, IMAGE_LAYOUT) for image in (RED, BLUE)]
RED_DIGEST, BLUE_DIGEST = (image.ref.digest for image in STORED)


def chat() -> FakeChat:
    return FakeChat(image_layout=IMAGE_LAYOUT)


def posted_images(bench: Any) -> list[tuple[type, list[str]]]:
    """Return the digests of the files of each posted turn and reply."""
    return [
        (type(record), [image_digest(file) for file in frames[1:]])
        for record, frames in zip(bench.sent, bench.frames, strict=True)
        if isinstance(record, Generated | Replied)
    ]


class Gallery(Game):
    """Shows a red picture at the start, and a blue one after each turn."""

    async def reset(self, sample: Sample) -> Observation:
        return image_observation("first", RED)

    async def step(self, message: Message) -> Observation:
        done = message.content == "42"
        return image_observation(BLUE, "next", reward=0.25, done=done)


def test_the_model_reads_images_of_an_environment() -> None:
    bench = TurnBench(["7", "8", "42"], nothing, Gallery, chat=chat())
    bench.finished()

    first, second, third = bench.engine.requests
    assert [run.digest for run in find_runs(first.ids)] == [RED_DIGEST]
    assert dict(first.images) == {RED_DIGEST: STORED[0].file}
    assert [run.digest for run in find_runs(third.ids)] == [RED_DIGEST, BLUE_DIGEST, BLUE_DIGEST]
    assert third.images.keys() == second.images.keys() == {RED_DIGEST, BLUE_DIGEST}

    # Each file travels once: with the prompt, or with the first reply that has the image.
    assert posted_images(bench)[:5] == [
        (Generated, [RED_DIGEST]),
        (Replied, [BLUE_DIGEST]),
        (Generated, []),
        (Replied, []),
        (Generated, []),
    ]
    reply = msgspec.msgpack.decode(bench.frames[1][0], type=TurnReply)
    assert reply.observation is not None
    assert reply.observation.messages[0].images == (STORED[1].ref,)


def test_a_recorded_environment_with_images_is_repeated() -> None:
    uninterrupted = TurnBench(["7", "8", "42"], nothing, Gallery, chat=chat())
    uninterrupted.play()
    resumed = TurnBench(["42"], nothing, Gallery, chat=chat())
    end = resumed.finished(uninterrupted.record[:4])
    assert end.result.turn_rewards == (0.25, 0.25, 0.25)
    assert posted_images(resumed) == [(Generated, []), (Replied, [])]
    assert resumed.engine.requests[0].images.keys() == {RED_DIGEST, BLUE_DIGEST}


def test_another_image_when_replayed_starts_the_episode_again() -> None:
    uninterrupted = TurnBench(["7", "8", "42"], nothing, Gallery, chat=chat())
    uninterrupted.play()

    class OtherGallery(Gallery):
        async def step(self, message: Message) -> Observation:
            return image_observation(RED.resize((32, 32)), "next", reward=0.25)

    resumed = TurnBench(["42"], nothing, OtherGallery, chat=chat())
    assert resumed.failed(uninterrupted.record[:4]).reason is FailReason.NOT_REPEATED


def test_a_model_of_text_reads_a_note_of_an_environment() -> None:
    bench = TurnBench(["7", "42"], nothing, Gallery)
    bench.finished()
    assert bench.rows[0].endswith("qfirst[image]7[image]next42")
    assert all(not request.images for request in bench.engine.requests)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ([ImageFile(b"damaged")], "step failed: .*not an image file"),
        ([RED, 7], "step failed: .*not int"),
        (PIL.Image.new("I;16", (64, 48)), "more than 8 bits"),
    ],
)
def test_a_bad_image_of_an_environment_fails_its_episode_only(content: Any, complaint: str) -> None:
    class Bad(Game):
        async def step(self, message: Message) -> Observation:
            return Observation((Message("user", content),))

    failed = TurnBench(["7"], nothing, Bad, chat=chat()).failed()
    assert failed.reason is FailReason.ENVIRONMENT_ERROR
    assert re.search(complaint, failed.detail), failed.detail


def test_the_model_reads_images_of_a_tool() -> None:
    colours = {"red": RED, "blue": BLUE}

    @tool(name="look")
    def look(colour: str) -> PIL.Image.Image:
        """Look."""
        return colours[colour]

    turns = [call("look", f'{{"colour": "{colour}"}}') for colour in ("red", "green", "blue", "red")]
    bench = TurnBench([*turns, "42"], nothing, chat=chat())
    bench.tools = {"look": look}
    end = bench.finished()
    assert end.stats.failed == 1  # there is no green picture
    assert posted_images(bench)[1::2] == [
        (Replied, [RED_DIGEST]),
        (Replied, []),
        (Replied, [BLUE_DIGEST]),
        (Replied, []),
    ]
    digests = [run.digest for run in find_runs(bench.engine.requests[-1].ids)]
    assert digests == [RED_DIGEST, BLUE_DIGEST, RED_DIGEST]
    assert dict(bench.engine.requests[-1].images) == {image.ref.digest: image.file for image in STORED}


class Camera:
    """Shows a red picture at the start, and a blue one for each call."""

    def reset(self) -> list[Any]:
        return [" Look:", RED]

    def look(self) -> PIL.Image.Image:
        """Look."""
        return BLUE


def camera_bench(turns: list[str], **options: Any) -> TurnBench:
    bench = TurnBench(turns, nothing, **options)
    bench.tools = {member.name: member for member in tool(Camera)}
    return bench


def test_reset_of_a_class_adds_an_image_to_the_prompt() -> None:
    bench = camera_bench([call("look"), "42"], chat=chat())
    bench.finished()
    assert [run.digest for run in find_runs(bench.engine.requests[1].ids)] == [RED_DIGEST, BLUE_DIGEST]
    assert posted_images(bench) == [
        (Generated, [RED_DIGEST]),
        (Replied, [BLUE_DIGEST]),
        (Generated, []),
    ]
    assert "q Look:" in bench.rows[0]

    resumed = camera_bench(["42"], chat=chat())
    resumed.finished(bench.record[:2])
    assert resumed.engine.requests[0].ids == bench.engine.requests[1].ids

    beside_environment = camera_bench(["42"], environment=Gallery, chat=chat())
    beside_environment.finished()
    (request,) = beside_environment.engine.requests
    assert [run.digest for run in find_runs(request.ids)] == [RED_DIGEST, RED_DIGEST]
    assert "q Look:first" in beside_environment.rows[0]

    text_bench = camera_bench(["42"])
    text_bench.finished()
    assert text_bench.rows[0].endswith("q Look:[image]42")


def picture_part(image: PIL.Image.Image) -> dict[str, Any]:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


async def picture_agent(sample: Sample, endpoint: Endpoint) -> float:
    """Show a picture, then a second picture behind the same history."""
    first_user = {"role": "user", "content": [{"type": "text", "text": "see"}, picture_part(RED)]}
    second_user = {"role": "user", "content": [picture_part(BLUE)]}
    first = await message(endpoint, first_user)
    await message(endpoint, first_user, first, second_user)
    return 1.0


def test_the_history_of_an_agent_with_images_is_one_row() -> None:
    bench = AgentBench(picture_agent, chat=chat())
    end = bench.finished()
    assert (end.stats.turns, end.stats.rows) == (2, 1)
    first, second = bench.engine.requests
    assert [run.digest for run in find_runs(first.ids)] == [RED_DIGEST]
    assert [run.digest for run in find_runs(second.ids)] == [RED_DIGEST, BLUE_DIGEST]
    assert second.images.keys() == {RED_DIGEST, BLUE_DIGEST}
    assert posted_images(bench) == [(Generated, [RED_DIGEST]), (Generated, [BLUE_DIGEST])]


def test_an_agent_with_images_goes_on_after_a_crash() -> None:
    uninterrupted = AgentBench(picture_agent, chat=chat())
    uninterrupted.play()
    resumed = AgentBench(picture_agent, chat=chat())
    end = resumed.finished(uninterrupted.record[:2])
    assert (end.stats.turns, end.stats.rows) == (2, 1)
    assert posted_images(resumed) == [(Generated, [BLUE_DIGEST])]


def test_an_episode_whose_image_is_lost_starts_again_within_its_retries() -> None:
    """A worker that resumes an episode asks for the image of a recorded reply."""

    @tool(name="look")
    def look() -> PIL.Image.Image:
        """Look."""
        return RED

    uninterrupted = TurnBench([call("look"), "42"], nothing, chat=chat())
    uninterrupted.tools = {"look": look}
    uninterrupted.finished()

    coordinator = Coordinator()  # has no file of the image
    resumed = TurnBench(["42"], nothing, chat=chat())
    resumed.tools = {"look": look}
    resumed.context.images = coordinator.worker
    failure = resumed.failed(uninterrupted.record[:2])
    assert coordinator.requests == [(RED_DIGEST,)]
    assert resumed.engine.requests == []
    assert failure.reason is FailReason.IMAGE_LOST
    assert f"image {RED_DIGEST} is no longer stored" in failure.detail

    assert failure.reason not in RESUMABLE and failure.reason not in LOSSES
    episode = EpisodeRecord("u", 0, 0)
    assert [episode.prepare_retry(failure.reason, retries=2) for _ in range(3)] == [True, True, False]


def test_images_that_a_record_cannot_hold_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_UNPOSTED_BYTES", len(STORED[0].file) + len(STORED[1].file) - 1)

    @tool(name="look")
    def look(colours: str) -> list[PIL.Image.Image]:
        """Look."""
        return [{"red": RED, "blue": BLUE}[colour] for colour in colours.split()]

    turns = [call("look", f'{{"colours": "{colours}"}}') for colours in ("red blue", "blue")]
    bench = TurnBench([*turns, "42"], nothing, chat=chat())
    bench.tools = {"look": look}
    end = bench.finished()
    assert end.stats.failed == 1
    assert [digests for kind, digests in posted_images(bench) if kind is Replied] == [[], [BLUE_DIGEST]]
    refused = msgspec.msgpack.decode(bench.frames[1][0], type=TurnReply).replies[0]
    assert "use fewer or smaller images" in refused.content
