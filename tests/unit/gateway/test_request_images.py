"""Images in requests of agents: read in every dialect, once per episode, within bounds."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, nullcontext
from typing import Any

import msgspec
import pytest

from asyncrl.gateway import Gateway, completions, images, messages, responses, server
from asyncrl.gateway import exchange as exchanges
from asyncrl.gateway.exchange import ApiDialect, Exchange, openai_error
from asyncrl.gateway.images import TEXT_ONLY, RequestImages
from asyncrl.types import IMAGE_MARK, ImageRef, Message
from asyncrl.vision import content
from asyncrl.vision.content import IMAGE_NOTE, ImageFile, ImageTimeoutError
from asyncrl.vision.files import ImageError, StoredImage, prepare_image
from asyncrl.vision.layout import ImageLayout
from tests.fakes.chat import IMAGE_LAYOUT
from tests.fakes.hosts import FakeHost, fetch, served
from tests.fakes.image_data import image_file


def base64_png(colour: str, size: tuple[int, int] = (64, 48)) -> str:
    return base64.b64encode(image_file(*size, colour)).decode()


RED = base64_png("red")
BLUE = base64_png("blue")
Read = Callable[[bytes, RequestImages], Exchange]


def ref(encoded_file: str) -> ImageRef:
    return prepare_image(base64.b64decode(encoded_file), IMAGE_LAYOUT).ref


def chat_body(*encoded_files: str) -> dict[str, Any]:
    """Return a request with the images in a user's message, then a call and its reply with the images."""
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded_file}"}}
        for encoded_file in encoded_files
    ]
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    return {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "see"}, *parts]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "seen"}, *parts]},
        ]
    }


def responses_body(*encoded_files: str) -> dict[str, Any]:
    parts = [
        {"type": "input_image", "image_url": f"data:image/png;base64,{encoded_file}", "detail": "auto"}
        for encoded_file in encoded_files
    ]
    return {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "see"}, *parts]},
            {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
            {
                "type": "function_call_output",
                "call_id": "c",
                "output": [{"type": "input_text", "text": "seen"}, *parts],
            },
        ]
    }


def messages_body(*encoded_files: str) -> dict[str, Any]:
    blocks = [
        {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": encoded_file},
        }
        for encoded_file in encoded_files
    ]
    result = {
        "type": "tool_result",
        "tool_use_id": "c",
        "content": [{"type": "text", "text": "seen"}, *blocks],
    }
    return {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "see"}, *blocks]},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}],
            },
            {"role": "user", "content": [result]},
        ]
    }


BODIES: dict[str, tuple[Read, Callable[..., dict[str, Any]], str]] = {
    "chat": (completions.read, chat_body, ""),
    "responses": (responses.read, responses_body, ""),
    "messages": (messages.read, messages_body, "\n"),
}
every_dialect = pytest.mark.parametrize(("read", "body", "separator"), BODIES.values(), ids=BODIES)


def read_messages(read: Read, body: dict[str, Any], request_images: RequestImages) -> list[Message]:
    return list(read(json.dumps(body).encode(), request_images).agent_request.messages)


@every_dialect
def test_images_of_users_and_tools_are_read(
    read: Read, body: Callable[..., dict[str, Any]], separator: str
) -> None:
    user, _, tool = read_messages(read, body(RED, BLUE), RequestImages(IMAGE_LAYOUT))
    for message, text in ((user, "see"), (tool, "seen")):
        assert message.content == separator.join((text, IMAGE_MARK, IMAGE_MARK))
        assert message.images == (ref(RED), ref(BLUE))


@every_dialect
def test_a_model_of_text_reads_a_note(
    read: Read, body: Callable[..., dict[str, Any]], separator: str
) -> None:
    user, _, tool = read_messages(read, body("not even base64"), TEXT_ONLY)
    assert (user.content, user.images) == (f"see{separator}{IMAGE_NOTE}", ())
    assert (tool.content, tool.images) == (f"seen{separator}{IMAGE_NOTE}", ())


@every_dialect
def test_an_image_is_prepared_once_per_episode(
    read: Read, body: Callable[..., dict[str, Any]], separator: str
) -> None:
    added: list[StoredImage] = []

    def add_image(image: StoredImage) -> ImageRef:
        added.append(image)
        return image.ref

    request_images = RequestImages(IMAGE_LAYOUT, add_image)
    first = read_messages(read, body(RED), request_images)
    second = read_messages(read, body(RED), request_images)
    read_messages(read, body(RED, BLUE), request_images)
    assert first == second
    assert [image.ref for image in added] == [ref(RED), ref(BLUE)]


@every_dialect
def test_a_mark_in_a_text_is_no_image(
    read: Read, body: Callable[..., dict[str, Any]], separator: str
) -> None:
    text = json.dumps(body(RED)).replace("seen", f"se{IMAGE_MARK}en").replace("see", f"s{IMAGE_MARK}ee")
    for message in read(text.encode(), RequestImages(IMAGE_LAYOUT)).agent_request.messages:
        assert message.content.count(IMAGE_MARK) == len(message.images)


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("https://example.org/cat.png", "images are not downloaded"),
        ("file:///etc/passwd", "images are not downloaded"),
        ("data:image/png,raw", "images are not downloaded"),
        (None, "images are not downloaded"),
        ("data:image/png;base64,!!!", "not valid base64"),
        ("data:image/png;base64,AAAA", "not an image file"),
        (f"data:image/png;base64,{RED[:80]}", "damaged"),
        (f"data:image/png;base64,{base64_png('red', (16_400, 1))}", "16400 x 1 pixels"),
    ],
)
def test_a_bad_image_is_refused(url: Any, complaint: str) -> None:
    bodies = (
        (
            completions.read,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": url}]}]},
        ),
        (
            responses.read,
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]},
        ),
        (
            messages.read,
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": url}}]}
                ]
            },
        ),
    )
    for read, body in bodies:
        with pytest.raises(ImageError, match=complaint):
            read_messages(read, body, RequestImages(IMAGE_LAYOUT))


def test_images_in_documents_and_other_documents() -> None:
    image_block = {"type": "image", "source": {"type": "base64", "data": RED}}
    sources = [
        {"type": "content", "content": [{"type": "text", "text": "a"}, image_block]},
        {"type": "base64", "media_type": "application/pdf", "data": "JVBE"},
    ]
    blocks = [{"type": "document", "source": source} for source in sources]
    body = {"messages": [{"role": "user", "content": blocks}]}
    (message,) = read_messages(messages.read, body, RequestImages(IMAGE_LAYOUT))
    assert message.content == f"a\n{IMAGE_MARK}\n{messages.DOCUMENT_NOTE}"
    assert message.images == (ref(RED),)


def view_image_body(encoded_file: str) -> dict[str, Any]:
    """Return a request of Codex after its tool view_image: the output of the call is a list."""
    url = f"data:image/png;base64,{encoded_file}"
    return {
        "model": "policy",
        "instructions": "You are a coding agent.",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "see"}]},
            {
                "type": "function_call",
                "name": "view_image",
                "arguments": '{"path":"red.png"}',
                "call_id": "call_0-t0",
            },
            {
                "type": "function_call_output",
                "call_id": "call_0-t0",
                "output": [{"type": "input_image", "image_url": url}],
            },
        ],
        "stream": True,
        "store": False,
    }


def attached_image_body(encoded_file: str) -> dict[str, Any]:
    """Return a request of an older Codex after view_image: a message of the user brings the image."""
    body = view_image_body(encoded_file)
    image_content = body["input"][-1]["output"]
    body["input"][-1]["output"] = "attached local image path"
    body["input"].append({"type": "message", "role": "user", "content": image_content})
    return body


def read_tool_body(encoded_file: str) -> dict[str, Any]:
    """Return a request of Claude Code after its tool Read of a PNG file."""
    source = {"type": "base64", "data": encoded_file, "media_type": "image/png"}
    call_block = {"type": "tool_use", "id": "call_0-t0", "name": "Read", "input": {"file_path": "/red.png"}}
    result_block = {
        "tool_use_id": "call_0-t0",
        "type": "tool_result",
        "content": [{"type": "image", "source": source}],
        "cache_control": {"type": "ephemeral"},
    }
    return {
        "model": "policy",
        "max_tokens": 32000,
        "system": [{"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "see"}]},
            {"role": "assistant", "content": [call_block]},
            {"role": "user", "content": [result_block]},
        ],
    }


@pytest.mark.parametrize(
    ("read", "body", "reply_texts"),
    [
        (responses.read, view_image_body, [("tool", IMAGE_MARK)]),
        (
            responses.read,
            attached_image_body,
            [("tool", "attached local image path"), ("user", IMAGE_MARK)],
        ),
        (messages.read, read_tool_body, [("tool", IMAGE_MARK)]),
    ],
)
def test_images_that_tools_of_coding_agents_show_are_read(
    read: Read, body: Callable[[str], dict[str, Any]], reply_texts: list[tuple[str, str]]
) -> None:
    conversation = read_messages(read, body(RED), RequestImages(IMAGE_LAYOUT))
    replies = conversation[3:]
    assert [(reply.role, reply.content) for reply in replies] == reply_texts
    assert replies[-1].images == (ref(RED),)
    assert replies[0].tool_call_id == conversation[2].tool_calls[0].id == "call_0"

    text_replies = read_messages(read, body(RED), TEXT_ONLY)[3:]
    assert (text_replies[-1].content, text_replies[-1].images) == (IMAGE_NOTE, ())


def test_a_refused_image_leaves_room_for_a_smaller_image(monkeypatch: pytest.MonkeyPatch) -> None:
    red_bytes = len(base64.b64decode(RED))
    monkeypatch.setattr(images, "MAX_EPISODE_BYTES", red_bytes)
    request_images = RequestImages(IMAGE_LAYOUT)
    large_file = base64_png("red", (128, 128))
    assert len(base64.b64decode(large_file)) > red_bytes
    with pytest.raises(ImageError, match="send fewer or smaller images"):
        request_images.read_base64(large_file)
    assert request_images.read_base64(RED).images == (ref(RED),)


@served
async def test_only_requests_with_images_are_read_in_a_thread(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def read(body: bytes, request_images: RequestImages) -> Exchange:
        threads.append(threading.current_thread())
        return completions.read(body, request_images)

    async def threads_of(*encoded_files: str) -> list[bool]:
        """Return whether each reading of a request was in the event loop's thread."""
        threads.clear()
        body = json.dumps(chat_body(*encoded_files)).encode()
        async with gateway.admit_episode(image_host()) as endpoint:
            exchange = await gateway._decode_exchange(
                ApiDialect(read, openai_error), body, gateway.running_episodes[endpoint.api_key]
            )
        assert exchange.agent_request.messages[0].images == tuple(map(ref, encoded_files))
        return [thread is threading.main_thread() for thread in threads]

    assert await threads_of() == [True]
    assert await threads_of(RED) == [True, False], "the image is decoded in a thread"
    monkeypatch.setattr(server, "MAX_READ_TWICE_BYTES", 100)
    assert await threads_of(RED) == [False], "a large request is not read twice"


@pytest.mark.parametrize(("bound", "value"), [("MAX_EPISODE_IMAGES", 1), ("MAX_EPISODE_BYTES", 100)])
def test_the_images_of_an_episode_are_bounded(
    monkeypatch: pytest.MonkeyPatch, bound: str, value: int
) -> None:
    monkeypatch.setattr(images, bound, value)
    with pytest.raises(ImageError, match=r"of an episode|an episode can have"):
        read_messages(completions.read, chat_body(RED, BLUE), RequestImages(IMAGE_LAYOUT))


def image_host() -> FakeHost:
    host = FakeHost()
    host.images = RequestImages(IMAGE_LAYOUT)
    return host


@served
async def test_a_large_request_is_decoded_only_in_a_thread(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop neither copies the body nor walks it. A second decoding finds the names of ignored fields, as
    long as these are logged."""
    monkeypatch.setattr(server, "MAX_READ_TWICE_BYTES", 100)
    decode = msgspec.json.decode
    check_parts = server._check_parts
    walks: list[tuple[str, str, type]] = []

    def note_walk(name: str, body: Any) -> None:
        if RED.encode() in body:
            walks.append((name, threading.current_thread().name, type(body)))

    def noting_decode(body: Any, **options: Any) -> Any:
        note_walk("decode", body)
        return decode(body, **options)

    def noting_check(body: Any) -> None:
        note_walk("check", body)
        check_parts(body)

    monkeypatch.setattr(msgspec.json, "decode", noting_decode)
    monkeypatch.setattr(server, "_check_parts", noting_check)
    async with gateway.admit_episode(image_host(), lambda: 0.0) as endpoint:
        status, _ = await fetch(endpoint, "/chat/completions", json=chat_body(RED) | {"seed": 1})
        assert status == 200
        monkeypatch.setattr(exchanges, "MAX_LOGGED_FIELDS", 1)
        status, _ = await fetch(endpoint, "/chat/completions", json=chat_body(RED) | {"seed": 1})
        assert status == 200

    walk_names = ["check", "decode", "decode", "check", "decode"]
    assert walks == [(name, "gateway-images_0", bytearray) for name in walk_names]


@every_dialect
def test_an_exchange_keeps_no_base64_during_the_turn(
    read: Read, body: Callable[..., dict[str, Any]], separator: str
) -> None:
    exchange = read(json.dumps(body(RED)).encode(), RequestImages(IMAGE_LAYOUT))
    assert RED not in repr(vars(exchange))


class BusyDecoders(threading.Semaphore):
    """Decoders that are busy with other images until the test releases them. `image_waits`: set when an image
    of a request waits for a decoder, and counted in `image_wait_count`."""

    def __init__(self) -> None:
        super().__init__(0)
        self.image_waits = threading.Event()
        self.image_wait_count = 0

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        self.image_waits.set()
        self.image_wait_count += 1
        return super().acquire(blocking, timeout)


@pytest.fixture
def busy_decoders(monkeypatch: pytest.MonkeyPatch) -> BusyDecoders:
    decoders = BusyDecoders()
    monkeypatch.setattr(content, "_free_decoders", decoders)
    return decoders


@served
async def test_slow_images_keep_no_other_work_of_threads_waiting(
    gateway: Gateway, busy_decoders: BusyDecoders
) -> None:
    """Requests to servers are encoded in the loop's default threads."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    async with gateway.admit_episode(image_host(), lambda: 0.0) as endpoint:
        request = asyncio.create_task(fetch(endpoint, "/chat/completions", json=chat_body(RED)))
        while not busy_decoders.image_waits.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0)

        try:
            async with asyncio.timeout(2):
                await asyncio.to_thread(json.dumps, {})
        finally:
            busy_decoders.release(content.MAX_DECODERS)
        assert (await request)[0] == 200


@served
async def test_episodes_that_wait_for_images_keep_no_other_waiting(
    gateway: Gateway, busy_decoders: BusyDecoders
) -> None:
    """A request without new images needs no decoder."""
    async with AsyncExitStack() as episodes, gateway.admit_episode(image_host(), lambda: 0.0) as other:
        waiting_endpoints = [
            await episodes.enter_async_context(gateway.admit_episode(image_host(), lambda: 0.0))
            for _ in range(20)
        ]
        busy_decoders.release()
        assert (await fetch(other, "/chat/completions", json=chat_body(RED)))[0] == 200
        assert busy_decoders.acquire()
        busy_decoders.image_wait_count = 0

        requests = [
            asyncio.create_task(fetch(endpoint, "/chat/completions", json=chat_body(RED)))
            for endpoint in waiting_endpoints
        ]
        while busy_decoders.image_wait_count < len(requests):  # noqa: ASYNC110
            await asyncio.sleep(0)

        try:
            async with asyncio.timeout(5):
                assert (await fetch(other, "/chat/completions", json=chat_body(RED)))[0] == 200
        finally:
            busy_decoders.release(len(requests))
        assert [status for status, _ in await asyncio.gather(*requests)] == [200] * len(requests)


@served
async def test_images_that_are_not_read_in_time_are_sent_again(
    gateway: Gateway, busy_decoders: BusyDecoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "PREPARE_SECONDS", 0.1)
    async with gateway.admit_episode(image_host(), lambda: 0.0) as endpoint:
        try:
            status, answer = await fetch(endpoint, "/chat/completions", json=chat_body(RED))
            assert (status, "not read within 0.1 s" in answer["error"]["message"]) == (408, True)
        finally:
            busy_decoders.release(content.MAX_DECODERS)
        monkeypatch.setattr(images, "PREPARE_SECONDS", 60.0)
        assert (await fetch(endpoint, "/chat/completions", json=chat_body(RED)))[0] == 200


def test_a_repeated_request_keeps_the_images_that_were_read_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared_files: list[bytes | str] = []

    def prepare(image: ImageFile, layout: ImageLayout, **_: Any) -> StoredImage:
        prepared_files.append(image.file)
        first_request.end_request()
        return prepare_image(image.read_bytes(), layout)

    monkeypatch.setattr(images, "prepare_in_turn", prepare)
    first_request = RequestImages(IMAGE_LAYOUT)
    with pytest.raises(ImageTimeoutError, match="not read within 60 s"):
        read_messages(completions.read, chat_body(RED, BLUE), first_request)
    read_messages(completions.read, chat_body(RED, BLUE), first_request.for_request(nullcontext))
    assert prepared_files == [RED, BLUE]


@served
async def test_an_ended_episode_prepares_no_further_images(
    gateway: Gateway, busy_decoders: BusyDecoders
) -> None:
    added_images: list[ImageRef] = []

    def add_image(image: StoredImage) -> ImageRef:
        added_images.append(image.ref)
        return image.ref

    host = FakeHost()
    host.images = RequestImages(IMAGE_LAYOUT, add_image)
    async with gateway.admit_episode(host, lambda: 0.0) as endpoint:
        request = asyncio.create_task(fetch(endpoint, "/chat/completions", json=chat_body(RED, BLUE)))
        while not busy_decoders.image_waits.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0)

    busy_decoders.release(content.MAX_DECODERS)
    await asyncio.gather(request, return_exceptions=True)
    await asyncio.to_thread(gateway._image_threads.shutdown)
    assert added_images == []


@served
async def test_a_lack_of_memory_is_no_fault_of_the_image(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lack_memory(*_: Any) -> StoredImage:
        raise MemoryError

    monkeypatch.setattr(content, "prepare_image", lack_memory)
    async with gateway.admit_episode(image_host(), lambda: 0.0) as endpoint:
        status, answer = await fetch(endpoint, "/chat/completions", json=chat_body(RED))
        assert status == 500
        assert "too little memory to decode an image of a request; free memory" in answer["error"]["message"]
        assert gateway.running_episodes[endpoint.api_key].unread_tries[0] == 1, "the client tries again"


@served
async def test_few_threads_decode_requests_at_once(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding holds Python's lock, and takes memory."""
    busy_threads = threading.Semaphore(server.MAX_THREADS_DECODING)

    def check(body: Any) -> None:
        assert busy_threads.acquire(blocking=False), "too many threads decode at once"
        time.sleep(0.1)
        busy_threads.release()

    monkeypatch.setattr(server, "MAX_READ_TWICE_BYTES", 100)
    monkeypatch.setattr(server, "_check_parts", check)
    async with AsyncExitStack() as episodes:
        endpoints = [
            await episodes.enter_async_context(gateway.admit_episode(image_host(), lambda: 0.0))
            for _ in range(6)
        ]
        answers = await asyncio.gather(
            *(fetch(endpoint, "/chat/completions", json=chat_body(RED)) for endpoint in endpoints)
        )
        assert [status for status, _ in answers] == [200] * 6


def spend(seconds: float) -> None:
    """Work for so many seconds of CPU time of this thread."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@served
async def test_decoding_in_a_thread_is_charged_but_for_new_images(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    charged_seconds: list[float] = []
    charge_episode = gateway._connections.loop_times.charge_episode

    def noting_charge(episode: object, seconds: float) -> None:
        charged_seconds.append(seconds)
        charge_episode(episode, seconds)

    def prepare(image: ImageFile, layout: ImageLayout, **_: Any) -> StoredImage:
        spend(1.0)
        return prepare_image(image.read_bytes(), layout)

    monkeypatch.setattr(gateway._connections.loop_times, "charge_episode", noting_charge)
    monkeypatch.setattr(server, "MAX_READ_TWICE_BYTES", 100)
    monkeypatch.setattr(server, "_check_parts", lambda body: spend(0.3))
    monkeypatch.setattr(images, "prepare_in_turn", prepare)
    async with gateway.admit_episode(image_host(), lambda: 0.0) as endpoint:
        assert (await fetch(endpoint, "/chat/completions", json=chat_body(RED)))[0] == 200
        assert (await fetch(endpoint, "/chat/completions", json=chat_body("AAAA")))[0] == 400
    assert [0.3 <= seconds < 0.6 for seconds in charged_seconds if seconds >= 0.1] == [True, True]


@served
async def test_an_episode_with_images_has_one_body_in_memory(
    gateway: Gateway, busy_decoders: BusyDecoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests behind a request that is being decoded are not received."""
    received_bodies: list[object] = []
    monkeypatch.setattr(server, "MAX_READ_TWICE_BYTES", 100)
    monkeypatch.setattr(server, "_check_parts", received_bodies.append)
    async with (
        gateway.admit_episode(image_host(), lambda: 0.0) as endpoint,
        gateway.admit_episode(image_host(), lambda: 0.0) as other,
    ):
        requests = [
            asyncio.create_task(fetch(endpoint, "/chat/completions", json=chat_body(RED))) for _ in range(3)
        ]
        while not busy_decoders.image_waits.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0)

        try:
            for _ in range(5):  # another episode is served, so the three requests would have been, too
                assert (await fetch(other, "/chat/completions", json=chat_body()))[0] == 200
            assert len(received_bodies) == 1 + 5
        finally:
            busy_decoders.release(content.MAX_DECODERS)
        assert [status for status, _ in await asyncio.gather(*requests)] == [200] * 3
        assert len(received_bodies) == 3 + 5


@served
async def test_a_request_to_a_model_that_reads_images_may_be_larger(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_BODY_BYTES", 1 << 20)
    monkeypatch.setattr(server, "MAX_IMAGE_BODY_BYTES", 3 << 20)
    for host, limit_mib in ((FakeHost(), 1), (image_host(), 3)):
        async with gateway.admit_episode(host, lambda: 0.0) as endpoint:
            for mebibytes in (2, 4):
                text = "x" * (mebibytes << 20)
                body = {"messages": [{"role": "user", "content": text}]}
                status, answer = await fetch(endpoint, "/chat/completions", json=body)
                if mebibytes < limit_mib:
                    assert status == 200
                else:
                    assert status == 413
                    assert f"the request is larger than {limit_mib} MiB" in answer["error"]["message"]


@served
async def test_a_bad_image_is_an_error_of_the_client(gateway: Gateway) -> None:
    host = image_host()
    async with gateway.admit_episode(host, lambda: 0.0) as endpoint:
        for path, (_, body, _) in zip(
            ("/chat/completions", "/responses", "/messages"), BODIES.values(), strict=True
        ):
            status, answer = await fetch(endpoint, path, json=body("AAAA"))
            assert (status, "not an image file" in answer["error"]["message"]) == (400, True)
            status, _ = await fetch(endpoint, path, json=body(RED))
            assert status == 200

        status, counted = await fetch(endpoint, "/messages/count_tokens", json=messages_body(RED))
        assert (status, counted) == (200, {"input_tokens": len(f"see\n{IMAGE_MARK}")})
    assert [request.messages[0].images for request in host.requests] == [(ref(RED),)] * 3
