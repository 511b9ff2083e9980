"""A corpus of passages with its BM25 index on disk, memory-mapped: the workers of a machine share its pages.

corpus.jsonl ──► <cache>/<key>/{passages.arrow, *.npy, vocab.json}     key: file, its size and time, stopwords
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from asyncrl.errors import ConfigError, one_line

FORMAT = 1  # of what is in the cache; part of the key
BATCH = 4096  # passages read, tokenised and written at once
WORD = r"(?u)\b\w+\b"
TEXTS = ("text", "contents")
log = logging.getLogger("asyncrl.tools")
_corpora: weakref.WeakValueDictionary[Path, Corpus] = weakref.WeakValueDictionary()  # those in use


@dataclass(frozen=True)
class Passage:
    title: str
    text: str


def passage(document: Mapping[str, Any]) -> Passage:
    """From a document with `text` or `contents`, and perhaps a `title`. Without one, a first line in quotes
    is the title, as in Search-R1's corpora. ValueError when there is no text."""
    text = next((document[key] for key in TEXTS if isinstance(document.get(key), str)), None)
    if text is None:
        raise ValueError(f"no {' or '.join(TEXTS)}, only {', '.join(map(str, document)) or 'nothing'}")
    if title := document.get("title"):
        return Passage(str(title), text)
    first, _, rest = text.partition("\n")
    if rest and first.startswith('"') and first.endswith('"'):
        return Passage(first.strip('"'), rest)
    return Passage("", text)


class Corpus:
    """An opened index. `search` may be called from several threads at once."""

    def __init__(self, home: Path, stopwords: str) -> None:
        import bm25s
        import pyarrow as pa

        self._stopwords = stopwords
        self._index = bm25s.BM25.load(home, mmap=True, show_progress=False)
        with pa.memory_map(str(home / "passages.arrow")) as source:
            self._passages = pa.ipc.open_file(source).read_all()

    def __len__(self) -> int:
        return int(self._passages.num_rows)

    def search(self, query: str, k: int) -> list[Passage]:
        """At most k passages that share a word with the query, best first; the corpus's order breaks ties."""
        words = [word for word in _words([query], self._stopwords)[0] if word in self._index.vocab_dict]
        if not words:
            return []
        return [self._passage(index) for index in _best(self._index.get_scores(words), k)]

    def _passage(self, index: int) -> Passage:
        title, text = (self._passages[name][index].as_py() for name in ("title", "text"))
        return Passage(title, text)


def _best(scores: np.ndarray, k: int) -> list[int]:
    """Indices of the k largest positive scores. Most are 0, and a partition of equal numbers is slow."""
    indices = np.flatnonzero(scores > 0)
    found = scores[indices]
    if len(indices) > k:
        kept = found >= np.partition(found, -k)[-k]
        indices, found = indices[kept], found[kept]
    order = np.argsort(-found, kind="stable")[:k]
    return [int(index) for index in indices[order]]


def open_corpus(source: str, cache: str = "", stopwords: str = "english") -> Corpus:
    """The corpus of a .parquet or .jsonl file. The first process to open it builds the index, others wait for
    that. ConfigError for a file or a directory that cannot be used."""
    path = _source(source)
    _check_language(stopwords)
    home = _cache(cache) / _key(path, stopwords)
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        with _locked(home.with_suffix(".lock")):
            corpus = _corpora.get(home) or _opened(path, home, stopwords)
            _corpora[home] = corpus
            return corpus
    except OSError as error:
        where = f"search: cannot keep the index of {source} in {home.parent}"
        raise ConfigError(f"{where} ({one_line(error)}); set cache to a directory") from None


def _opened(path: Path, home: Path, stopwords: str) -> Corpus:
    if home.is_dir():
        try:
            return Corpus(home, stopwords)
        except Exception as error:  # whatever a damaged file makes the two libraries raise
            log.warning("the index %s is damaged (%s); it is built again", home, one_line(error))
            shutil.rmtree(home)
    log.info("indexing %s", path)
    building = Path(tempfile.mkdtemp(prefix="building-", dir=home.parent))
    try:
        _build(path, building, stopwords)
        building.rename(home)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return Corpus(home, stopwords)


def _build(path: Path, home: Path, stopwords: str) -> None:
    import bm25s
    import pyarrow as pa

    schema = pa.schema([("title", pa.large_string()), ("text", pa.large_string())])
    vocabulary: dict[str, int] = {}
    tokens: list[list[int]] = []
    with pa.OSFile(str(home / "passages.arrow"), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        passages = _read_passages(path)
        while batch := list(itertools.islice(passages, BATCH)):
            documents = [{"title": found.title, "text": found.text} for found in batch]
            writer.write_batch(pa.RecordBatch.from_pylist(documents, schema))
            for words in _words([f"{found.title}\n{found.text}" for found in batch], stopwords):
                tokens.append([vocabulary.setdefault(word, len(vocabulary)) for word in words])
    if not vocabulary:
        raise ConfigError(f"search: {path} has no words to search")
    index = bm25s.BM25()
    index.index((tokens, vocabulary), show_progress=False)
    index.save(home, show_progress=False)


def _words(texts: list[str], stopwords: str) -> list[list[str]]:
    import bm25s

    given: Any = stopwords or []
    found: Any = bm25s.tokenize(
        texts, token_pattern=WORD, stopwords=given, return_ids=False, show_progress=False
    )
    return list(found)


def _read_passages(path: Path) -> Iterator[Passage]:
    """In order. ConfigError names the document that has none."""
    documents = _parquet(path) if path.suffix == ".parquet" else _jsonl(path)
    for number, document in enumerate(documents, start=1):
        try:
            yield passage(document)
        except ValueError as error:
            raise ConfigError(f"search: {path}, document {number}: {error}") from None


def _parquet(path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
        columns = [name for name in file.schema_arrow.names if name in (*TEXTS, "title")]
        for batch in file.iter_batches(BATCH, columns=columns):
            yield from batch.to_pylist()
    except pa.ArrowException as error:
        raise ConfigError(f"search: {path} is no parquet file ({one_line(error)})") from None


def _jsonl(path: Path) -> Iterator[dict[str, Any]]:
    decode = msgspec.json.Decoder(dict[str, Any]).decode
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise ConfigError(f"search: {path}, line {number}: {one_line(error)}") from None


def _source(source: str) -> Path:
    path = Path(source).expanduser().resolve()
    if path.suffix not in (".parquet", ".jsonl"):
        raise ConfigError(f"search: corpus {source!r} must be a .parquet or a .jsonl file")
    if not path.is_file():
        raise ConfigError(f"search: there is no corpus {source}; set corpus to a file")
    return path


def _check_language(stopwords: str) -> None:
    try:
        _words([""], stopwords)
    except ValueError as error:
        raise ConfigError(f"search: stopwords {stopwords!r}: {one_line(error)}") from None


def _cache(cache: str) -> Path:
    if cache:
        return Path(cache).expanduser().resolve()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "asyncrl" / "search"


def _key(path: Path, stopwords: str) -> str:
    import bm25s

    stat = path.stat()
    facts = (FORMAT, bm25s.__version__, str(path), stat.st_size, stat.st_mtime_ns, stopwords)
    return f"{path.stem}-{xxhash.xxh3_64_hexdigest(repr(facts).encode())}"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """The kernel releases the lock when its holder dies."""
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
