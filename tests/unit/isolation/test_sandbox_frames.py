"""What is kept of an output, and the frames between a sandbox and its owner."""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.isolation.sandbox import frames
from asyncrl.isolation.sandbox.watched import BoundedOutput

PARTS = st.lists(st.binary(max_size=300), max_size=20)


@given(PARTS, st.integers(2, 400))
def test_head_and_tail_are_kept_and_the_rest_counted(parts: list[bytes], limit: int) -> None:
    kept = BoundedOutput(limit)
    all_of_it = b"".join(parts)
    for part in parts:
        kept.add_bytes(part)
    omitted, shown = kept.join_ends()
    half = limit // 2
    if len(all_of_it) <= 2 * half:
        assert (omitted, shown) == (0, all_of_it)
    else:
        note = f"\n[{omitted} bytes left out]\n".encode()
        assert omitted == len(all_of_it) - 2 * half
        assert shown == all_of_it[:half] + note + all_of_it[-half:]


def test_an_endless_output_is_not_held() -> None:
    kept = BoundedOutput(1000)
    for _ in range(500):
        kept.add_bytes(bytes(65_536))
    assert len(kept._tail) < 200_000


@given(st.sampled_from([b"c", b"p", b"s"]), st.floats(0, 1e6), st.binary(), st.binary())
def test_requests_arrive_as_they_were_sent(kind: bytes, seconds: float, source: bytes, stdin: bytes) -> None:
    sent = frames.RunRequest(kind, seconds, source, stdin)
    read, write = os.pipe()
    try:
        frames.write_all(write, sent.frame())
        os.close(write)
        assert frames.read_request(read) == sent
        with pytest.raises(EOFError):
            frames.read_request(read)
    finally:
        os.close(read)


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0") | st.sampled_from("\udc80\udcff"))


@given(st.lists(TEXT), st.dictionaries(TEXT.filter(lambda name: "=" not in name), TEXT), TEXT)
def test_a_program_arrives_as_it_was_sent(words: list[str], environment: dict[str, str], where: str) -> None:
    source = frames.exec_source(words, environment, where)
    assert json.loads(source) == [words, environment, where]
