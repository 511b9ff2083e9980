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


def multiplies_bfloat16(gpu: bool | None = False) -> bool:
    """Whether the CPU has instructions for it, by its flags; or the GPU (None: on Ray one is expected)."""
    if gpu is not False:
        import torch

        return gpu is None or torch.cuda.is_bf16_supported(including_emulation=False)
    with suppress(OSError):
        lines = CPUINFO.read_text().splitlines()
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
        return bool(BFLOAT16 & set(flags.split()))
    return False


def cpu_speed(dtype: str, rows: int) -> float:
    """Operations per second of one thread of this CPU in products of so many rows, measured at once."""
    import torch
    from torch.utils.benchmark import Timer

    given = {
        name: torch.ones(size, 768, dtype=getattr(torch, dtype)) for name, size in (("a", rows), ("b", 768))
    }
    return 2 * rows * 768**2 / Timer("a @ b.T", globals=given, num_threads=1).timeit(5).median
