"""Which versions and which GPU are here, does everything import, and how fast are products and copies?"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Iterator

from parts.common import Context, Finding, attempt, timed

SECONDS = 60  # where nothing has been read before, the imports take most of it
GOAL = "everything imports"

PACKAGES = ["torch", "transformers", "accelerate", "numpy", "safetensors", "tokenizers"]
KIT = ["msgspec", "zmq", "hydra", "omegaconf", "zstandard", "xxhash", "psutil", "aiohttp", "rich"]
OPTIONAL_ONES = ["triton", "pyarrow", "matplotlib", "pytest", "sglang"]
MODULES = [
    "asyncrl",
    "asyncrl.cli",
    "asyncrl.trainer.rank",
    "asyncrl.engines.torch.engine",
    "asyncrl.launch.start",
]


def run(context: Context) -> Iterator[Finding]:
    yield Finding("Python", f"{platform.python_version()} on {platform.platform()}")
    yield from imports(context)
    yield from machine(context)
    if not context.small:
        yield from gpus()
    yield from attempt("matrix products", lambda: products(context), context)
    yield from attempt("copies", lambda: copies(context), context)


def imports(context: Context) -> Iterator[Finding]:
    yield Finding("versions", ", ".join(f"{name} {version(name)}" for name in PACKAGES))
    missing = []
    for name in [*PACKAGES, *KIT, *MODULES]:
        try:
            importlib.import_module(name)
        except Exception as error:
            missing.append(f"{name}: {type(error).__name__}: {error}")
    yield Finding("imports", "; ".join(missing) or "all", "everything imports", not missing)
    import torch

    cached = os.path.join(os.path.dirname(torch.__file__), "__pycache__")
    cache_state = (
        "is there" if os.path.isdir(cached) else "is not there: each process compiles torch, or writes it"
    )
    yield Finding("bytecode of torch", cache_state)
    where = getattr(sys.modules.get("asyncrl"), "__file__", "nowhere")
    yield Finding("asyncrl is at", where.removeprefix(f"{context.kit}/"))
    present_modules = [name for name in OPTIONAL_ONES if importlib.util.find_spec(name)]
    yield Finding(
        "optional packages",
        f"{', '.join(present_modules)}; not here: {sorted({*OPTIONAL_ONES} - {*present_modules})}",
    )


def version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def machine(context: Context) -> Iterator[Finding]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0))
    yield Finding("machine", f"{cores} cores, {memory / 2**30:.0f} GiB of memory")
    for directory in ("/dev/shm", str(context.work)):
        if os.path.isdir(directory):
            name = "/dev/shm" if directory == "/dev/shm" else "scratch"
            yield Finding(name, f"{shutil.disk_usage(directory).free / 2**30:.1f} GiB free")
    compiler = next(
        (compiler_path for name in ("gcc", "cc", "clang") if (compiler_path := shutil.which(name))), "none"
    )
    header = os.path.join(sysconfig.get_path("include"), "Python.h")
    compiler_text = f"{compiler}; {header}: {'there' if os.path.exists(header) else 'missing'}"
    yield Finding("C compiler", compiler_text, note="triton compiles its launchers with both")


def gpus() -> Iterator[Finding]:
    import torch

    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        yield Finding(
            f"GPU {index}",
            f"{facts.name}, compute {facts.major}.{facts.minor}, {facts.multi_processor_count} processors, "
            f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free",
        )
    yield Finding("CUDA", f"torch is built for {torch.version.cuda}; NCCL {torch.cuda.nccl.version()}")


def products(context: Context) -> Finding:
    """The ceiling of matrix products: what MFU is measured against in practice."""
    import torch

    findings = []
    size = 512 if context.small else 8192
    for dtype in (torch.bfloat16, torch.float32):
        a, b = (torch.randn(size, size, device=context.device, dtype=dtype) for _ in range(2))
        spent = timed(lambda a=a, b=b: a @ b, context, repeats=5, warm_up=2)
        findings.append(f"{str(dtype)[6:]} {2 * size**3 / spent.seconds / 1e12:.3g} TFLOP/s")
    precision = torch.get_float32_matmul_precision()
    return Finding("matrix products", f"{', '.join(findings)} ({size}³, median of 5, float32 {precision})")


def copies(context: Context) -> Finding:
    """The ceilings of copies within the device, to the host, and back."""
    import torch

    size = 1 << (24 if context.small else 30)
    device_tensor, host = (
        torch.zeros(size, dtype=torch.uint8, device=tensor_device)
        for tensor_device in (context.device, "cpu")
    )
    copied_tensor = torch.empty_like(device_tensor)
    ways = {
        "within the device": lambda: copied_tensor.copy_(device_tensor),
        "to pageable memory": lambda: host.copy_(device_tensor),
    }
    if not context.small:
        pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        ways["to pinned memory"] = lambda: pinned.copy_(device_tensor, non_blocking=True)
        ways["from pinned memory"] = lambda: device_tensor.copy_(pinned, non_blocking=True)
    rates = [f"{name} {size / timed(way, context).seconds / 1e9:.3g} GB/s" for name, way in ways.items()]
    return Finding("copies", f"{', '.join(rates)} ({size >> 20} MiB, median of 3)")
