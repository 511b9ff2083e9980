"""docs/configuration.md is what asyncrl/config says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Annotated, Literal

import pytest
from msgspec import Meta

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def docs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_config_docs", ROOT / "tools" / "make_config_docs.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_file_is_up_to_date(docs: ModuleType) -> None:
    assert docs.render() == docs.TARGET.read_text(), "run `make docs`"


def test_types_are_written_for_people(docs: ModuleType) -> None:
    assert docs.type_text(Annotated[int, Meta(ge=1)]) == "int ≥ 1"
    assert docs.type_text(Annotated[float, Meta(gt=0, lt=1)]) == "float > 0, < 1"
    assert docs.type_text(Literal["a", "b"]) == "`a` | `b`"
    assert docs.type_text(int | None) == "int | null"
    assert docs.type_text(list[str]) == "list of str"
