"""Reads words.yaml: what the words of the page and the console mean."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import msgspec


class Word(msgspec.Struct, frozen=True, array_like=True):
    """Describes a word. `texts`: the texts of the page that the meaning explains."""

    word: str
    texts: tuple[str, ...]
    meaning: str


@cache
def words_by_section() -> dict[str, list[Word]]:
    return msgspec.yaml.decode(
        Path(__file__).with_name("words.yaml").read_bytes(), type=dict[str, list[Word]]
    )


def plain_words() -> list[Word]:
    """Return all words, their meanings without the marks of code."""
    return [
        msgspec.structs.replace(word, meaning=word.meaning.replace("`", ""))
        for words in words_by_section().values()
        for word in words
    ]
