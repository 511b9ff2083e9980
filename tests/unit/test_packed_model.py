"""The GPU kit's second folder, a model at 4 bits in groups: packed and unpacked (gpu_kit/four_bits.py)."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fakes.scripts import script

GROUPS = 40


@pytest.fixture(scope="module")
def packed() -> ModuleType:
    return script("four_bits", "gpu_kit")


def on_grid(bits: int) -> torch.Tensor:
    """Weights as a GGUF file had them, rounded to bfloat16 since. Every group uses the ends of its range."""
    scale = torch.rand(GROUPS).mul(0.02).add(0.003).half().float()[:, None]
    if bits == 8:
        digits = torch.randint(-127, 128, (GROUPS, 32))
        digits[:, 0] = 127
        return (digits * scale).bfloat16().view(8, -1)
    digits = torch.randint(0, 16, (GROUPS, 32))
    least = scale * torch.empty(GROUPS, 1).uniform_(-14, -1)
    digits[:, 0], digits[:, 1] = 0, 15
    return (digits * scale + least.half().float()).bfloat16().view(8, -1)


def test_weights_of_a_4_bit_file_come_back_bit_for_bit(
    packed: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(packed, "PART_BYTES", 1000)  # so that there are several
    given = {"layer.weight": on_grid(4), "embed.weight": on_grid(8), "norm.weight": torch.randn(7).bfloat16()}
    model = tmp_path / "model"
    folder = tmp_path / "folder"
    out = tmp_path / "out"
    model.mkdir()
    save_file(given, model / "model.safetensors", {"format": "pt"})
    (model / "config.json").write_text("{}")
    index = packed.pack(model, folder)
    assert index["wrong"] == 0 and index["parts"] > 1
    packed.unpack(folder, out)
    weights = load_file(out / "model.safetensors")
    assert weights.keys() == given.keys()
    assert all(torch.equal(weights[name], given[name]) for name in given)
    assert sorted(file.name for file in out.iterdir()) == ["config.json", "model.safetensors"]

    (folder / "part-0").write_bytes(b"")
    with pytest.raises(ValueError, match="not those that were packed"):
        packed.unpack(folder, out)
    (folder / "part-1").unlink()
    with pytest.raises(ValueError, match=r"part-1 of \d+ parts are missing"):
        packed.unpack(folder, out)


def test_other_weights_are_rounded_to_the_closest_of_sixteen(packed: ModuleType) -> None:
    weights = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    fields, restored = packed.encode(weights, 4)
    assert torch.equal(packed.decode(fields, 4, [32, 64]), restored)
    groups = weights.float().view(-1, 32)
    off = (restored - weights).float().abs().view(-1, 32)
    step = (groups.amax(1) - groups.amin(1)) / 15
    assert torch.all(off <= 0.51 * step[:, None] + 2**-8 * groups.abs())
    assert off.mean() > 0.2 * step.mean()  # it was not on a grid
