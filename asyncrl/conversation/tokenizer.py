"""Texts as tokens: the tokenizer of a model directory, as its tokenizer.json says; texts encoded chunk by
chunk, so that a history which is rendered again is mostly looked up; texts cut to a number of tokens.

A tokenizer splits a text at its added tokens before anything else. So a chunk that begins with one is read as
it is in the whole text, whatever stands before.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from asyncrl.conversation.chat_render import Tokenizer
from asyncrl.errors import ConfigError, one_line, users_code
from asyncrl.values import encodable

Cut = Literal["head", "middle", "tail"]
TEXTS = (
    "What is 12 plus 30 in total?",
    "  indented\n\n\ttwice;\r\n x = f(1e-9, 'it''s') # 1234567",
    "Größe, naïve, œuvre, ﬁn, ½ · Đặng Thị",
    "Сколько будет 12 и 30? Πόσο κάνει;",
    "你好，世界。多少？ こんにちは 안녕하세요",
    "كم المجموع؟ כמה זה? कुल कितना? ทั้งหมด",
    '🙂 👩‍👩‍👧 ≤ ∑ → {"a": [1, 2.5, null]}',
)  # in many scripts, and without control tokens


def load_tokenizer(path: str) -> Any:
    """The Hugging Face tokenizer in a directory. ConfigError if there is none, or if it reads or writes some
    text otherwise than its tokenizer.json.

    Not by AutoTokenizer, which trusts `tokenizer_class` and `model_type`: a byte-level vocabulary whose
    configuration says LlamaTokenizerFast becomes one of SentencePiece, which loses all spaces.
    """
    import tokenizers
    from transformers import PreTrainedTokenizerFast  # takes a second

    try:
        with users_code():  # the library is in Rust, and panics
            loaded: Any = PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
            own = tokenizers.Tokenizer.from_file(str(Path(path) / "tokenizer.json"))
    except Exception as error:  # of tokenizers it is a bare Exception
        raise ConfigError(
            f"{path}: no usable tokenizer ({one_line(error)}); it needs a tokenizer.json, which "
            "save_pretrained(...) of a tokenizer of transformers writes"
        ) from error
    special = [token for token in loaded.all_special_tokens if own.token_to_id(token) is not None]
    for text in (*TEXTS, " ".join(special)):
        ids = own.encode(text, add_special_tokens=False).ids
        words = loaded.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if loaded.encode(text, add_special_tokens=False) != ids:
            found = "reads"
        elif words != own.decode(ids, skip_special_tokens=False):
            found = "writes"
        else:
            continue
        raise ConfigError(
            f"{path}: the tokenizer as transformers loads it {found} {text!r} otherwise than tokenizer.json; "
            "remove what changes it from tokenizer_config.json, or save it anew with save_pretrained(...)"
        )
    return loaded


# -- chunk by chunk ----------------------------------------------------------------------------------


LONGEST = 4096  # characters of a chunk that is kept
KEPT = 8192  # chunks: some 16 MB as a rule, at most 160 MB


class ChunkEncoder:
    """`encoder(text)`: its ids, none added. `tokens`: the added tokens at which texts may be split."""

    def __init__(self, tokenizer: Tokenizer, tokens: Iterable[str]) -> None:
        self._tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()  # not every tokenizer has it
        # Found before the text is normalised, in any place, and without what stands before it.
        found = (str(one) for one in added if not (one.normalized or one.single_word or one.lstrip))
        splitting = {*found} & {*tokens}
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


def _overlap(token: str, other: str) -> bool:
    """True if `other` may match at or across the start of `token`."""
    return token != other and (token in other or any(other.endswith(token[:n]) for n in range(1, len(token))))


# -- cut to a number of tokens -----------------------------------------------------------------------


CHARACTERS = 16  # per token: text beyond that is never tokenised, so that megabytes cost no time
COMMON = 4  # characters per token of most texts: tried first
PARTIAL = "\ufffd"  # what the bytes of a character that was cut decode to
NOTE = "\n[... {} characters cut ...]\n"


def shorten(tokenizer: Tokenizer, text: str, limit: int, where: Cut, missing: int = 0) -> str:
    """At most `limit` tokens of the text: all of it, or what is left when its head, middle or tail is cut,
    with a note of how many characters are missing (where the limit leaves room for one). `missing`:
    characters that the caller has cut out of the middle before."""
    text = encodable(text)
    if _fits(tokenizer, text, limit):
        return text
    note = NOTE
    room = limit - _count(tokenizer, NOTE.format(len(text)))
    if room <= 0:  # one end only: both together could make a control token
        note = ""
        room = limit
        where = "tail" if where == "middle" else where
    while room > 0:
        first = {"head": 0, "middle": room - room // 2, "tail": room}[where]
        head, tail = _ends(tokenizer, text, first, room - first)
        short = head + note.format(len(text) + missing - len(head) - len(tail)) + tail
        excess = _count(tokenizer, short) - limit
        if excess <= 0:
            return short
        room -= excess  # the parts together have more tokens than apart
    return ""


def _count(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False))


def _fits(tokenizer: Tokenizer, text: str, limit: int) -> bool:
    """True if the whole text may be shown. Of one that is far too long, only the beginning is tokenised."""
    if len(text.encode()) <= limit:
        return True  # no token is shorter than a byte
    size = COMMON * limit
    if size < len(text) and _count(tokenizer, text[:size]) > limit:
        return False
    return len(text) <= CHARACTERS * limit and _count(tokenizer, text) <= limit


def _ends(tokenizer: Tokenizer, text: str, first: int, last: int) -> tuple[str, str]:
    """About the first and the last so many tokens of the text, never half a character."""
    head = _tokens(tokenizer, text, first, from_end=False)[:first]
    tail = _tokens(tokenizer, text, last, from_end=True)
    shown = len(_decode(tokenizer, head).rstrip(PARTIAL))
    rest = len(_decode(tokenizer, tail[max(0, len(tail) - last) :]).lstrip(PARTIAL))
    return text[:shown], text[max(shown, len(text) - rest) :]


def _tokens(tokenizer: Tokenizer, text: str, count: int, *, from_end: bool) -> list[int]:
    """Tokens of one end of the text that is long enough for `count` of them, if the text is."""
    size = COMMON * count
    while True:
        part = text[max(0, len(text) - size) :] if from_end else text[:size]
        ids = tokenizer.encode(part, add_special_tokens=False)
        if len(ids) >= count or size >= min(len(text), CHARACTERS * count):
            return ids
        size *= 2


def _decode(tokenizer: Tokenizer, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text
