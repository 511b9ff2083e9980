from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl.data import check_same_data, load_samples
from asyncrl.errors import ConfigError
from asyncrl.types import Message

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
    assert json.loads(train[0].extra_info)["operations"] >= 1


def test_nested_columns(tmp_path: Path) -> None:
    (sample,) = load_samples(write(tmp_path / "a.parquet"))
    assert sample.prompt == (Message("user", "1 plus 1?"),)
    assert (sample.ground_truth, sample.ability, sample.extra_info) == ('"2"', "math", '{"index": 7}')


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
    assert (sample.ground_truth, sample.ability, sample.extra_info) == ('{"numbers": [1, 2]}', "", "{}")


def test_messages_of_different_shapes(tmp_path: Path) -> None:
    prompt = [{"role": "system", "content": "Be brief.", "name": "boss"}, {"role": "user", "content": "?"}]
    (sample,) = load_samples(write(tmp_path / "a.parquet", prompt=prompt))
    assert sample.prompt == (Message("system", "Be brief.", name="boss"), Message("user", "?"))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"prompt": None}, "no column prompt .*verl's columns"),
        ({"prompt": "just ask"}, "sample 0: column prompt must be .*plain text"),
        ({"prompt": []}, "sample 0: column prompt must be"),
        ({"prompt": [{"content": "no role"}]}, "sample 0: column prompt must be .*role"),
        ({"prompt": 3}, "sample 0: column prompt must be"),
        ({"reward_model": {"style": "rule"}}, "sample 0: reward_model has no ground_truth"),
        ({"reward_model": "{"}, "sample 0: column reward_model is text, but not JSON"),
        ({"extra_info": 5}, "sample 0: column extra_info must be an object"),
    ],
)
def test_wrong_shapes_are_one_line(tmp_path: Path, changes: dict[str, Any], complaint: str) -> None:
    path = write(tmp_path / "a.parquet", **changes)
    with pytest.raises(ConfigError, match=complaint) as caught:
        load_samples(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


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


def test_a_run_knows_its_samples_and_their_order() -> None:
    samples = load_samples(DATA / "test.parquet")
    kept = check_same_data("d", samples, "")
    assert check_same_data("d", load_samples(DATA / "test.parquet"), kept) == kept
    swapped = [samples[1], samples[0], *samples[2:]]
    for other in (swapped, samples[:-1], [*samples, samples[0]], load_samples(DATA / "train.parquet")):
        with pytest.raises(ConfigError, match=r"\$\.data\.train: d holds other samples"):
            check_same_data("d", other, kept)
