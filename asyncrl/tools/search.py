"""Search tools: BM25 over a corpus on this machine, or a retrieval server. Both reply in the same format:

[1] Title of the best passage
its text

[2] …

corpus.jsonl ──► <cache>/<key>/, in the format of bm25s     key: file, its size and time, stopwords
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from asyncrl.data.rows import read_rows
from asyncrl.errors import UNDECODABLE, AsyncrlError, ConfigError, one_line, users_code
from asyncrl.remote import check_url, post_json
from asyncrl.tools.base import Tool, tool, tools
from asyncrl.values import cut_after

NO_PASSAGE = "no passage was found"
MAX_TITLE_CHARACTERS = 256  # longer titles are cut
MAX_CONCURRENT_SEARCHES = 4  # limit for one worker
INDEX_FORMAT = 2  # the version of the cached index, a part of the key
WORD_PATTERN = r"(?u)\b\w+\b"
TEXT_FIELDS = ("text", "contents")
log = logging.getLogger("asyncrl.tools")


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

    A search returns `k` passages of at most `max_chars` characters. `stopwords`: the language whose most
    common words are ignored; empty: no word is. The index is kept in the directory `cache` (default:
    ~/.cache/asyncrl/search) and mapped into memory. ConfigError: an option cannot be used."""
    _check_limits(k, max_chars)
    try:
        opened_corpus = open_corpus(corpus, cache, stopwords)
    except ImportError:
        raise ConfigError("bm25s is not installed; pip install 'asyncrl[search]'") from None

    def look_up(query: str) -> str:
        return write_reply(opened_corpus.search(query, k), max_chars)

    return _search_tool(look_up, name, description, blocking=True, concurrency=MAX_CONCURRENT_SEARCHES)


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
    """Search by a retrieval server at `url` with Search-R1's protocol:

        POST {"queries": [...], "topk": k, "return_scores": true}
        {"result": [[{"document": {"contents": ...}, "score": ...}, ...]]}

    `timeout` (seconds) covers the repetitions after a refused connection, 429 or 5xx.
    """
    _check_limits(k, max_chars)
    check_url(url)

    async def look_up(query: str) -> str:
        body = {"queries": [query], "topk": k, "return_scores": True}
        answer = await post_json(url, body, seconds=timeout, retries=retries)
        try:
            (hits,) = msgspec.json.decode(answer, type=_SearchAnswer).result
            passages = [read_passage(hit.document) for hit in hits]
        except (*UNDECODABLE, ValueError) as error:
            problem = f"the retrieval server's answer does not follow Search-R1's protocol: {one_line(error)}"
            raise SearchError(problem) from error

        return write_reply(passages[:k], max_chars)

    return _search_tool(look_up, name, description, timeout=timeout + 1)


def write_reply(passages: Iterable[Passage], max_chars: int) -> str:
    """Write the reply for the model; every passage is cut at `max_chars` characters."""
    passage_texts: list[str] = []
    for number, passage in enumerate(passages, start=1):
        title_line = f"{passage.title[:MAX_TITLE_CHARACTERS]}\n" if passage.title else ""
        passage_texts.append(f"[{number}] {title_line}{cut_after(passage.text, max_chars)}")

    return "\n\n".join(passage_texts) or NO_PASSAGE


def _search_tool(
    look_up: Callable[[str], str | Awaitable[str]], name: str, description: str, **options: Any
) -> Tool:
    look_up.__doc__ = f"{description}\n\nArgs:\n    query: what to look for, in a few words\n"
    return tool(name=name, **options)(look_up)


def _check_limits(k: int, max_chars: int) -> None:
    if k < 1 or max_chars < 1:
        raise ConfigError(f"k and max_chars must be at least 1, not {k} and {max_chars}")


# -- a corpus with its BM25 index on disk, memory-mapped: the workers of a machine share its pages ---------

# opened corpora, by directory
_corpora: weakref.WeakValueDictionary[Path, Corpus] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class Passage:
    title: str
    text: str


def read_passage(document: Mapping[str, Any]) -> Passage:
    """Read a document with `text` or `contents`, and perhaps a `title`. Without a title, a first line in
    quotes is the title, as in Search-R1's corpora. ValueError: the text is missing, or contains half a
    character."""
    text = next((document[key] for key in TEXT_FIELDS if isinstance(document.get(key), str)), None)
    if text is None:
        fields = ", ".join(map(str, document)) or "none"
        raise ValueError(f"the field {' or '.join(TEXT_FIELDS)} is missing; the fields are {fields}")

    title = str(document.get("title") or "")
    try:
        (title + text).encode()  # bm25s would lose its position in the file after such a passage
    except UnicodeEncodeError as error:
        surrogate = ascii(error.object[error.start])
        raise ValueError(
            f"the text contains {surrogate}, a lone surrogate (half of a character); correct the text"
        ) from None

    if title:
        return Passage(title, text)
    first_line, _, remaining_text = text.partition("\n")
    if remaining_text and first_line.startswith('"') and first_line.endswith('"'):
        return Passage(first_line.strip('"'), remaining_text)
    return Passage("", text)


class Corpus:
    """Holds an opened index. `search` may be called from several threads at once."""

    def __init__(self, index_directory: Path, stopwords: str) -> None:
        import bm25s
        from bm25s.utils.corpus import JsonlCorpus

        self._stopwords = stopwords
        self._index = bm25s.BM25.load(index_directory, mmap=True, show_progress=False)
        self._passages = JsonlCorpus(index_directory / "corpus.jsonl", show_progress=False, verbosity=0)
        self._passages.mmindex = np.array(self._passages.mmindex)  # a list takes five times the memory
        self._read_lock = threading.Lock()  # all searches of bm25s share one position in the file
        self._read_passage(self._index.scores["num_docs"] - 1)  # raises if the file is too short

    def __len__(self) -> int:
        return len(self._passages)

    def search(self, query: str, k: int) -> list[Passage]:
        """Return at most k passages that share a word with the query, the best first; the corpus's order
        breaks ties."""
        (query_words,) = _tokenize([query], self._stopwords, return_ids=False)
        known_words = [word for word in query_words if word in self._index.vocab_dict]
        if not known_words:
            return []
        return [self._read_passage(index) for index in _best_indices(self._index.get_scores(known_words), k)]

    def _read_passage(self, index: int) -> Passage:
        with self._read_lock:
            return Passage(*self._passages[index])


def _best_indices(scores: np.ndarray, k: int) -> list[int]:
    """Return the indices of the k largest positive scores. Most scores are 0, and a partition of equal
    numbers is slow."""
    indices = np.flatnonzero(scores > 0)
    best_scores = scores[indices]

    if len(indices) > k:
        is_candidate = best_scores >= np.partition(best_scores, -k)[-k]
        indices = indices[is_candidate]
        best_scores = best_scores[is_candidate]

    score_order = np.argsort(-best_scores, kind="stable")[:k]
    return [int(index) for index in indices[score_order]]


def open_corpus(source: str, cache: str = "", stopwords: str = "english") -> Corpus:
    """Open the corpus of a file of rows. The first process to open a corpus builds the index while further
    processes wait. ConfigError: the file or the directory cannot be used."""
    path = Path(source).expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"no such corpus: {source}; set corpus to a file")

    import bm25s

    with ConfigError.instead_of(ValueError, text=f"unknown stopwords: {stopwords!r}"):
        _tokenize([""], stopwords)

    if not cache:
        cache_home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        cache = str(cache_home / "asyncrl" / "search")

    # An index of another file, or made in another way, has another key.
    file_status = path.stat()
    file_parts = (str(path), file_status.st_size, file_status.st_mtime_ns)
    key_parts = (INDEX_FORMAT, bm25s.__version__, *file_parts, stopwords)
    index_key = f"{path.stem}-{xxhash.xxh3_64_hexdigest(repr(key_parts).encode())}"
    index_directory = Path(cache).expanduser().resolve() / index_key

    try:
        index_directory.parent.mkdir(parents=True, exist_ok=True)
        with index_directory.with_suffix(".lock").open("ab") as lock_file:
            fcntl.flock(lock_file, fcntl.LOCK_EX)  # the kernel releases the lock when the process dies
            if (corpus := _corpora.get(index_directory)) is not None:
                return corpus

            if index_directory.is_dir():
                try:
                    with users_code():
                        corpus = Corpus(index_directory, stopwords)
                except Exception as error:  # a damaged file may make the two libraries raise any error
                    problem = one_line(error)
                    log.warning("the index %s is damaged (%s); building it again", index_directory, problem)
                    shutil.rmtree(index_directory)

            if corpus is None:
                log.info("indexing %s", path)
                build_directory = Path(tempfile.mkdtemp(prefix="building-", dir=index_directory.parent))
                try:
                    _build_index(path, build_directory, stopwords)
                    build_directory.rename(index_directory)
                finally:
                    shutil.rmtree(build_directory, ignore_errors=True)
                corpus = Corpus(index_directory, stopwords)

            _corpora[index_directory] = corpus
            return corpus
    except OSError as error:
        problem_text = f"search: cannot store the index for {source} in {index_directory.parent}"
        raise ConfigError(f"{problem_text} ({one_line(error)}); set cache to another directory") from None


def _build_index(path: Path, index_directory: Path, stopwords: str) -> None:
    """Read the file twice, so that its passages are never all in memory."""
    import bm25s

    texts = (f"{passage.title}\n{passage.text}" for passage in _read_passages(path))
    tokenized = _tokenize(texts, stopwords)
    if not tokenized.vocab:
        raise ConfigError(f"{path} contains no words to search")

    index = bm25s.BM25()
    index.index(tokenized, show_progress=False)

    stored_passages = ((passage.title, passage.text) for passage in _read_passages(path))
    index.save(index_directory, stored_passages, show_progress=False)


def _tokenize(texts: Any, stopwords: Any, **options: Any) -> Any:
    import bm25s

    return bm25s.tokenize(
        texts, stopwords=stopwords or [], token_pattern=WORD_PATTERN, show_progress=False, **options
    )


def _read_passages(path: Path) -> Iterator[Passage]:
    """Yield the passages in order. ConfigError names the document without a passage."""
    for number, document in enumerate(read_rows(path), start=1):
        try:
            yield read_passage(document)
        except ValueError as error:
            raise ConfigError(f"{path}, document {number}: {error}") from None
