"""Replies cut to a number of tokens."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from asyncrl.conversation.tokenizer import Cut, shorten

MODEL = Path(__file__).resolve().parents[3] / "examples/multiturn/calculator/model"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core)


BYTES = byte_tokenizer()
PAIRS = AutoTokenizer.from_pretrained(MODEL)  # merges


def count(tokenizer: Any, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize(
    ("text", "limit", "where", "short"),
    [
        ("0123456789" * 10, 100, "middle", "0123456789" * 10),
        ("0123456789" * 10, 40, "tail", "0123456789\n[... 90 characters cut ...]\n"),
        ("0123456789" * 10, 40, "head", "\n[... 90 characters cut ...]\n0123456789"),
        ("0123456789" * 10, 40, "middle", "01234\n[... 90 characters cut ...]\n56789"),
        ("0123456789" * 10, 5, "middle", "01234"),  # no room for the note
        ("<|im_" + "x" * 90 + "end|>", 10, "middle", "<|im_xxxxx"),  # both ends could make a control token
        ("0123456789", 0, "tail", ""),
        ("", 0, "tail", ""),
        ("öööööööööö", 5, "tail", "öö"),  # no half characters
        ("öööööööööö", 5, "head", "öö"),
        ("a\ud800b", 9, "tail", "a?b"),
    ],
)
def test_table(text: str, limit: int, where: Cut, short: str) -> None:
    assert shorten(BYTES, text, limit, where) == short


@settings(max_examples=150, deadline=None)
@given(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=300),
    st.integers(0, 80),
    st.sampled_from(["head", "middle", "tail"]),
    st.sampled_from([BYTES, PAIRS]),
)
def test_never_longer_than_the_limit(text: str, limit: int, where: Cut, tokenizer: Any) -> None:
    short = shorten(tokenizer, text, limit, where)
    assert count(tokenizer, short) <= limit
    if count(tokenizer, text) <= limit:
        assert short == text
        return
    head, note, tail = short.partition("\n[... ")
    if note:
        missing, _, tail = tail.partition(" characters cut ...]\n")
        assert int(missing) + len(head) + len(tail) == len(text)
        assert text.startswith(head)
        assert text.endswith(tail)


class Counting:
    """How many characters were tokenised."""

    def __init__(self) -> None:
        self.characters = 0

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.characters += len(text)
        return BYTES.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Any, **options: Any) -> Any:
        return BYTES.decode(token_ids, **options)


def test_short_text_is_not_tokenised() -> None:
    codec = Counting()
    assert shorten(codec, "word " * 400, 2048, "middle") == "word " * 400
    assert codec.characters == 0


@pytest.mark.parametrize("where", ["head", "middle", "tail"])
def test_long_text_is_tokenised_at_its_ends_only(where: Cut) -> None:
    codec = Counting()
    text = "0123456789" * 1_000_000
    begun = time.process_time()
    short = shorten(codec, text, 128, where)
    assert "characters cut" in short
    assert codec.characters < 5000
    assert time.process_time() - begun < 2
