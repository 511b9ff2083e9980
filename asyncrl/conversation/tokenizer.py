"""Loads the tokenizer of a model directory by tokenizer.json, encodes texts chunk by chunk, so that most of a
history which is rendered again is looked up, and cuts texts to a number of tokens.

A tokenizer splits a text at added tokens before anything else. So a chunk that begins with an added token has
the same ids alone and in the whole text.
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

# Texts in many scripts, without control tokens.
TEST_TEXTS = (
    "What is 12 plus 30 in total?",
    "  indented\n\n\ttwice;\r\n x = f(1e-9, 'it''s') # 1234567",
    "Größe, naïve, œuvre, ﬁn, ½ · Đặng Thị",
    "Сколько будет 12 и 30? Πόσο κάνει;",
    "你好，世界。多少？ こんにちは 안녕하세요",
    "كم المجموع؟ כמה זה? कुल कितना? ทั้งหมด",
    '🙂 👩‍👩‍👧 ≤ ∑ → {"a": [1, 2.5, null]}',
)


def load_tokenizer(path: str) -> Any:
    """Load the Hugging Face tokenizer in a directory. ConfigError if there is no tokenizer, or if it reads or
    writes some text otherwise than tokenizer.json.

    AutoTokenizer is not used, since it trusts `tokenizer_class` and `model_type`: a byte-level vocabulary
    whose configuration says LlamaTokenizerFast becomes a SentencePiece vocabulary, which loses all spaces.
    """
    import tokenizers
    from transformers import PreTrainedTokenizerFast  # takes a second

    try:
        with users_code():  # the library is in Rust, and panics
            loaded_tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
            file_tokenizer = tokenizers.Tokenizer.from_file(str(Path(path) / "tokenizer.json"))
    except Exception as error:  # tokenizers raises a bare Exception
        raise ConfigError(
            f"{path}: no usable tokenizer ({one_line(error)}); add a tokenizer.json, as written by the "
            "save_pretrained(...) method of a transformers tokenizer"
        ) from error

    special_tokens = [
        token
        for token in loaded_tokenizer.all_special_tokens
        if file_tokenizer.token_to_id(token) is not None
    ]
    for text in (*TEST_TEXTS, " ".join(special_tokens)):
        ids = file_tokenizer.encode(text, add_special_tokens=False).ids
        decoded_text = loaded_tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

        if loaded_tokenizer.encode(text, add_special_tokens=False) != ids:
            deviation = "encodes"
        elif decoded_text != file_tokenizer.decode(ids, skip_special_tokens=False):
            deviation = "decodes"
        else:
            continue

        raise ConfigError(
            f"{path}: the tokenizer, as loaded by transformers, {deviation} {text!r} differently from "
            "tokenizer.json; remove the cause from tokenizer_config.json, or save the tokenizer again with "
            "save_pretrained(...)"
        )

    return loaded_tokenizer


# -- chunk by chunk ----------------------------------------------------------------------------------


MAX_CHUNK_CHARACTERS = 4096  # characters of the longest chunk whose ids are cached
CACHED_CHUNKS = 8192  # chunks whose ids are cached: some 16 MB as a rule, at most 160 MB


class ChunkEncoder:
    """Encodes texts, `encoder(text)`, without special tokens. `split_tokens`: the added tokens at which texts
    may be split."""

    def __init__(self, tokenizer: Tokenizer, split_tokens: Iterable[str]) -> None:
        self._tokenizer = tokenizer
        # Not every tokenizer has this table.
        added_tokens = getattr(tokenizer, "added_tokens_decoder", {}).values()
        # Exact tokens match before the text is normalised, anywhere, and without the white space before them.
        exact_tokens = (
            str(added_token)
            for added_token in added_tokens
            if not (added_token.normalized or added_token.single_word or added_token.lstrip)
        )

        added_texts = [str(added_token) for added_token in added_tokens]
        unambiguous_tokens = [
            token
            for token in {*exact_tokens} & {*split_tokens}
            if not any(_may_overlap(token, added_text) for added_text in added_texts)
        ]
        unambiguous_tokens.sort(key=len, reverse=True)
        self._chunk_pattern = re.compile("|".join(map(re.escape, unambiguous_tokens)) or r"(?!)")
        self._cached_ids = lru_cache(maxsize=CACHED_CHUNKS)(self._encode_chunk)

    def __call__(self, text: str) -> tuple[int, ...]:
        chunk_starts = [match.start() for match in self._chunk_pattern.finditer(text)]
        ids: list[int] = []
        for start, end in zip([0, *chunk_starts], [*chunk_starts, len(text)], strict=True):
            encode_chunk = self._cached_ids if end - start <= MAX_CHUNK_CHARACTERS else self._encode_chunk
            ids += encode_chunk(text[start:end])

        return tuple(ids)

    def _encode_chunk(self, chunk: str) -> array[int]:
        return array("I", self._tokenizer.encode(chunk, add_special_tokens=False) if chunk else ())


def _may_overlap(token: str, longer_token: str) -> bool:
    """Return True if `longer_token` may match at or across the start of `token`."""
    return token != longer_token and (
        token in longer_token or any(longer_token.endswith(token[:length]) for length in range(1, len(token)))
    )


# -- cut to a number of tokens -----------------------------------------------------------------------


# Characters per token, at most, on average: a text with more than this times a limit is taken to exceed that
# limit, and is never tokenised as a whole, so that megabytes cost no time.
CHARACTERS_PER_TOKEN = 16
USUAL_CHARACTERS_PER_TOKEN = 4  # of most texts: tried first
REPLACEMENT_CHARACTER = "\ufffd"  # the bytes of a cut character decode to this
CUT_NOTE = "\n[... {} characters cut ...]\n"


def shorten(tokenizer: Tokenizer, text: str, limit: int, cut: Cut, missing_characters: int = 0) -> str:
    """Return at most `limit` tokens of the text: the whole text, or the text without the head, middle or
    tail, with a note of how many characters are missing (where the limit leaves room for a note).
    `missing_characters`: characters that the caller has cut out of the middle before."""
    text = encodable(text)
    if _fits_limit(tokenizer, text, limit):
        return text

    cut_note = CUT_NOTE
    free_tokens = limit - _count_tokens(tokenizer, CUT_NOTE.format(len(text)))
    if free_tokens <= 0:  # one end only: both ends together could make a control token
        cut_note = ""
        free_tokens = limit
        cut = "tail" if cut == "middle" else cut

    while free_tokens > 0:
        head_tokens = {"head": 0, "middle": free_tokens - free_tokens // 2, "tail": free_tokens}[cut]
        head, tail = _head_and_tail(tokenizer, text, head_tokens, free_tokens - head_tokens)
        shortened_text = head + cut_note.format(len(text) + missing_characters - len(head) - len(tail)) + tail
        excess_tokens = _count_tokens(tokenizer, shortened_text) - limit
        if excess_tokens <= 0:
            return shortened_text
        free_tokens -= excess_tokens  # head and tail together have more tokens than apart

    return ""


def _count_tokens(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False))


def _fits_limit(tokenizer: Tokenizer, text: str, limit: int) -> bool:
    """Return True if the whole text may be shown. If the text is far too long, only the start is
    tokenised."""
    if len(text.encode()) <= limit:
        return True  # no token is shorter than a byte
    probed_characters = USUAL_CHARACTERS_PER_TOKEN * limit
    if probed_characters < len(text) and _count_tokens(tokenizer, text[:probed_characters]) > limit:
        return False
    return len(text) <= CHARACTERS_PER_TOKEN * limit and _count_tokens(tokenizer, text) <= limit


def _head_and_tail(tokenizer: Tokenizer, text: str, head_count: int, tail_count: int) -> tuple[str, str]:
    """Return about `head_count` first and `tail_count` last tokens of the text, never half a character."""
    head_ids = _end_tokens(tokenizer, text, head_count, from_end=False)[:head_count]
    tail_ids = _end_tokens(tokenizer, text, tail_count, from_end=True)
    head_length = len(_decode_ids(tokenizer, head_ids).rstrip(REPLACEMENT_CHARACTER))
    tail_length = len(
        _decode_ids(tokenizer, tail_ids[max(0, len(tail_ids) - tail_count) :]).lstrip(REPLACEMENT_CHARACTER)
    )
    return text[:head_length], text[max(head_length, len(text) - tail_length) :]


def _end_tokens(tokenizer: Tokenizer, text: str, count: int, *, from_end: bool) -> list[int]:
    """Return the tokens of one end of the text: at least `count`, if the text has enough tokens."""
    part_length = USUAL_CHARACTERS_PER_TOKEN * count
    while True:
        text_part = text[max(0, len(text) - part_length) :] if from_end else text[:part_length]
        ids = tokenizer.encode(text_part, add_special_tokens=False)
        if len(ids) >= count or part_length >= min(len(text), CHARACTERS_PER_TOKEN * count):
            return ids
        part_length *= 2


def _decode_ids(tokenizer: Tokenizer, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text
