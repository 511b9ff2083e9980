"""Start a real SGLang server on a CPU-only torch. FOR TESTS, NOT FOR SERVING: slow, and not a deployment that
SGLang supports.

    .venv-sglang/bin/python tools/sglang_cpu/launch.py --model-path DIR --port 30000 [any argument of SGLang]

The server is the stock wheel, computing with its own torch-native paths. Four things keep it from running:

- On a CPU it imports names from `sgl_kernel`, whose wheel needs CUDA. They are called for speculative
  decoding and for moving KV between pools, neither of which runs here: functions that raise are enough.
- The wheel of torchvision may be built for CUDA. Its operators do not load then, and its import fails because
  two of them were never declared.
- For `--enable-return-routed-experts` it registers main memory with CUDA, to copy to it from a GPU: there is
  none, and nothing to register.
- For `--enable-lora` it pins memory, which needs a GPU, too: here memory stays as it is.

SGLang's other processes import this file again when they start, so that it serves all of them.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib.machinery
import os
import runpy
import signal
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn

if __name__ != "__main__":
    # SGLang's own processes ask for this too, but ten seconds of imports later: a server that is killed while
    # it starts would leave them behind.
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

# SGLang reads these as soon as it is imported.
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

gc.set_threshold(100_000, 50)  # a fifth of the time until it is ready

import torch  # noqa: E402

# What this machine can do; arguments on the command line come later and win.
ARGUMENTS = [
    "--device=cpu",
    "--dtype=float32",
    "--attention-backend=torch_native",
    "--sampling-backend=pytorch",
    "--cuda-graph-backend-decode=disabled",
    "--cuda-graph-backend-prefill=disabled",
    "--max-total-tokens=8192",
    "--max-running-requests=64",
    "--skip-server-warmup",
    "--lora-backend=torch_native",
    "--sleep-on-idle",  # or each server keeps a core busy with waiting
]


class _NoKernels(types.ModuleType):
    """`sgl_kernel` without kernels: every name can be imported, none can be called."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_: object, **__: object) -> NoReturn:
            raise NotImplementedError(f"sgl_kernel.{name} does not exist on a CPU")

        return missing


def _unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The same function, which pins nothing."""

    @functools.wraps(make)
    def unpinned(*args: Any, pin_memory: bool = False, **settings: Any) -> torch.Tensor:
        return make(*args, **settings)

    return unpinned


kernels = _NoKernels("sgl_kernel")
kernels.__spec__ = importlib.machinery.ModuleSpec("sgl_kernel", None)
sys.modules.setdefault("sgl_kernel", kernels)

torchvision_operators = torch.library.Library("torchvision", "FRAGMENT")  # declared for as long as it lives
for operator in ("nms", "qnms"):
    torchvision_operators.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

torch.cuda.cudart = lambda: types.SimpleNamespace(cudaHostRegister=lambda *_: 0)

torch.Tensor.pin_memory = lambda self, *_, **__: self  # type: ignore[method-assign]
for maker in ("tensor", "empty", "zeros", "ones", "arange", "full"):
    setattr(torch, maker, _unpinned(getattr(torch, maker)))


if __name__ == "__main__":
    sys.argv[1:1] = ARGUMENTS
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)
