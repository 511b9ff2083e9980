"""What the launcher's machine computes with."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from asyncrl.config import RunConfig

CPUINFO = Path("/proc/cpuinfo")
BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16"}  # other CPUs take longer with bfloat16 than with float32


def sees_gpu(config: RunConfig) -> bool | None:
    """Whether torch sees a GPU on this machine; None on Ray, whose processes may be on other machines."""
    if config.launch.kind == "ray":
        return None
    import torch

    return torch.cuda.is_available()


def multiplies_bfloat16() -> bool:
    """Whether the CPU has instructions for it, by its flags."""
    with suppress(OSError):
        lines = CPUINFO.read_text().splitlines()
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
        return bool(BFLOAT16 & set(flags.split()))
    return False
