"""The example of docs/start/own_task.md: its data, its tools and its rewards are as the page says."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.tools import ToolError

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/own_task"
PAGE = (ROOT / "docs/start/own_task.md").read_text()
MAX_WORDS = 2000


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Rows by file, as `make_data.py` writes them."""
    folder = tmp_path_factory.mktemp("own_task")
    subprocess.run([sys.executable, EXAMPLE / "make_data.py"], cwd=folder, check=True, timeout=60)
    return {
        path.stem: [json.loads(line) for line in path.read_text().splitlines()]
        for path in folder.glob("*.jsonl")
    }


def inventory_of(row: dict[str, Any]) -> Any:
    """The object of an episode, with the stock of this row."""
    inventory = runpy.run_path(str(EXAMPLE / "inventory.py"))["Inventory"]()
    inventory.reset(SimpleNamespace(extra_info=row["extra_info"]))
    return inventory


def test_the_page_is_short_and_its_files_are_those_of_the_example() -> None:
    assert len(PAGE.split()) <= MAX_WORDS
    blocks = re.findall(r"^\[`(?P<name>[\w./]+)`\]\(.*?\).*?\n\n```\w+\n(?P<text>.*?)^```", PAGE, re.M | re.S)
    assert len(blocks) >= 3
    for name, text in blocks:
        assert text in (EXAMPLE / name).read_text(), f"{name} differs from the page"


def test_held_out_pairs_are_in_no_other_file(data: dict[str, list[dict[str, Any]]]) -> None:
    """A row is determined by the ordered part and its number: the rest of the stock does not matter."""
    counts = {"train": 512, "test": 128, "demonstrations": 2400}
    assert {name: len(rows) for name, rows in data.items()} == counts

    train, test = (
        {(row["ground_truth"], row["extra_info"]["stock"][row["ground_truth"]]) for row in data[name]}
        for name in ("train", "test")
    )
    demonstrated = {
        (str(call["part"]), call["number"])
        for row in data["demonstrations"]
        for call in [row["messages"][3]["tool_calls"][0]["function"]["arguments"]]
    }
    assert len(test) == 16 and len(train | demonstrated) == 65 and not test & (train | demonstrated)


def test_demonstrations_are_right_and_both_rewards_say_so(data: dict[str, list[dict[str, Any]]]) -> None:
    make_data = runpy.run_path(str(EXAMPLE / "make_data.py"))
    rewards = runpy.run_path(str(EXAMPLE / "rewards.py"))
    for seed, demonstration in zip(range(10_000, 10_100), data["demonstrations"], strict=False):
        row = make_data["order"](seed)
        inventory = inventory_of(row)
        prompt, *turns, answer = demonstration["messages"]
        assert [prompt] == row["prompt"] and answer["content"] == "Done."
        for turn, reply in zip(turns[::2], turns[1::2], strict=True):
            call = turn["tool_calls"][0]["function"]
            assert str(getattr(inventory, call["name"])(**call["arguments"])) == reply["content"]

        seen = row["extra_info"] | {"agent_result": inventory.result()}
        assert rewards["partial"]("test", "Done.", row["ground_truth"], seen)["score"] == 1.0
        assert rewards["exact"]("test", "Done.", row["ground_truth"], seen) == 1.0


def test_partial_credit_is_for_steps_on_the_way() -> None:
    rewards = runpy.run_path(str(EXAMPLE / "rewards.py"))
    row = {"extra_info": {"stock": {"1": 4, "2": 5}}}
    inventory = inventory_of(row)

    def scores() -> tuple[float, float]:
        seen = row["extra_info"] | {"agent_result": inventory.result()}
        return (
            rewards["exact"]("test", "", "1", seen),
            pytest.approx(rewards["partial"]("test", "", "1", seen)["score"]),
        )

    assert scores() == (0.0, 0.0)
    inventory.count(part=2)
    assert scores() == (0.0, 0.0), "another part was counted"
    inventory.count(part=1)
    assert scores() == (0.0, 0.3)
    inventory.take(part=1, number=2)
    assert scores() == (0.0, 0.65)
    with pytest.raises(ToolError, match="not so many"):
        inventory.take(part=1, number=3)
    inventory.take(part=2, number=1)
    assert scores() == (0.0, 0.3), "another part was touched"
