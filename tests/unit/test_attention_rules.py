"""What a layer asks of an attention function."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from asyncrl.attention_rules import Reach, Scoring, queries_at_positions, read_scoring, unknown_arguments


class Layer(nn.Module):
    """Has the attributes by which layers of transformers tell their rules."""

    def __init__(self, layer_types: list[str] | None = None, **attributes: Any) -> None:
        super().__init__()
        settings = {"layer_types": layer_types, "attention_chunk_size": 16, "sliding_window": 4}
        self.config = type("Config", (), settings)()
        self.layer_idx = 1
        for name, value in attributes.items():
            setattr(self, name, value)


@pytest.mark.parametrize(
    ("layer_kind", "arguments", "reach"),
    [
        ("full_attention", {}, Reach()),
        ("full_attention", {"sliding_window": 7}, Reach(window=7)),
        ("sliding_attention", {"sliding_window": 7}, Reach(window=7)),
        ("sliding_attention", {"sliding_window": None}, Reach()),  # the layer says that it has none
        ("sliding_attention", {}, Reach(window=4)),
        ("chunked_attention", {}, Reach(chunk=16)),
    ],
)
def test_what_the_layer_does_not_pass_is_read_from_its_configuration(
    layer_kind: str, arguments: dict[str, Any], reach: Reach
) -> None:
    sinks = torch.zeros(3)
    passed = arguments | {"s_aux": sinks, "softcap": 2.0, "dropout": 0.0}
    scoring = read_scoring(Layer(["other", layer_kind]), torch.zeros(1, 3, 5, 16), passed)
    assert scoring == Scoring(0.25, reach, 2.0, sinks)
    assert read_scoring(nn.Module(), torch.zeros(16), {"scaling": 3.0}) == Scoring(3.0)


def test_arguments_that_are_off_may_be_ignored() -> None:
    arguments = {
        "dropout": 0.0,
        "output_attentions": False,
        "use_cache": True,
        "sliding_window": 3,
        "position_bias": torch.zeros(1),
        "block": 4,
    }
    assert unknown_arguments(arguments) == ["block", "position_bias"]
    assert unknown_arguments({"dropout": 0.1}) == ["dropout"]


def test_a_reach_begins_at_the_later_of_window_and_chunk() -> None:
    positions = torch.arange(9)
    assert Reach().first_visible(positions).tolist() == [0] * 9
    assert Reach(window=3).first_visible(positions).tolist() == [0, 0, 0, 1, 2, 3, 4, 5, 6]
    assert Reach(chunk=4).first_visible(positions).tolist() == [0, 0, 0, 0, 4, 4, 4, 4, 8]
    assert Reach(window=3, chunk=4).first_visible(positions).tolist() == [0, 0, 0, 1, 4, 4, 4, 5, 8]
    assert Reach(window=3, chunk=4).within(4) == Reach(window=3)
    assert Reach(window=3, chunk=4).within(3) == Reach()


def test_queries_are_scaled_by_positions_in_sequences() -> None:
    def scales(layer: nn.Module, indices: torch.Tensor) -> torch.Tensor:
        """As Llama 4 computes the scales of its queries."""
        return torch.log1p(torch.floor((indices.float() + 1.0) / 4)) * 0.1 + 1.0

    query = torch.randn(2, 3, 10, 8)
    indices = torch.arange(10)
    positions = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3, 4])
    layer = Layer(attn_temperature_tuning=True, use_rope=False, floor_scale=4, attn_scale=0.1)
    scaled = queries_at_positions(layer, query * scales(layer, indices)[:, None], indices, positions)
    torch.testing.assert_close(scaled, query * scales(layer, positions)[:, None])

    for other in (Layer(), Layer(attn_temperature_tuning=True, use_rope=True)):
        assert queries_at_positions(other, query, indices, positions) is query
