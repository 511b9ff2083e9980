"""Start the real SGLang 0.5.23 on an H100 or H200 whose machine has torch 2.11 and CUDA 13.

    PYTHONPATH=site python launch_gpu.py --model-path DIR --port 30000 [any argument of SGLang]

SGLang 0.5.23 is made for a newer torch. What is different here from a stock installation:

- `sgl_kernel`, the compiled kernels, comes from sglang-kernel 0.4.5, the last one for torch 2.11.
- SGLang compiles further kernels when it first uses them. The folder `kernels` has those of the kit's
  models. Others are compiled here, if there is nvcc, into SGLANG_JIT_CACHE_DIR. If that fails, a line says
  so, and the layer computes with torch.
- In float32 all layers compute with torch: most of the kernels are for half precision only.
- Attention and LoRA adapters run in Triton; sampling in torch. FlashInfer and FlashAttention 3 are left out.
- Decoding runs in CUDA graphs, prompts without.

Exit code 1 and one line: the bundle does not fit the Python, torch, CUDA or GPU of this machine.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import json
import os
import platform
import runpy
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
KERNELS = HERE / "kernels"
KERNEL_PREFIX = "sgl_kernel_jit_"  # SGLang's prefix of a compiled kernel's name
BUILT_FOR = HERE / "built_for.json"  # what pack.py has built and checked the bundle for
CUDA_HOME = Path("/usr/local/cuda")
PR_SET_PDEATHSIG = 1
# SGLang and what it imports read these at once.
ENVIRONMENT = {
    "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",  # 0.5.23 asks for 0.4.10
    "SGLANG_IS_FLASHINFER_AVAILABLE": "false",
    "SGLANG_ENABLE_JIT_DEEPGEMM": "false",
    # The tree in Rust is built for the tensors of another torch, and reads wrong memory.
    "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",
    "SGLANG_JIT_CACHE_DIR": str(HERE / "jit-cache"),
    "TORCHDYNAMO_DISABLE": "1",  # or small functions are compiled while requests wait
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "4",
}
FLOAT32_ENVIRONMENT = {"SGLANG_FORCE_FUSED_OP_BACKEND": "torch"}
# Arguments on the command line come later and win.
ARGUMENTS = [
    "--attention-backend=triton",
    "--sampling-backend=pytorch",
    "--lora-backend=triton",
    "--grammar-backend=none",
    "--cuda-graph-max-bs-decode=64",
    "--cuda-graph-backend-prefill=disabled",
    "--mem-fraction-static=0.3",
    "--skip-server-warmup",
]

kept_alive: list[Any] = []


class KernelMissing(Exception):
    """A kernel is neither in the bundle, nor can it be compiled here."""


def mismatch(built_for: Mapping[str, str], machine: Mapping[str, str]) -> str | None:
    """Return one line that names the first difference, or None. A machine's version may say more than what
    the bundle is built for: 2.11 fits 2.11.0+cu130."""
    for name, actual_value in machine.items():
        version = built_for[name]
        if actual_value != version and not actual_value.startswith(f"{version}."):
            return (
                f"the bundle is built for {name} {version}, and this machine has {name} {actual_value}: "
                f"it needs {name} {version}"
            )
    return None


def installed_versions() -> dict[str, str]:
    return {"Python": platform.python_version(), "torch": importlib.metadata.version("torch")}


def gpu_versions() -> dict[str, str]:
    import torch

    has_gpu = torch.cuda.is_available()
    return {
        "CUDA": torch.version.cuda or "none",
        "compute capability": ".".join(map(str, torch.cuda.get_device_capability())) if has_gpu else "none",
    }


def is_float32(arguments: Sequence[str]) -> bool:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--dtype")
    return parser.parse_known_args(arguments)[0].dtype in ("float32", "float")


def set_environment(arguments: Sequence[str]) -> None:
    """Set the environment of this process and those that it starts; what is set already stays."""
    environment = ENVIRONMENT | (FLOAT32_ENVIRONMENT if is_float32(arguments) else {})
    for name, value in environment.items():
        os.environ.setdefault(name, value)


def find_nvcc() -> bool:
    """Return whether there is nvcc, and let SGLang use the one of the usual place if no other is named: an
    nvcc on the PATH may be a link or a script that is far from its libraries."""
    if (CUDA_HOME / "bin" / "nvcc").exists():
        os.environ.setdefault("CUDA_HOME", str(CUDA_HOME))
    return "CUDA_HOME" in os.environ or shutil.which("nvcc") is not None


def declare_torchvision_operators() -> None:
    """Declare the two operators that the import of torchvision asks for. Its compiled ones are left out."""
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    kept_alive.append(library)  # its operators live as long as it does


def kernel_loader(compile_kernel: Callable[..., Any], may_compile: bool) -> Callable[..., Any]:
    """Return what takes the place of SGLang's `load_jit`: it loads a kernel from the bundle, or else compiles
    it. A kernel that failed once raises KernelMissing at once."""
    reasons: dict[str, str] = {}

    def load_kernel(*name_parts: object, **sources: Any) -> Any:
        name = KERNEL_PREFIX + "_".join(map(str, name_parts))
        carried = KERNELS / f"{name}.so"
        if carried.exists():
            import tvm_ffi

            return tvm_ffi.load_module(str(carried))
        if name not in reasons:
            if not may_compile:
                reasons[name] = "the bundle lacks it, and there is no compiling in float32 or without nvcc"
            else:
                try:
                    return compile_kernel(*name_parts, **sources)
                except Exception as error:
                    lines = str(error).splitlines() or [type(error).__name__]
                    reasons[name] = next((line for line in lines if "error:" in line), lines[0])
            print(f"launch_gpu.py: no kernel {name}: {reasons[name]}", file=sys.stderr, flush=True)
        raise KernelMissing(f"{name}: {reasons[name]}")

    return load_kernel


def fall_back_to_torch(fused_op: Any) -> None:
    """Let every layer of this class compute with torch from the first time on that its kernel is missing."""
    resolve_forward = fused_op._resolve_forward_method

    def resolve_with_fallback(op: Any) -> Callable[..., Any]:
        forward_with_kernel = resolve_forward(op)

        def forward(*args: Any, **options: Any) -> Any:
            try:
                return forward_with_kernel(*args, **options)
            except KernelMissing:
                op._forward_method = op.forward_native
                return op.forward_native(*args, **options)

        return forward

    fused_op._resolve_forward_method = resolve_with_fallback


def adapt_sglang() -> None:
    """Import SGLang's base and replace what does not fit this machine, before its models are imported."""
    declare_torchvision_operators()

    import sglang.kernels.jit.utils as jit_utils
    import sglang.kernels.jit.utils.compile as jit_compile
    import sglang.kernels.jit.utils.compile.loader as jit_loader
    from sglang.kernels.fused_op import BaseFusedOp

    in_float32 = FLOAT32_ENVIRONMENT.items() <= os.environ.items()
    load_kernel = kernel_loader(jit_loader.load_jit, may_compile=find_nvcc() and not in_float32)
    for module in (jit_utils, jit_compile, jit_loader):  # each has the function by name
        module.load_jit = load_kernel
    fall_back_to_torch(BaseFusedOp)

    from sglang.srt.layers.dual_gemm import DualGemm

    # A kernel for Blackwell, whose module needs cutlass to be imported at all.
    DualGemm._select_mode = lambda *_: None


def add_cuda_runtime_to_library_path() -> None:
    """Tell the dynamic linker where torch's CUDA runtime is: torch_memory_saver is preloaded into processes
    that have not loaded torch yet."""
    mapped_files = Path("/proc/self/maps").read_text().splitlines()
    folders = {os.path.dirname(line.split()[-1]) for line in mapped_files if "/libcudart.so" in line}
    library_path = os.environ.get("LD_LIBRARY_PATH")
    os.environ["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [library_path, *sorted(folders)]))


def main() -> None:
    built_for = json.loads(BUILT_FOR.read_text())
    for machine in (installed_versions, gpu_versions):  # the first needs no import of torch
        line = mismatch(built_for, machine())
        if line:
            raise SystemExit(f"launch_gpu.py: {line}")

    set_environment(sys.argv[1:])
    adapt_sglang()
    add_cuda_runtime_to_library_path()
    sys.argv[1:1] = ARGUMENTS
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # SGLang's other processes import this file again when they start
    # SGLang asks for this as well, but seconds of imports later.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    adapt_sglang()
