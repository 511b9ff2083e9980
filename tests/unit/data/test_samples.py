from __future__ import annotations

import codecs
import csv
import json
import math
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl.config import DataConfig
from asyncrl.data import RowLayout, load_samples
from asyncrl.data.rows import read_rows
from asyncrl.data.samples import MAX_SAMPLE_BYTES, read_samples
from asyncrl.errors import ConfigError
from asyncrl.types import Message, Sample, ToolCall

DATA = Path(__file__).resolve().parents[3] / "examples/multiturn/calculator/data"
ROW: dict[str, Any] = {
    "data_source": "chain_math",
    "prompt": [{"role": "user", "content": "1 plus 1?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 7},
}


def write(path: Path, **changes: Any) -> Path:
    """One row, with columns changed, or left out where None is given."""
    row = {key: value for key, value in (ROW | changes).items() if value is not None}
    pq.write_table(pa.table({key: [value] for key, value in row.items()}), path)
    return path


def test_the_examples_data() -> None:
    train, test = (load_samples(DATA / f"{split}.parquet") for split in ("train", "test"))
    assert (len(train), len(test)) == (4096, 1024)
    assert [sample.row for sample in test] == list(range(1024))
    assert not {sample.prompt for sample in train} & {sample.prompt for sample in test}
    assert train[0].extra_info["operations"] >= 1


def test_nested_columns(tmp_path: Path) -> None:
    (sample,) = load_samples(write(tmp_path / "a.parquet"))
    assert sample.prompt == (Message("user", "1 plus 1?"),)
    assert (sample.ground_truth, sample.ability, sample.extra_info) == ("2", "math", {"index": 7})


def test_json_text_columns_and_other_ground_truths(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.parquet",
        prompt=json.dumps(ROW["prompt"]),
        reward_model=json.dumps({"ground_truth": {"numbers": [1, 2]}}),
        extra_info=None,
        ability=None,
    )
    (sample,) = load_samples(path)
    assert sample.prompt == (Message("user", "1 plus 1?"),)
    assert (sample.ground_truth, sample.ability, sample.extra_info) == ({"numbers": [1, 2]}, "", {})


TEXT = pa.array([b"128"], pa.binary())
DECIMAL = pa.decimal128(4, 1)
MAP = pa.map_(pa.string(), pa.int64())
TALK_IN_BYTES = pa.array([[{"role": b"user", "content": b"1 plus 1?"}]])


@pytest.mark.parametrize(
    ("column", "json_text"),
    [
        (TEXT, '"128"'),
        (TEXT.cast(pa.large_binary()), '"128"'),
        (TEXT.cast(pa.binary(3)), '"128"'),
        (TEXT.dictionary_encode(), '"128"'),
        (pa.array(["Zürich".encode()]), '"Zürich"'),
        (pa.array([[b"a", b"b"]]), '["a", "b"]'),
        (pa.array([{"target": [b"a"], "level": 3}]), '{"target": ["a"], "level": 3}'),
        (pa.array([Decimal("128.00")]), "128"),
        (pa.array([Decimal("0.50")]), "0.5"),
        (pa.array([Decimal("0.12345678901234567890")]), '"0.1234567890123456789"'),
        (pa.array([[(b"target", b"a")]], pa.map_(pa.binary(), pa.binary())), '{"target": "a"}'),
        (pa.array([[[(1, Decimal("2.0"))]]], pa.list_(pa.map_(pa.int64(), DECIMAL))), '[{"1": 2}]'),
        (pa.array([{"m": [("k", None)]}], pa.struct({"m": MAP})), '{"m": {"k": null}}'),
        (pa.array([date(2026, 1, 31)]), '"2026-01-31"'),
        (pa.array([datetime(2026, 1, 31, 12)]), '"2026-01-31 12:00:00"'),
        (pa.array([time(12, 30)]), '"12:30:00"'),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else "",
)  # fmt: skip
def test_parquet_columns_of_other_types_are_values_of_json(
    tmp_path: Path, column: pa.Array, json_text: str
) -> None:
    columns = {"prompt": TALK_IN_BYTES, "ground_truth": column, "data_source": pa.array([b"spark"])}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    (sample,) = load_samples(tmp_path / "a.parquet")
    assert sample.ground_truth_json == json_text
    assert (sample.prompt, sample.data_source) == ((Message("user", "1 plus 1?"),), "spark")


NO_TEXT = b"\xff\xfe"


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"reward_model": {"ground_truth": NO_TEXT}}, "ground_truth column .*binary data that is not UTF-8"),
        ({"reward_model": {"ground_truth": [NO_TEXT]}}, "sample 0: the ground_truth column .*binary data"),
        ({"extra_info": {"image": NO_TEXT}}, "extra_info .*binary data that is not UTF-8 text; write"),
        ({"data_source": NO_TEXT}, "sample 0: the data_source column contains binary data"),
        ({"prompt": NO_TEXT}, "the prompt column must be text, .* not bytes"),
        ({"prompt": [{"role": "user", "content": NO_TEXT}]}, "the prompt column must contain messages"),
    ],
)  # fmt: skip
def test_binary_data_that_are_no_text_are_refused_where_a_sample_needs_them(
    tmp_path: Path, changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_samples(write(tmp_path / "a.parquet", **changes))
    (sample,) = load_samples(write(tmp_path / "b.parquet", photo=NO_TEXT))  # nothing reads that column
    assert sample.ground_truth == "2"


def test_values_of_a_users_data_set_are_values_of_json_too(tmp_path: Path) -> None:
    code = """
import numpy
def rows(path):
    yield {"prompt": "?", "ground_truth": numpy.array([b"128"]), "extra_info": {"level": numpy.int64(3)}}
    yield {"prompt": "?", "ground_truth": {1, 2}}
"""
    (tmp_path / "mine.py").write_text(code)
    config = DataConfig("p", dataset=f"{tmp_path}/mine.py:rows")
    samples = read_samples(config, "p", "train", RowLayout(truth="a reward"))
    first = next(samples)
    assert (first.ground_truth, first.extra_info) == (["128"], {"level": 3})
    with pytest.raises(ConfigError, match=r"sample 1: the ground_truth column .* a value of type set; write"):
        next(samples)


def test_missing_numbers_of_pandas_are_null(tmp_path: Path) -> None:
    (sample,) = load_samples(write(tmp_path / "a.parquet", extra_info={"level": math.nan, "text": "NaN"}))
    assert sample.extra_info == {"level": None, "text": "NaN"}
    with pytest.raises(ConfigError, match="sample 0: no ground truth"):
        load_samples(write(tmp_path / "b.parquet", reward_model={"ground_truth": math.nan}))


def test_messages_of_different_shapes(tmp_path: Path) -> None:
    prompt = [{"role": "system", "content": "Be brief.", "name": "boss"}, {"role": "user", "content": "?"}]
    (sample,) = load_samples(write(tmp_path / "a.parquet", prompt=prompt))
    assert sample.prompt == (Message("system", "Be brief.", name="boss"), Message("user", "?"))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"prompt": None},
            "no prompt column .found: .*ability.*; map .*{prompt: NAME, ground_truth: NAME}",
        ),
        ({"prompt": []}, "sample 0: the prompt column must be"),
        (
            {"prompt": [{"content": "no role"}]},
            "0: the prompt column has a message with the keys content; a message needs role",
        ),
        ({"prompt": [{"role": "human", "content": "?"}]}, "the role 'human'; use one of system, .*tool"),
        ({"prompt": [{"role": "user", "content": 3}]}, "sample 0: the prompt column must contain .*content"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}]},
            "a part of type image without an image",
        ),
        ({"prompt": 3}, "sample 0: the prompt column must be"),
        ({"reward_model": {"style": "rule"}}, "sample 0: no ground truth for a reward: neither"),
        ({"reward_model": "{"}, "sample 0: the reward_model column contains text that is not JSON"),
        ({"extra_info": 5}, "sample 0: the extra_info column must be an object"),
    ],
)
def test_wrong_shapes_are_one_line(tmp_path: Path, changes: dict[str, Any], complaint: str) -> None:
    path = write(tmp_path / "a.parquet", **changes)
    with pytest.raises(ConfigError, match=complaint) as caught:
        load_samples(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("text", ["What is 1 + 1?", "[1, 2, 3] in reverse?", "[not JSON"])
def test_a_prompt_of_plain_text_is_the_users_message(tmp_path: Path, text: str) -> None:
    (sample,) = load_samples(write(tmp_path / "a.parquet", prompt=text))
    assert sample.prompt == (Message("user", text),)


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
TALK: list[dict[str, Any]] = [
    {"role": "developer", "content": [{"type": "text", "text": "Use "}, {"type": "text", "text": "add."}]},
    {"role": "user", "content": "1 + 2?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "I add."},
    {"role": "tool", "tool_call_id": "c1", "content": "3"},
    {"role": "assistant", "content": "It is 3."},
]


def load_demonstrations(path: Path) -> list[Sample]:
    return list(read_samples(DataConfig(str(path)), str(path), "train", RowLayout(demonstrations=True)))


def write_jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "json"])
def test_demonstrations_are_whole_conversations(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    tools = [{"type": "function", "function": {"name": "add"}}]
    if suffix == "parquet":
        flat = [TALK[0] | {"content": "Use add."}, *TALK[1:]]  # a column has one type
        pq.write_table(pa.table({"messages": [flat], "tools": [json.dumps(tools)]}), path)
    else:
        write_jsonl(path, {"messages": TALK, "tools": tools})
    (sample,) = load_demonstrations(path)
    call = ToolCall("add", '{"a": 1, "b": 2}', "c1")
    assert sample.prompt == (
        Message("system", "Use add."),
        Message("user", "1 + 2?"),
        Message("assistant", tool_calls=(call,), reasoning="I add."),
        Message("tool", "3", tool_call_id="c1", name="add"),
        Message("assistant", "It is 3."),
    )
    assert sample.extra_info["tool_schemas"] == tools
    assert (sample.data_source, sample.ground_truth) == ("a", None)


def test_null_arguments_as_json_text_stay_and_ids_may_be_numbers(tmp_path: Path) -> None:
    call = {"id": 1, "function": {"name": "add", "arguments": '{"a": null, "b": 2}'}}
    talk = [TALK[1], TALK[2] | {"tool_calls": [call]}, TALK[3] | {"tool_call_id": 1}]
    (sample,) = load_demonstrations(write_jsonl(tmp_path / "a.jsonl", {"messages": talk}))
    assert sample.prompt[1].tool_calls == (ToolCall("add", '{"a": null, "b": 2}', "1"),)
    assert sample.prompt[2] == Message("tool", "3", tool_call_id="1", name="add")


def test_a_prompt_and_its_response_are_a_demonstration(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", {"prompt": "1 + 2?", "response": "3"})
    (sample,) = load_demonstrations(path)
    assert sample.prompt == (Message("user", "1 + 2?"), Message("assistant", "3"))
    assert sample.given == 1


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"messages": TALK[:2]}, "sample 0: no assistant message"),
        ({"prompt": "?"}, r"no messages column, and no prompt and response columns .found: prompt"),
        ({"messages": [{"role": "gpt", "content": "x"}]}, "the role 'gpt'"),
        (
            {"messages": [TALK[2] | {"tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}]},
            "tool call",
        ),
        (
            {"messages": [TALK[1], TALK[2] | {"tool_calls": ["add"]}]},
            "0: the messages column has a tool call",
        ),
        ({"messages": [TALK[1], TALK[2] | {"tool_calls": [{"function": "add"}]}]}, "has a tool call that"),
        ({"messages": TALK, "tools": "add"}, "sample 0: the tools column must be a list of schemas"),
        (
            {"messages": TALK, "tools": {"name": "add"}},
            "sample 0: the tools column must be a list of schemas",
        ),
    ],
)
def test_what_is_no_demonstration_is_one_line(tmp_path: Path, row: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_demonstrations(write_jsonl(tmp_path / "a.jsonl", row))


@pytest.mark.parametrize(
    ("last", "complaint"),
    [
        ({"content": " "}, "0: the prompt column ends with an assistant message that has no text"),
        ({"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}, "message that has tool calls"),
    ],
)
def test_a_prompt_whose_last_words_cannot_be_continued_is_refused(
    tmp_path: Path, last: dict[str, Any], complaint: str
) -> None:
    row = {"prompt": [{"role": "user", "content": "?"}, {"role": "assistant", **last}], "ground_truth": 1}
    with pytest.raises(ConfigError, match=complaint):
        load_samples(write_jsonl(tmp_path / "a.jsonl", row))


def test_all_formats_give_the_same_samples(tmp_path: Path) -> None:
    texts = {key: json.dumps(ROW[key]) for key in ("prompt", "reward_model", "extra_info")}
    rows = [ROW | {"ability": text} for text in ("math", 'a, "b"\nc', "ä")]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    write_jsonl(tmp_path / "a.jsonl", *rows)
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=1))
    write_jsonl(tmp_path / "lines.json", *rows)
    with (tmp_path / "a.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, list(ROW))
        table.writeheader()
        table.writerows(row | texts for row in rows)
    expected = load_samples(tmp_path / "a.parquet")
    assert [sample.ability for sample in expected] == ["math", 'a, "b"\nc', "ä"]
    for name in ("a.jsonl", "a.json", "lines.json", "a.csv"):
        assert load_samples(tmp_path / name) == expected, name
        marked = tmp_path / f"marked-{name}"
        marked.write_bytes(codecs.BOM_UTF8 + (tmp_path / name).read_bytes())
        assert load_samples(marked) == expected, f"{name} that begins with a byte order mark"


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("a.jsonl", '{"a": 1}\n{"a": ', "not readable as jsonl .*line 2"),
        ("a.jsonl", "3\n", "sample 0: expected an object, not int"),
        ("a.jsonl", "\n", "the data set is empty"),
        ("a.json", "[1, 2", "not readable as json"),
        ("a.jsonl", '{"a": 1}\n' + "[" * 5000, "line 2: a value is nested too deeply"),
        ("a.json", '[{"a": 1},' + "[" * 5000, "a value is nested too deeply"),
        ("a.jsonl", '\ufffe{"a": 1}', "in UTF-16; save the file as UTF-8"),
        ("a.csv", "a,b\n1,2,3\n", "line 2: more values"),
        ("a.txt", "hello", "use a file with one of the suffixes .parquet, .jsonl, .json, .csv"),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path: Path, name: str, text: str, complaint: str) -> None:
    (tmp_path / name).write_bytes(text.encode("utf-16-le" if "\ufffe" in text else "utf-8"))
    with pytest.raises(ConfigError, match=complaint) as caught:
        list(read_rows(tmp_path / name))
    assert str(tmp_path / name) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_what_python_writes_for_missing_numbers_is_null(tmp_path: Path, name: str) -> None:
    row = ROW | {"extra_info": {"a": math.nan, "b": [math.inf, -math.inf], "c": "NaN"}}
    (tmp_path / name).write_text(json.dumps([row] if name == "a.json" else row))
    (sample,) = load_samples(tmp_path / name)
    assert sample.extra_info == {"a": None, "b": [None, None], "c": "NaN"}


NESTED = json.loads("[" * 300 + "]" * 300)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"prompt": "a\ud800"}, r"'\\ud800', a lone surrogate"),
        ({"prompt": [{"role": "user", "content": "\udfff"}]}, "half of a character"),
        ({"prompt": json.dumps([{"role": "user", "content": "\udfff"}])}, "half of a character"),
        ({"ground_truth": "\ud800"}, "half of a character"),
        ({"data_source": "\ud800"}, "half of a character"),
        ({"extra_info": {"\ud800": 1}}, "half of a character"),
        ({"extra_info": json.dumps({"a": ["\ud800"]})}, "half of a character"),
        ({"extra_info": {"a": NESTED}}, "extra_info column is nested deeper than 200 levels"),
        ({"extra_info": "[" * 100_000}, "extra_info column contains text that is not JSON"),
        ({"ground_truth": NESTED}, "ground_truth column is nested deeper than 200 levels"),
        (
            {"extra_info": {"a": "x" * MAX_SAMPLE_BYTES}},
            r"the sample takes 16,77[78],\d{3} bytes, but at most 16,777,216",
        ),
        (
            {"prompt": "x" * MAX_SAMPLE_BYTES},
            r"the sample takes 16,77[78],\d{3} bytes, but at most 16,777,216",
        ),
    ],
)
def test_rows_that_no_process_could_be_sent_are_named(
    tmp_path: Path, changes: dict[str, Any], complaint: str
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ROW, ROW | changes)
    with pytest.raises(ConfigError, match=rf"a\.jsonl, sample 1: .*{complaint}") as caught:
        load_samples(path)
    assert "\n" not in str(caught.value) and str(caught.value).isprintable()


def test_a_prompt_of_brackets_is_text(tmp_path: Path) -> None:
    (sample,) = load_samples(write_jsonl(tmp_path / "a.jsonl", ROW | {"prompt": "[" * 100_000}))
    assert sample.prompt == (Message("user", "[" * 100_000),)


def test_missing_malformed_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_samples(tmp_path / "none.parquet")
    (tmp_path / "text.parquet").write_text("hello")
    with pytest.raises(ConfigError, match="not readable as parquet"):
        load_samples(tmp_path / "text.parquet")
    empty = pa.table({key: [value] for key, value in ROW.items()}).slice(0, 0)
    pq.write_table(empty, tmp_path / "empty.parquet")
    with pytest.raises(ConfigError, match="empty"):
        load_samples(tmp_path / "empty.parquet")


SCHEMA = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize(
    ("columns", "complaint"),
    [
        ({"images": ["a.png"]}, "the texts have 0 <image> marks, but the images column has 1 images"),
        ({"videos": [{"path": "a.mp4"}]}, "the videos column is not empty; only text and images"),
        ({"tools": [SCHEMA]}, "list the tools in rollout.tools"),
        ({"tools": json.dumps([SCHEMA])}, "list the tools in rollout.tools"),
        ({"images": [], "videos": None, "tools": "[]"}, ""),
    ],
)
def test_columns_that_would_be_ignored_in_earnest_are_refused(
    tmp_path: Path, columns: dict[str, Any], complaint: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(ROW | columns))
    if not complaint:
        assert len(load_samples(path)) == 1
        return
    with pytest.raises(ConfigError, match=f"a.jsonl, sample 0: .*{complaint}"):
        load_samples(path)


def test_an_agent_may_take_the_schemas(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(ROW | {"tools": [SCHEMA]}))
    layout = RowLayout({"extra_info.schemas": "tools"})
    [sample] = read_samples(DataConfig(str(path)), str(path), "train", layout)
    assert sample.extra_info == {"index": 7, "schemas": [SCHEMA]}


def test_values_of_a_sample_are_decoded_for_each_reader() -> None:
    sample = Sample(0, "", (), '["Oslo"]', extra_info_json='{"stock": {"apple": 3}}')
    sample.ground_truth.append("Rome")
    sample.extra_info["stock"]["apple"] = 0
    assert (sample.ground_truth, sample.extra_info) == (["Oslo"], {"stock": {"apple": 3}})
    message = msgspec.json.decode(msgspec.json.encode(sample))
    assert message["ground_truth"] == '["Oslo"]' and message["extra_info"] == '{"stock": {"apple": 3}}'
