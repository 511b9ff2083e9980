"""The command behind the table of families in docs/dev/model_matrix.md."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.tiny_families import FAMILIES
from tools import model_matrix
from tools.model_matrix import BEGIN_MARKER, COLUMNS, NOT_REACHED, NOT_RUN, SERVER_COLUMN

TOOL = Path(model_matrix.__file__)


def test_the_page_has_all_families_and_columns():
    assert model_matrix.check_page(model_matrix.DOCS_PAGE.read_text()) == ""


@pytest.mark.parametrize(
    ("original", "replacement", "problem"),
    [
        (BEGIN_MARKER, "", "lacks the line"),
        ("| `gemma3` (", "| `gemma5` (", "differs in gemma3, gemma5"),
        (" LoRA |", " adapters |", "has the columns"),
    ],
)
def test_another_page_is_refused(original, replacement, problem):
    page = model_matrix.DOCS_PAGE.read_text()
    table_start = page.index(BEGIN_MARKER)
    changed_page = page[:table_start] + page[table_start:].replace(original, replacement, 1)

    assert problem in model_matrix.check_page(changed_page)


@pytest.mark.full
def test_a_row_says_what_is_done_with_a_composite_model(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    command = [sys.executable, str(TOOL), "--json", "--families", "qwen3_5"]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    row = json.loads(completed.stdout)

    assert list(row)[1:] == list(COLUMNS)
    assert row["class"] == "`Qwen3_5ForConditionalGeneration`"
    assert row["trains"].startswith("text part: 55 tensors")
    assert (
        row["frozen"].startswith("`model.visual`: 21 tensors")
        and "passed on, MTP: 15 tensors" in row["frozen"]
    )
    assert row["rows"] == "packed, tree"
    assert row[SERVER_COLUMN] == NOT_RUN
    assert row["export"] == "same names and class, rest bit-equal"


def test_a_row_says_which_columns_its_time_did_not_reach():
    row = model_matrix.family_row("qwen3", list(COLUMNS), with_server=False, seconds=0.01)

    assert row["family"] == f"`qwen3` ({FAMILIES['qwen3'].published})"
    assert {row[column] for column in COLUMNS} == {NOT_REACHED}


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (
            "has log-probs that differ: layers.0.linear_attn (Qwen3_5GatedDeltaNet) mixes rows",
            "layers.0.linear_attn (Qwen3_5GatedDeltaNet) mixes rows",
        ),
        (
            "has attention with s_aux: layers.0.self_attn (GptOssAttention)",
            "has attention with s_aux: layers.0.self_attn (GptOssAttention)",
        ),
        ("fails with RuntimeError", "fails with RuntimeError"),
    ],
)
def test_the_reason_against_packing_is_a_layer(problem, reason):
    assert model_matrix.short_reason(problem) == reason
