"""Compile kernels that SGLang compiles when it first uses them, for GPUs with compute capability 9.0.

    PYTHONPATH=site python compile_kernels.py --out kernels

Run it with the Python and torch of the GPU machine; no GPU is needed. nvcc must be of torch's CUDA version.
`kernels` gets a shared library for each, which launch_gpu.py finds by name. They serve the kit's models,
and others of the same shape: SmolLM2-135M, and Qwen3 from 0.6B to 14B in bfloat16.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from launch_gpu import KERNEL_PREFIX, declare_torchvision_operators, find_nvcc

CAPABILITY = (9, 0)
HEAD_SIZES = (64, 128)  # of SmolLM2, of Qwen3
# Bytes of a token's keys in a layer: KV heads x head size x bytes of a number.
KEY_BYTES = {
    "SmolLM2 bfloat16": 3 * 64 * 2,
    "SmolLM2 float32": 3 * 64 * 4,
    "Qwen3 bfloat16": 8 * 128 * 2,
    "Qwen3 float32": 8 * 128 * 4,
}


def builders() -> list[Callable[[], Any]]:
    """Return SGLang's functions that compile and load one kernel each, with their arguments."""
    import torch
    from sglang.kernels.ops.activation.activation import activation_module
    from sglang.kernels.ops.attention.clamp_position import _jit_clamp_position_module
    from sglang.kernels.ops.attention.rope import _jit_fused_rope_module
    from sglang.kernels.ops.kvcache.kvcache import _jit_kvcache_module
    from sglang.kernels.ops.layernorm.norm import _jit_qknorm_module

    half = torch.bfloat16
    return [
        partial(_jit_qknorm_module, 128, half),
        partial(activation_module, half),
        partial(_jit_clamp_position_module, torch.int64),
        *(partial(_jit_fused_rope_module, True, size, half, half) for size in HEAD_SIZES),
        *(partial(_jit_kvcache_module, size, size, 0) for size in KEY_BYTES.values()),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    with tempfile.TemporaryDirectory() as cache:
        os.environ["SGLANG_JIT_CACHE_DIR"] = cache
        find_nvcc()
        declare_torchvision_operators()
        from sglang.kernels.jit.utils import arch, parallel_compile

        arch.is_cuda = lambda: True  # or the flags for CUDA are left out
        with arch.override_jit_cuda_arch(*CAPABILITY):
            parallel_compile(builders(), max_workers=os.cpu_count())

        for library in Path(cache).rglob(f"deps-*/{KERNEL_PREFIX}*.so"):
            # The copy is stripped: this process has the library itself mapped.
            copy = shutil.copy(library, args.out / library.name)
            subprocess.run(["strip", "--strip-debug", str(copy)], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
