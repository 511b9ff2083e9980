"""Start a real SGLang 0.5.23 on an NVIDIA GPU whose machine has no kernels of SGLang's, no compiler for new
ones, and an older torch. FOR A CHECK, NOT FOR SERVING: its values are right, its speed is not SGLang's.

    PYTHONPATH=site python launch_gpu.py --model-path DIR --port 30000 [any argument of SGLang]

The server is the stock wheel, computing with torch and Triton. What keeps it from running:

- `sgl_kernel`, its compiled kernels, is built for its own version of torch. Layers have the same in torch
  (SGLANG_FORCE_FUSED_OP_BACKEND), so it is enough that its names can be imported. Calling one raises.
- Other kernels are compiled by nvcc when they are first used. Those are refused, and SGLang goes another way.
- One kernel for small batches needs cutlass to be imported at all.
- torchvision is here without its operators, which are built for one torch. Its import asks for two of them.
- torch_memory_saver is preloaded, and does not find the CUDA runtime, which torch finds by itself.

SGLang's other processes import this file again when they start, so that it serves all of them.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import os
import runpy
import signal
import sys
import types
from pathlib import Path
from typing import Any, NoReturn

if __name__ != "__main__":
    # SGLang's own processes ask for this too, but seconds of imports later.
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

# SGLang and what it imports read these at once.
ENVIRONMENT = {
    "SGLANG_FORCE_FUSED_OP_BACKEND": "torch",
    "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
    "SGLANG_IS_FLASHINFER_AVAILABLE": "false",
    "SGLANG_ENABLE_JIT_DEEPGEMM": "false",
    # The tree in Rust is built for the tensors of another torch, and reads wrong memory.
    "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",
    "TORCHDYNAMO_DISABLE": "1",  # or small functions are compiled while requests wait
    "TVM_FFI_DISABLE_TORCH_C_DLPACK": "1",  # or it compiles an extension when it is imported
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "4",
}
# Arguments on the command line come later and win.
ARGUMENTS = [
    "--attention-backend=triton",
    "--sampling-backend=pytorch",
    "--lora-backend=triton",
    "--grammar-backend=none",
    "--cuda-graph-backend-decode=disabled",
    "--cuda-graph-backend-prefill=disabled",
    "--mem-fraction-static=0.3",
    "--skip-server-warmup",
]
for key, value in ENVIRONMENT.items():
    os.environ.setdefault(key, value)

import torch  # noqa: E402

DUAL_GEMM = "sglang.kernels.ops.gemm.cutedsl_dual_gemm"


class _Missing:
    """Something that can be imported and looked into, not called."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> _Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self.__name__}.{name}")

    def __call__(self, *_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"{self.__name__} is not in the GPU kit's SGLang")


class _NoKernels(types.ModuleType):
    """A module without kernels: every name can be imported."""

    __getattr__ = _Missing.__getattr__


class _Finder:
    """Finds `sgl_kernel`, and any module in it."""

    @staticmethod
    def find_spec(name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        inside = name.partition(".")[0] == "sgl_kernel"
        return importlib.machinery.ModuleSpec(name, _Finder(), is_package=True) if inside else None  # type: ignore

    @staticmethod
    def create_module(spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _NoKernels(spec.name)

    @staticmethod
    def exec_module(module: Any) -> None:
        module.is_arch_support_pdl = lambda *_: False  # attention in Triton asks


def _show_cuda() -> None:
    """Tell the dynamic linker where the CUDA runtime is that torch has loaded."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    found = {os.path.dirname(line.split()[-1]) for line in lines if "/libcudart.so" in line}
    known = os.environ.get("LD_LIBRARY_PATH")
    os.environ["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [known, *sorted(found)]))


def _refuse(*names: str, **_: Any) -> NoReturn:
    raise NotImplementedError(f"SGLang's kernel {'/'.join(map(str, names))} is not compiled here")


sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]

dual_gemm: Any = _NoKernels(DUAL_GEMM)
dual_gemm.can_use_dual_gemm = lambda *_: False
sys.modules[DUAL_GEMM] = dual_gemm

torchvision_operators = torch.library.Library("torchvision", "FRAGMENT")  # declared for as long as it lives
for operator in ("nms", "qnms"):
    torchvision_operators.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import sglang.kernels.jit.utils as utils  # noqa: E402
import sglang.kernels.jit.utils.compile as compiling  # noqa: E402
import sglang.kernels.jit.utils.compile.loader as loader  # noqa: E402

for module in (utils, compiling, loader):  # each has it by name
    module.load_jit = _refuse

if __name__ == "__main__":
    _show_cuda()
    sys.argv[1:1] = ARGUMENTS
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)
