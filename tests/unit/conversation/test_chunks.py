"""A text is read chunk by chunk as it is as a whole, and what was read before is looked up."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from asyncrl.conversation.tokenizer import CACHED_CHUNKS, MAX_CHUNK_CHARACTERS, ChunkEncoder
from tests.fakes.families import FAMILIES, tokenizer_of

PARTS = (
    "<|im_end|>",
    "<|im_start|>user\n",
    "<think>",
    "</think>",
    "Hm.",
    " ",
    "\n\n",
    "Straße",
    "<",
    "|im_end|>",
)


class Counting:
    """A tokenizer that counts the characters it reads."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.read = 0
        self.added_tokens_decoder = tokenizer.added_tokens_decoder

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.read += len(text)
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return ids


def controls(name: str) -> list[str]:
    return [*FAMILIES[name].controls, *FAMILIES[name].words]


@settings(deadline=None)
@given(st.lists(st.sampled_from(PARTS)).map("".join))
def test_pieces_are_read_as_in_the_whole_text(text: str) -> None:
    tokenizer = tokenizer_of("qwen3")
    whole = tuple(tokenizer.encode(text, add_special_tokens=False))
    assert ChunkEncoder(tokenizer, controls("qwen3"))(text) == whole


@pytest.mark.parametrize(
    "token",
    [
        AddedToken("<a>", normalized=False, lstrip=True),  # takes the space before it
        AddedToken("<a>", normalized=True),
        AddedToken("<a>", normalized=False, single_word=True),
        "<a>",  # with one that begins before it, and one around it
    ],
)
def test_no_piece_begins_where_the_whole_text_is_read_otherwise(token: Any) -> None:
    tokenizer = tokenizer_of.__wrapped__("qwen2.5")
    if isinstance(token, str):
        tokenizer.add_tokens([AddedToken(t, normalized=False) for t in ("x<", "(<a>)")])
        token = AddedToken(token, normalized=False)
    tokenizer.add_tokens([token])
    for text in ("so <a> x<a> (<a>) 1<a>2", "<a><a>  <a>\n<a>"):
        whole = tuple(tokenizer.encode(text, add_special_tokens=False))
        assert ChunkEncoder(tokenizer, ["<a>"])(text) == whole


def test_a_history_that_grows_is_read_once() -> None:
    tokenizer = Counting(tokenizer_of("qwen2.5"))
    encode = ChunkEncoder(tokenizer, controls("qwen2.5"))
    text = ""
    for n in range(60):
        text += f"<|im_start|>user\nSure about {n}?<|im_end|>\n"
        encode(text)
    assert tokenizer.read < 1.5 * len(text)
    long = "<|im_start|>" + "x" * MAX_CHUNK_CHARACTERS
    encode(long), encode(long)
    assert encode._cached_ids.cache_info().currsize < CACHED_CHUNKS and tokenizer.read > 2 * len(long)
