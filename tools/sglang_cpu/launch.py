"""Start a real SGLang server on a CPU-only torch. FOR TESTS, NOT FOR SERVING: slow, and not a deployment that
SGLang supports.

    .venv-sglang/bin/python tools/sglang_cpu/launch.py --model-path DIR --port 30000 [any argument of SGLang]

The server is the stock wheel, computing with its own torch-native paths. Seven things keep it from running:

- On a CPU it imports names from `sgl_kernel`, whose wheel needs CUDA. They are called for speculative
  decoding and for moving KV between pools, neither of which runs here: functions that raise are enough.
- The wheel of torchvision may be built for CUDA. Its operators do not load then, and its import fails because
  two of them were never declared.
- For `--enable-return-routed-experts` it registers main memory with CUDA, to copy to it from a GPU: there is
  none, and nothing to register.
- For `--enable-lora` it pins memory, which needs a GPU, too: here memory stays as it is.
- For `--enable-memory-saver` it needs torch-memory-saver, which knows GPUs only: `MemorySaver` does the same
  to main memory.
- Gated delta nets (Qwen3-Next, Qwen3.5) compute with kernels for GPUs or AMX, which the processors of Qwen's
  images import, too: gated_delta.py has them in torch. The cache of their states needs a GPU unless it is
  asked for a simpler one: `GATED_DELTA_ARGUMENTS`.
- TorchScript, which this torch deprecates, does not compile a function of Mistral 3: it is switched off.

SGLang's other processes import this file again when they start, so that it serves all of them.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import importlib.machinery
import json
import os
import runpy
import signal
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
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
os.environ.setdefault("PYTORCH_JIT", "0")
os.environ.setdefault("SGLANG_MAMBA_CONV_DTYPE", "float32")  # as --dtype below

gc.set_threshold(100_000, 50)  # a fifth of the time until it is ready

import gated_delta  # noqa: E402
import torch  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

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
# What servers of gated delta nets need beside these. The states of prefixes are kept without spare buffers,
# whose copies are Triton's, and then neither steps overlap nor do pages have several tokens.
GATED_DELTA_ARGUMENTS = [
    "--mamba-radix-cache-strategy=no_buffer",
    "--disable-overlap-schedule",
    "--page-size=1",
    "--max-mamba-cache-size=256",  # or the states take a third of the memory, and half a minute
]


def has_gated_delta_net(arguments: list[str]) -> bool:
    """True if the model of a command line has layers of gated delta nets, by its config.json."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--model-path", "--model", dest="model_path")
    model_path = parser.parse_known_args(arguments)[0].model_path
    config_file = Path(model_path or "") / "config.json"
    if not config_file.is_file():
        return False

    config = json.loads(config_file.read_text())
    text_config = config.get("text_config") or config
    return "linear_num_value_heads" in text_config


class _NoKernels(types.ModuleType):
    """`sgl_kernel` without kernels: every name can be imported, and no kernel can be called."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_: object, **__: object) -> NoReturn:
            raise NotImplementedError(f"sgl_kernel.{name} does not exist on a CPU")

        return missing


def _unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return the same function without pinning."""

    @functools.wraps(make)
    def unpinned(*args: Any, pin_memory: bool = False, **settings: Any) -> torch.Tensor:
        return make(*args, **settings)

    return unpinned


GARBAGE = 255  # in each byte: as a floating point number of any size it is NaN


class _Region(TorchDispatchMode):
    """Adds the storages that are allocated within the region to `blocks`."""

    def __init__(self, blocks: list[_Block], backup: bool) -> None:
        super().__init__()
        self._blocks = blocks
        self._backup = backup

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known_storages = {storage._cdata for storage in _storages((args, kwargs))}
        known_storages |= {block.storage.cdata for block in self._blocks}
        for storage in _storages(result):
            if storage._cdata not in known_storages:
                self._blocks.append(_Block(storage, self._backup))
        return result


class _Block:
    """Takes a storage away and gives the storage back, with its content or, without `backup`, with
    garbage."""

    def __init__(self, storage: torch.UntypedStorage, backup: bool) -> None:
        self.storage = StorageWeakRef(storage)
        self._backup = backup
        self._size = 0
        self._content: torch.UntypedStorage | None = None

    def pause(self) -> None:
        storage = self._living()
        if storage is not None and storage.resizable():
            self._size = storage.nbytes()
            self._content = storage.clone() if self._backup else None
            storage.resize_(0)

    def resume(self) -> None:
        storage = self._living()
        if storage is not None and self._size:
            storage.resize_(self._size)
            if self._content is not None:
                storage.copy_(self._content)
            else:
                torch.empty(0, dtype=torch.uint8).set_(storage).fill_(GARBAGE)
            self._size = 0
            self._content = None

    def _living(self) -> torch.UntypedStorage | None:
        living_storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(
            self.storage.cdata
        )
        return living_storage


class MemorySaver(types.ModuleType):
    """The used part of `torch_memory_saver`.

    As on a GPU, memory of a region is gone after a `pause`, and garbage after a `resume`.
    """

    enabled = True

    def __init__(self) -> None:
        super().__init__("torch_memory_saver")
        self.__spec__ = importlib.machinery.ModuleSpec("torch_memory_saver", None)
        self.torch_memory_saver = self
        self._blocks: dict[str, list[_Block]] = {}
        self._paused: set[str] = set()

    def region(self, tag: str, enable_cpu_backup: bool = False) -> _Region:
        return _Region(self._blocks.setdefault(tag, []), enable_cpu_backup)

    @contextmanager
    def configure_subprocess(self) -> Iterator[None]:
        yield

    def pause(self, tag: str) -> None:
        assert tag not in self._paused, f"{tag} is paused already"
        self._paused.add(tag)
        _wait_while_paused()
        for block in self._blocks.get(tag, []):
            block.pause()

    def resume(self, tag: str) -> None:
        self._paused.remove(tag)
        for block in self._blocks.get(tag, []):
            block.resume()


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    return (leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))


@functools.cache
def _wait_while_paused() -> None:
    """Let a paused scheduler wait for its next command, as an idle scheduler does, instead of polling all
    the time."""
    from sglang.srt.managers.scheduler import Scheduler

    record = Scheduler._record_scheduler_state_for_paused_engine

    def recorded(self: Any) -> None:
        record(self)
        self.maybe_sleep_on_idle()

    Scheduler._record_scheduler_state_for_paused_engine = recorded


kernels = _NoKernels("sgl_kernel")
kernels.__spec__ = importlib.machinery.ModuleSpec("sgl_kernel", None)
sys.modules.setdefault("sgl_kernel", kernels)
sys.modules.setdefault("torch_memory_saver", MemorySaver())

torchvision_operators = torch.library.Library("torchvision", "FRAGMENT")  # declared for as long as it lives
for operator in ("nms", "qnms"):
    torchvision_operators.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

torch.cuda.cudart = lambda: types.SimpleNamespace(cudaHostRegister=lambda *_: 0)

torch.Tensor.pin_memory = lambda self, *_, **__: self  # type: ignore[method-assign]
for maker in ("tensor", "empty", "zeros", "ones", "arange", "full"):
    setattr(torch, maker, _unpinned(getattr(torch, maker)))

gated_delta.install()
gated_delta_net = has_gated_delta_net(sys.argv)
if gated_delta_net:
    gated_delta.install_in_sglang()


def run_server() -> None:
    """Run SGLang's server with the arguments of this process."""
    sys.argv[1:1] = [*ARGUMENTS, *(GATED_DELTA_ARGUMENTS if gated_delta_net else ())]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)


if __name__ == "__main__":
    run_server()
