"""Encodes texts to tokens chunk by chunk, so that a history which is rendered again is mostly looked up.

A tokenizer splits a text at its added tokens before anything else. So a chunk that begins with one is read as
it is in the whole text, whatever stands before.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from asyncrl.conversation.chat_render import Tokenizer

LONGEST = 4096  # characters of a chunk that is kept
KEPT = 8192  # chunks: some 16 MB as a rule, at most 160 MB


class ChunkEncoder:
    """`encoder(text)`: its ids, none added. `tokens`: the added tokens at which texts may be split."""

    def __init__(self, tokenizer: Tokenizer, tokens: Iterable[str]) -> None:
        self._tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()  # not every tokenizer has it
        splitting = {str(token) for token in added if _splits(token)} & {*tokens}
        longer = [str(token) for token in added]
        alone = [token for token in splitting if not any(_overlap(token, other) for other in longer)]
        self._begins = (
            re.compile("|".join(map(re.escape, sorted(alone, key=len, reverse=True)))) if alone else None
        )
        self._kept = lru_cache(maxsize=KEPT)(self._ids)

    def __call__(self, text: str) -> tuple[int, ...]:
        starts = [found.start() for found in self._begins.finditer(text)] if self._begins else []
        ids: list[int] = []
        for start, end in zip([0, *starts], [*starts, len(text)], strict=True):
            ids += self._kept(text[start:end]) if end - start <= LONGEST else self._ids(text[start:end])
        return tuple(ids)

    def _ids(self, chunk: str) -> array[int]:
        return array("I", self._tokenizer.encode(chunk, add_special_tokens=False) if chunk else ())


def _splits(token: Any) -> bool:
    """True if a tokenizer finds the token before it normalises the text, in any place, and takes nothing of
    what stands before it."""
    return not (token.normalized or token.single_word or token.lstrip)


def _overlap(token: str, other: str) -> bool:
    """True if `other` may match at or across the start of `token`."""
    return token != other and (token in other or any(other.endswith(token[:n]) for n in range(1, len(token))))
