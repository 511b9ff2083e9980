"""SGLang's bundle for a GPU machine (tools/gpu_kit/sglang_bundle): what is packed, and how it starts."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.fakes.scripts import script

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
FOLDER = "gpu_kit/sglang_bundle"
BUNDLE = ROOT / "build" / "sglang.tar.xz"
KIT_PYTHON = ROOT / ".venv-kit" / "bin" / "python"

needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
needs_bundle = pytest.mark.skipif(
    not (BUNDLE.exists() and KIT_PYTHON.exists()),
    reason="needs build/sglang.tar.xz and .venv-kit: make gpu-kit-sglang PYTHON312=/path/of/python3.12",
)


@pytest.fixture(scope="module")
def launcher() -> ModuleType:
    return script("launch_gpu", FOLDER)


@pytest.fixture(scope="module")
def packer() -> ModuleType:
    return script("pack", FOLDER)


def fat_entry(architecture: int, code: bytes) -> bytes:
    header = (2).to_bytes(2, "little") + (257).to_bytes(2, "little") + (64).to_bytes(4, "little")
    header += len(code).to_bytes(8, "little") + bytes(12) + architecture.to_bytes(4, "little")
    return header.ljust(64, b"\0") + code


def fat_binary(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return b"\x50\xed\x55\xba" + b"\x01\x00\x10\x00" + len(body).to_bytes(8, "little") + body


def test_code_for_other_gpus_leaves_and_nothing_moves() -> None:
    fatbin = script("fatbin", FOLDER)
    ampere = fat_entry(80, b"ampere..")
    hopper = fat_entry(90, b"hopper..")
    hopper_a = fat_entry(90, b"hopper_a" * 2)
    blackwell = fat_entry(100, b"blackwell......!")
    mixed = fat_binary(ampere, hopper, blackwell, hopper_a)
    section = mixed + bytes(8) + fat_binary(blackwell)
    data = bytearray(b"head" * 4 + section + b"tail")

    fatbin.drop_entries(data, 16, 16 + len(section), 90)

    kept = fat_binary(hopper, hopper_a).ljust(len(mixed), b"\0")
    assert bytes(data) == b"head" * 4 + kept + bytes(8) + fat_binary(blackwell) + b"tail"


@pytest.mark.parametrize("spoiled", [0, 8, 16 + 4])  # the magic, the size of all entries, that of a header
def test_what_is_no_fat_binary_is_refused(spoiled: int) -> None:
    fatbin = script("fatbin", FOLDER)
    data = bytearray(fat_binary(fat_entry(90, b"code....")))
    data[spoiled] += 0x77
    with pytest.raises(ValueError, match="at byte"):
        fatbin.drop_entries(data, 0, len(data), 90)


@needs_compiler
def test_symbols_that_no_library_has_are_named(tmp_path: Path, packer: ModuleType) -> None:
    def compiled(name: str, source: str, *options: str) -> Path:
        library = tmp_path / name / f"lib{name}.so"
        library.parent.mkdir()
        command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-x", "none", "-o", str(library), *options]
        subprocess.run(command, input=source.encode(), check=True)
        return library

    torch = compiled("torch", "int add(int a) { return a + 1; }")
    source = "int add(int); int gone(int); int cuMemMap(int); int PyLong_AsLong(int);"
    source += "int run(int a) { return add(gone(cuMemMap(PyLong_AsLong(a)))); }"
    kernels = compiled("kernels", source, str(torch))

    assert packer.unresolved(kernels, [torch.parent]) == ["gone"]
    torch.unlink()
    assert packer.unresolved(kernels, [torch.parent]) == [str(torch), "add", "gone"]


def test_names_that_sglang_does_not_find_are_named(tmp_path: Path, packer: ModuleType) -> None:
    files = {
        "sglang/layers/norm.py": "def f():\n    from sgl_kernel import rmsnorm, fused_norm\n",
        "sglang/cache.py": "from sgl_kernel.kvcacheio import copy, move\nfrom sgl_kernel import kvcacheio\n",
        "sglang/other.py": "from sgl_kernel_npu import anything\nfrom sgl_kernel.gone import nothing\n",
        "sgl_kernel/__init__.py": "from sgl_kernel.elementwise import *\n",
        "sgl_kernel/elementwise.py": "def rmsnorm(): ...\n",
        "sgl_kernel/kvcacheio.py": "copy = 1\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert packer.absent_names(tmp_path) == {"fused_norm", "kvcacheio.move", "gone.nothing"}


@pytest.mark.parametrize(
    ("prints", "complaint"),
    [
        ("", "has no torch: make"),
        ('[[3, 11], "2.11.0", "13.0", "/torch"]', "is Python 3.11, torch 2.11.0 with CUDA; Python 3.12"),
        ('[[3, 12], "2.11.0+cpu", null, "/torch"]', "is Python 3.12, torch 2.11.0+cpu without CUDA; Python"),
    ],
)
def test_a_python_that_no_bundle_is_built_for_is_refused(
    tmp_path: Path, packer: ModuleType, prints: str, complaint: str
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '{prints}'\nexit {int(not prints)}\n")
    python.chmod(0o755)
    with pytest.raises(SystemExit, match=re.escape(f"{python} {complaint}")):
        packer.machine_of(python)
    with pytest.raises(SystemExit, match="there is no"):
        packer.machine_of(tmp_path / "none")


def test_another_torch_is_refused_in_one_line(tmp_path: Path) -> None:
    shutil.copy(ROOT / "tools" / FOLDER / "launch_gpu.py", tmp_path)
    (tmp_path / "built_for.json").write_text(json.dumps({"Python": "3", "torch": "1.13"}))
    command = [sys.executable, str(tmp_path / "launch_gpu.py"), "--model-path", "none"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 1 and run.stdout == ""
    assert run.stderr == (
        f"launch_gpu.py: the bundle is built for torch 1.13, and this machine has torch {version('torch')}: "
        "it needs torch 1.13\n"
    )


@pytest.mark.parametrize(
    ("machine", "difference"),
    [
        ({"torch": "2.11.0+cu130", "CUDA": "13.0"}, None),
        ({"torch": "2.11", "CUDA": "13"}, None),
        ({"torch": "2.110.0", "CUDA": "13.0"}, "torch 2.110.0"),
        ({"torch": "2.11.0+cpu", "CUDA": "none"}, "CUDA none"),
    ],
)
def test_a_version_may_say_more_than_what_the_bundle_needs(
    launcher: ModuleType, machine: dict[str, str], difference: str | None
) -> None:
    line = launcher.mismatch({"torch": "2.11", "CUDA": "13"}, machine)
    assert line is None if difference is None else difference in line


@pytest.mark.parametrize(
    ("arguments", "in_float32"),
    [
        (["--dtype", "float32"], True),
        (["--port", "1", "--dtype=bfloat16", "--dtype=float32"], True),
        (["--dtype=float32", "--dtype", "bfloat16"], False),
        (["--kv-cache-dtype", "float32"], False),
        ([], False),
    ],
)
def test_only_a_model_in_float32_computes_with_torch(
    launcher: ModuleType, arguments: list[str], in_float32: bool
) -> None:
    assert launcher.is_float32(arguments) == in_float32


class FusedOp:
    """What launch_gpu.py uses of SGLang's BaseFusedOp."""

    def __init__(self, kernel: Callable[[int], int]) -> None:
        self.kernel = kernel
        self._forward_method: Callable[[int], int] | None = None

    def _resolve_forward_method(self) -> Callable[[int], int]:
        return self.kernel

    def forward_native(self, value: int) -> int:
        return -value

    def forward(self, value: int) -> int:
        if self._forward_method is None:
            self._forward_method = self._resolve_forward_method()
        return self._forward_method(value)


def test_a_layer_whose_kernel_does_not_compile_computes_with_torch(
    launcher: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    compiled: list[tuple[object, ...]] = []
    attempts: list[int] = []

    def compile_kernel(*name_parts: object, **_: Any) -> Any:
        compiled.append(name_parts)
        raise RuntimeError("Failed to build\nnorm.cuh(3): error: no such dtype\nninja: stopped")

    def normalize(value: int) -> int:
        attempts.append(value)
        return load_kernel("norm", 128)(value)  # type: ignore[no-any-return]

    load_kernel = launcher.kernel_loader(compile_kernel, may_compile=True)
    launcher.fall_back_to_torch(FusedOp)
    layers = [FusedOp(normalize), FusedOp(lambda value: 2 * value)]

    assert [layer.forward(3) for layer in [*layers, *layers]] == [-3, 6, -3, 6]
    assert attempts == [3] and compiled == [("norm", 128)]
    with pytest.raises(launcher.KernelMissing, match="norm_128"):
        load_kernel("norm", 128)
    assert capfd.readouterr().err == (
        "launch_gpu.py: no kernel sgl_kernel_jit_norm_128: norm.cuh(3): error: no such dtype\n"
    )


@pytest.mark.full
@needs_bundle
def test_the_bundle_as_it_was_built_fits_torch_and_sglang_falls_back(
    tmp_path: Path, packer: ModuleType
) -> None:
    """Every library against torch 2.11's, every name, the packed kernels of the kit's models, and a layer of
    SGLang's own whose kernel is missing."""
    with tarfile.open(BUNDLE) as bundle:
        bundle.extractall(tmp_path, filter="data")
    built_for, library_folders = packer.machine_of(KIT_PYTHON)
    assert json.loads((tmp_path / "built_for.json").read_text()) == built_for
    assert list(packer.problems(tmp_path, library_folders)) == []

    layers = """
import launch_gpu
launch_gpu.adapt_sglang()
import torch
from compile_kernels import CAPABILITY, builders
from sglang.kernels.fused_op import BaseFusedOp
from sglang.kernels.jit.utils.arch import override_jit_cuda_arch
from sglang.kernels.ops.layernorm import norm
from sglang.kernels.spec import KernelBackend

@torch.library.custom_op("kit::normalize", mutates_args=["x"])
def normalize(x: torch.Tensor) -> None:
    norm.load_jit("none", cuda_files=["none.cuh"])

class Norm(BaseFusedOp):
    priority = (KernelBackend.JIT,)
    capabilities = {KernelBackend.JIT: frozenset()}

    def forward_native(self, x):
        return x + 1

    def forward_jit(self, x):
        normalize(x)

assert Norm()(torch.ones(2)).tolist() == [2, 2]
with override_jit_cuda_arch(*CAPABILITY):
    print(len([build() for build in builders()]), "kernels loaded")
"""
    folders = [tmp_path, tmp_path / "site", ROOT / "tools" / FOLDER]
    environment = {"PYTHONPATH": os.pathsep.join(map(str, folders)), "SGLANG_CRASH_ON_JIT_COMPILE": "1"}
    command = [str(KIT_PYTHON), "-c", layers]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)

    kernels = len(list((tmp_path / "kernels").iterdir()))
    assert run.stdout == f"{kernels} kernels loaded\n", run.stderr
    assert run.stderr.count("launch_gpu.py: no kernel") == 1
