from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from asyncrl.errors import ConfigError
from asyncrl.remote import RemoteError, close_sessions
from asyncrl.tools import search as search_module
from asyncrl.tools.base import Tool
from asyncrl.tools.search import (
    Passage,
    SearchError,
    open_corpus,
    read_passage,
    search,
    search_remote,
    write_reply,
)
from tests.fakes.sglang import Script, scripted

ROWS: list[dict[str, Any]] = [
    {"id": "0", "title": "Otters", "text": "Otters hold hands while they sleep in the kelp."},
    {"id": "1", "title": "Badgers", "text": "A badger digs a sett of many chambers."},
    {"id": "2", "title": "Kelp", "text": "Kelp grows half a metre a day."},
    {"id": "3", "title": "The number 7", "text": "Seven is 7."},
]


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    path = tmp_path / "animals.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def look_up(subject: Tool, query: str) -> str:
    reply: str = subject.function(**subject.decode(json.dumps({"query": query})))
    return reply


def titles(passages: list[Passage]) -> list[str]:
    return [passage.title for passage in passages]


@pytest.mark.parametrize(
    ("query", "best"),
    [
        ("how do otters sleep?", "Otters"),
        ("KELP growth a day", "Kelp"),
        ("sett", "Badgers"),
        ("7", "The number 7"),
    ],
)
def test_the_best_passage_comes_first(jsonl: Path, tmp_path: Path, query: str, best: str) -> None:
    assert open_corpus(str(jsonl), str(tmp_path / "cache")).search(query, 3)[0].title == best


def test_passages_that_share_no_word_are_left_out(jsonl: Path, tmp_path: Path) -> None:
    corpus = open_corpus(str(jsonl), str(tmp_path / "cache"))
    assert set(titles(corpus.search("kelp", 10))) == {"Otters", "Kelp"}
    assert corpus.search("xylophone", 10) == corpus.search("", 10) == corpus.search("the", 10) == []


@given(
    hnp.arrays(np.float32, st.integers(1, 30), elements=st.sampled_from([0.0, 0.5, 1.0, 2.5])),
    st.integers(1, 9),
)
def test_the_best_are_those_that_a_sort_gives(scores: np.ndarray, k: int) -> None:
    in_order = sorted(range(len(scores)), key=lambda row: -scores[row])
    assert search_module._best_indices(scores, k) == [row for row in in_order[:k] if scores[row] > 0]


def test_parquet_and_jsonl_give_the_same(jsonl: Path, tmp_path: Path) -> None:
    parquet = tmp_path / "animals.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), parquet)
    cache = str(tmp_path / "cache")
    jsonl_corpus = open_corpus(str(jsonl), cache)
    parquet_corpus = open_corpus(str(parquet), cache)
    assert jsonl_corpus.search("otters in kelp", 3) == parquet_corpus.search("otters in kelp", 3)
    assert len(jsonl_corpus) == len(parquet_corpus) == len(ROWS)


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"title": "T", "text": "body"}, Passage("T", "body")),
        ({"contents": '"T"\nbody\nmore'}, Passage("T", "body\nmore")),
        ({"contents": "first\nsecond"}, Passage("", "first\nsecond")),
        ({"contents": '"only a quotation"'}, Passage("", '"only a quotation"')),
        ({"text": "body", "title": None}, Passage("", "body")),
    ],
)
def test_shapes_of_a_document(document: dict[str, Any], expected: Passage) -> None:
    assert read_passage(document) == expected


def test_replies_are_numbered_and_bounded() -> None:
    passages = [Passage("Otters", "x" * 9), Passage("", "short")]
    assert write_reply(passages, 4) == "[1] Otters\nxxxx…\n\n[2] shor…"
    assert write_reply([], 4) == "no passage was found"


def test_the_tool(jsonl: Path, tmp_path: Path) -> None:
    tool = search(
        corpus=str(jsonl), k=1, max_chars=6, cache=str(tmp_path), name="animals", description="Find animals."
    )
    assert look_up(tool, "otters") == "[1] Otters\nOtters…"
    function = tool.schema["function"]
    assert (function["name"], function["description"]) == ("animals", "Find animals.")
    assert function["parameters"]["required"] == ["query"]
    with pytest.raises(msgspec.ValidationError, match="queries"):
        tool.decode('{"queries": ["otters"]}')


# -- the index on disk -----------------------------------------------------------------------------------


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Every index that is built from here on."""
    built_directories: list[Path] = []
    build = search_module._build_index

    def counted(path: Path, home: Path, stopwords: str) -> None:
        built_directories.append(home)
        build(path, home, stopwords)

    monkeypatch.setattr(search_module, "_build_index", counted)
    return built_directories


def test_the_index_is_built_once_by_whoever_comes_first(
    jsonl: Path, tmp_path: Path, builds: list[Path]
) -> None:
    search_results: list[list[Passage]] = []
    workers = [
        threading.Thread(
            target=lambda: search_results.append(
                open_corpus(str(jsonl), str(tmp_path / "c")).search("sett", 1)
            )
        )
        for _ in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert [titles(passages) for passages in search_results] == [["Badgers"]] * 4
    assert len(builds) == 1


def test_a_changed_corpus_is_indexed_again(jsonl: Path, tmp_path: Path, builds: list[Path]) -> None:
    cache = str(tmp_path / "cache")
    before = open_corpus(str(jsonl), cache)
    jsonl.write_text('{"text": "a new passage of voles"}\n')
    assert len(open_corpus(str(jsonl), cache).search("voles", 1)) == 1
    assert before.search("voles", 1) == []
    assert titles(before.search("sett", 1)) == ["Badgers"]  # what it has mapped stays
    assert len(builds) == 2


def test_uses_of_one_corpus_share_it(jsonl: Path, tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    first_corpus = open_corpus(str(jsonl), cache)
    assert open_corpus(str(jsonl), cache) is first_corpus
    assert open_corpus(str(jsonl), cache, stopwords="") is not first_corpus


def test_an_open_corpus_of_many_passages_takes_little_memory(tmp_path: Path) -> None:
    """Each worker has it: of 21 million passages a list of their places would take 1 GB."""
    path = tmp_path / "many.jsonl"
    count = 20_000
    path.write_text('{"text": "kelp"}\n' * count)
    open_corpus(str(path), str(tmp_path / "cache"))
    tracemalloc.start()
    try:
        opened = open_corpus(str(path), str(tmp_path / "cache"))
        traced_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(opened) == count and opened.search("kelp", 1) == [Passage("", "kelp")]
    assert traced_bytes < 20 * count


def test_a_damaged_index_is_built_again(jsonl: Path, tmp_path: Path, builds: list[Path]) -> None:
    open_corpus(str(jsonl), str(tmp_path / "cache"))
    (home,) = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    files = sorted(path.name for path in home.iterdir())
    assert len(files) >= 5
    for name in files:
        os.truncate(home / name, (home / name).stat().st_size // 2)
        assert titles(open_corpus(str(jsonl), str(tmp_path / "cache")).search("sett", 1)) == ["Badgers"]
    assert len(builds) == 1 + len(files)


def test_searches_side_by_side_read_their_own_passages(tmp_path: Path) -> None:
    path = tmp_path / "many.jsonl"
    path.write_text("".join(f'{{"title": "{i}", "text": "w{i} {"x " * 500}"}}\n' for i in range(40)))
    corpus = open_corpus(str(path), str(tmp_path / "cache"))
    misread_numbers: list[int] = []

    def reads(first: int) -> None:
        misread_numbers.extend(
            i for i in range(first, first + 3000) if corpus._read_passage(i % 40).title != str(i % 40)
        )

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(reads, range(4)))
    finally:
        sys.setswitchinterval(interval)
    assert not misread_numbers


def test_an_index_that_could_not_be_finished_leaves_nothing(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "fine"}\n{"words": 1}\n')
    with pytest.raises(
        ConfigError,
        match=r"bad.jsonl, document 2: the field text or contents is missing; the fields are words",
    ):
        open_corpus(str(bad), str(tmp_path / "cache"))
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("missing.jsonl", None, "no such corpus"),
        ("corpus.txt", "a,b", "unknown data format"),
        ("broken.jsonl", '{"text": "a"}\n{oops\n', "line 2"),
        ("list.jsonl", "[1]\n", "expected an object, not list"),
        (
            "halves.jsonl",
            '{"text": "a"}\n{"text": "\\ud800"}\n',
            "document 2: the text contains .*ud800.*half of a character",
        ),
        (
            "halves.json",
            '[{"text": "a", "title": "\\udc00"}]',
            "document 1: the text contains .*udc00.*half of a character",
        ),
        ("empty.jsonl", "", "is empty"),
        ("wordless.jsonl", '{"text": "?"}', "no words to search"),
        ("fake.parquet", "PAR?", "not readable as parquet"),
        ("other.parquet", [{"question": "?"}], "document 1: the field text or contents is missing"),
    ],
)
def test_what_is_no_corpus(tmp_path: Path, name: str, content: Any, complaint: str) -> None:
    path = tmp_path / name
    if isinstance(content, str):
        path.write_text(content)
    elif content is not None:
        pq.write_table(pa.Table.from_pylist(content), path)
    with pytest.raises(ConfigError, match=complaint):
        search(corpus=str(path), cache=str(tmp_path / "cache"))


def test_options_are_checked(jsonl: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="k and max_chars must be at least 1"):
        search(corpus=str(jsonl), k=0, cache=str(tmp_path))
    with pytest.raises(ConfigError, match="stopwords: 'klingon'"):
        search(corpus=str(jsonl), stopwords="klingon", cache=str(tmp_path))
    with pytest.raises(ConfigError, match="set cache"):
        search(corpus=str(jsonl), cache=str(jsonl / "no-directory"))
    with pytest.raises(ConfigError, match="must begin with http"):
        search_remote(url="localhost:8000/retrieve")


# -- a retrieval server ----------------------------------------------------------------------------------
# (refusals, repetitions and bounds: tests/unit/remote)


async def ask(script: Script, answer: str, **options: Any) -> str:
    """The tool's reply to one query, from a server that answers so."""
    script.says("/retrieve", 200, answer.encode())
    try:
        reply: str = await search_remote(url=f"{script.url}/retrieve", **options).function(query="otters")
        return reply
    finally:
        await close_sessions()


def hit(contents: str) -> dict[str, Any]:
    return {"document": {"id": "1", "contents": contents}, "score": 2.5}


async def test_search_r1s_contract() -> None:
    result = {"result": [[hit('"Otters"\nThey sleep.'), hit("plain"), hit("too many")]]}
    async with scripted() as script:
        assert await ask(script, json.dumps(result), k=2) == "[1] Otters\nThey sleep.\n\n[2] plain"
        assert script.requests == [
            ("/retrieve", {"queries": ["otters"], "topk": 2, "return_scores": True}, "")
        ]


@pytest.mark.parametrize(
    "answer",
    [
        "{}",
        '{"result": []}',
        '{"result": [[], []]}',
        '{"result": [[{"document": {"title": "x"}}]]}',
        "no JSON",
        "[1]",
    ],
)
async def test_another_contract_is_an_error(answer: str) -> None:
    async with scripted() as script:
        with pytest.raises(SearchError, match="does not follow Search-R1's protocol"):
            await ask(script, answer)


async def test_a_silent_or_busy_server_costs_the_timeout() -> None:
    async def never(_: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async with scripted() as script:
        script.answers["/retrieve"] = never
        tool = search_remote(url=f"{script.url}/retrieve", timeout=0.2)
        with pytest.raises(RemoteError, match=r"no answer within 0.2 s"):
            await tool.function(query="otters")
        script.says("/retrieve", 503)
        tool = search_remote(url=f"{script.url}/retrieve", retries=0)
        with pytest.raises(RemoteError, match="status 503, after 1 attempt"):
            await tool.function(query="otters")
        await close_sessions()
