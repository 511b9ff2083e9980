"""A version is compared with the model it is for, by names and shapes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from asyncrl.engines.sglang.loader import Shapes, shapes_of
from asyncrl.errors import ConfigError
from asyncrl.weights.manifest import Layout, TensorSpec
from asyncrl.weights.model_files import INDEX_FILE

OWN = {"a.weight": (2, 3), "b.weight": (4,), "lm_head.weight": (5, 2)}


def layout(**changes: tuple[int, ...] | None) -> Layout:
    tensors = {name: shape for name, shape in (OWN | changes).items() if shape is not None}
    return tuple(TensorSpec(name, shape, "bfloat16") for name, shape in tensors.items())


@pytest.mark.parametrize(
    ("changes", "description"),
    [
        ({}, ""),
        ({"b.weight": None}, "lacks b.weight"),
        ({"c.weight": (1,)}, "has unknown c.weight"),
        ({"a.weight": (3, 2)}, "a.weight has shape (3, 2) instead of (2, 3)"),
        ({"a.weight": None, "x": (1,)}, "lacks a.weight; has unknown x"),
        ({f"x{n}": (1,) for n in range(5)}, "has unknown x0, x1, x2 and 2 more"),
    ],
)
def test_differences_are_named(changes: dict[str, tuple[int, ...] | None], description: str) -> None:
    assert Shapes(OWN).describe_differences(layout(**changes)) == description


def test_a_tied_embedding_may_be_left_out_but_not_have_another_shape() -> None:
    tied = Shapes(OWN, frozenset({"lm_head.weight"}))
    assert tied.describe_differences(layout(**{"lm_head.weight": None})) == ""
    assert "instead of (5, 2)" in tied.describe_differences(layout(**{"lm_head.weight": (6, 2)}))


def test_buffers_in_the_files_of_older_models_are_not_missed(tmp_path: Path) -> None:
    assert shapes_of(str(tmp_path), tied=False, train_vision=False) is None
    save_file(
        {"a": torch.zeros(2), "layers.0.rotary_emb.inv_freq": torch.zeros(4)}, tmp_path / "model.safetensors"
    )
    shapes = shapes_of(str(tmp_path), tied=False, train_vision=False)
    assert shapes is not None and shapes.describe_differences((TensorSpec("a", (2,), "float32"),)) == ""


def test_shapes_come_from_all_files_of_a_model(tmp_path: Path) -> None:
    save_file({"a.weight": torch.zeros(2, 3)}, tmp_path / "model-1.safetensors")
    save_file(
        {"b.weight": torch.zeros(4), "lm_head.weight": torch.zeros(5, 2)}, tmp_path / "model-2.safetensors"
    )
    names = {"a.weight": "model-1", "b.weight": "model-2", "lm_head.weight": "model-2"}
    files = {name: f"{file}.safetensors" for name, file in names.items()}
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": files}))
    assert shapes_of(str(tmp_path), tied=False, train_vision=False) == Shapes(OWN)
    (tmp_path / "model-2.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match="not readable as safetensors"):
        shapes_of(str(tmp_path), tied=False, train_vision=False)
