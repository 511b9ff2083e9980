"""Search tools: BM25 over a corpus of this machine, or a retrieval server. Both reply in the same way:

[1] Title of the best passage
its text

[2] …
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec

from asyncrl.errors import UNDECODABLE, AsyncrlError, ConfigError, one_line
from asyncrl.remote import check_url, post
from asyncrl.tools.base import Tool, tool, tools
from asyncrl.tools.corpus import Passage, open_corpus, passage

NOTHING = "no passage was found"
HEAD = 256  # characters of a title that are shown
THREADS = 4  # searches of one worker at once


class SearchError(AsyncrlError):
    """The retrieval server's answer is not in the expected format."""


class _Hit(msgspec.Struct, frozen=True):
    document: dict[str, Any]


class _SearchAnswer(msgspec.Struct, frozen=True):
    result: tuple[tuple[_Hit, ...], ...]


@tools.register("search")
def search(
    *,
    corpus: str,
    k: int = 3,
    max_chars: int = 1000,
    stopwords: str = "english",
    cache: str = "",
    name: str = "search",
    description: str = "Search the corpus.",
) -> Tool:
    """Search by BM25 in `corpus`, a file of rows (.jsonl, .parquet, .json, .csv) with `text` or `contents`,
    and optionally `title`.

    `k` passages of at most `max_chars` characters are returned. `stopwords`: the language whose most common
    words are ignored; empty: none are. The index is kept in the directory `cache` (default:
    ~/.cache/asyncrl/search) and mapped into memory. ConfigError for options that cannot be used.
    """
    _check(k, max_chars)
    try:
        found = open_corpus(corpus, cache, stopwords)
    except ImportError:
        raise ConfigError("the tool search needs bm25s: pip install 'asyncrl[search]'") from None

    def look_up(query: str) -> str:
        return reply(found.search(query, k), max_chars)

    return _search_tool(look_up, name, description, blocking=True, concurrency=THREADS)


@tools.register("search_remote")
def search_remote(
    *,
    url: str,
    k: int = 3,
    max_chars: int = 1000,
    timeout: float = 20.0,
    retries: int = 2,
    name: str = "search",
    description: str = "Search the corpus.",
) -> Tool:
    """A retrieval server at `url` with Search-R1's protocol:

        POST {"queries": [...], "topk": k, "return_scores": true}
        {"result": [[{"document": {"contents": ...}, "score": ...}, ...]]}

    `timeout` (seconds) covers the repetitions after a refused connection, 429 or 5xx.
    """
    _check(k, max_chars)
    check_url(url)

    async def look_up(query: str) -> str:
        body = {"queries": [query], "topk": k, "return_scores": True}
        return reply(_passages(await post(url, body, seconds=timeout, retries=retries))[:k], max_chars)

    return _search_tool(look_up, name, description, timeout=timeout + 1)


def reply(passages: Iterable[Passage], max_chars: int) -> str:
    """Write what the model reads; every passage is cut at `max_chars` characters."""
    shown = [_shown(number, found, max_chars) for number, found in enumerate(passages, start=1)]
    return "\n\n".join(shown) or NOTHING


def _shown(number: int, found: Passage, max_chars: int) -> str:
    text = found.text if len(found.text) <= max_chars else f"{found.text[:max_chars]}…"
    return f"[{number}] {found.title[:HEAD]}\n{text}" if found.title else f"[{number}] {text}"


def _passages(answer: bytes) -> list[Passage]:
    """The passages of the one query. SearchError for an answer in another format."""
    try:
        (hits,) = msgspec.json.decode(answer, type=_SearchAnswer).result
        return [passage(hit.document) for hit in hits]
    except (*UNDECODABLE, ValueError) as error:
        raise SearchError(f"the retrieval server's answer is not Search-R1's: {one_line(error)}") from error


def _search_tool(
    look_up: Callable[[str], str | Awaitable[str]],
    name: str,
    description: str,
    **options: Any,
) -> Tool:
    look_up.__doc__ = f"{description}\n\nArgs:\n    query: what to look for, in a few words\n"
    return tool(name=name, **options)(look_up)


def _check(k: int, max_chars: int) -> None:
    if k < 1 or max_chars < 1:
        raise ConfigError(f"search: k and max_chars must be at least 1, not {k} and {max_chars}")
