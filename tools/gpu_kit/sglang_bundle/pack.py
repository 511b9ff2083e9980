"""Pack SGLang for a GPU machine without a network: one file, from which the kit starts a server.

    python tools/gpu_kit/sglang_bundle/pack.py [--python .venv-kit/bin/python] [--out build/sglang.tar.xz]

    site/            the packages of requirements.txt for Python 3.12 on x86-64, without what a server of a
                     language model does not read, and of compiled code what an H100 or H200 runs
    kernels/         what SGLang compiles when it first uses them (compile_kernels.py), if there is nvcc
    launch_gpu.py    starts the server
    built_for.json   versions that the machine must have

--python: a Python 3.12 with the torch of that machine. All compiled code is checked against its libraries,
and all names that SGLang takes from `sgl_kernel` against what is packed; what does not fit is not packed.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
from compile_kernels import CAPABILITY  # noqa: E402
from fatbin import keep_architecture  # noqa: E402
from launch_gpu import find_nvcc  # noqa: E402

# isort: split
from build import PLATFORM, ROOT  # noqa: E402

LIMIT_MIB = 36  # with more, a visit needs a fourth load (pack_visit.py)
LIBRARY_CHECK_S = 60.0
COMPILE_S = 1200.0
UNUSED = [
    "bin",
    "jedi/third_party/django-stubs",
    "sglang/multimodal_gen",
    "sglang/test",
    "zstandard/_cffi*.so",
    # Built for other versions of torch or CUDA: launch_gpu.py does without.
    "sglang/srt/mem_cache/rust_tree_core/*.so",
    "sglang/srt/rust_extensions/*.so",
    "torch_memory_saver_hook_mode_*_cu12.abi3.so",
    "torch_memory_saver_hook_mode_preload.abi3.so",
    "torch_memory_saver_hook_mode_torch.abi3.so",
    "torchvision/*.so",
    "torchvision.libs",
    # Of the kernels: attention (Triton's serves instead), and what is for other GPUs.
    "sgl_kernel/flash_ops.abi3.so",
    "sgl_kernel/flashmla_ops.abi3.so",
    "sgl_kernel/infllm_ops.*.so",
    "sgl_kernel/spatial_ops.abi3.so",
    "sgl_kernel/sm100",
    "triton_kernels",
]
PYTHON_VERSION = PLATFORM[PLATFORM.index("--python-version") + 1]  # of the packages
ABSENT_NAMES = HERE / "absent_names.txt"  # known to be absent, and why
KERNELS_OF_GPU = "sgl_kernel/sm90/common_ops.abi3.so"


def install(site: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet", "--no-deps"]
    pip += ["--no-compile", "--target", str(site), "--requirement", str(HERE / "requirements.txt")]
    subprocess.run([*pip, *PLATFORM, "--platform", "manylinux_2_34_x86_64"], check=True)

    for unused in [path for pattern in UNUSED for path in site.glob(pattern)]:
        if unused.is_dir():
            shutil.rmtree(unused)
        else:
            unused.unlink()

    for library in site.rglob("*.so*"):
        subprocess.run(["strip", "--strip-debug", str(library)], check=True)
    major, minor = CAPABILITY
    keep_architecture(site / KERNELS_OF_GPU, 10 * major + minor)


def compile_kernels(python: Path, site: Path, kernels: Path) -> None:
    """Compile the kernels of the kit's models. Without nvcc there will be none, and a line says so."""
    kernels.mkdir()
    if not find_nvcc():
        print("there is no nvcc here: SGLang's kernels will be compiled on the GPU machine, 10 s each")
        return
    command = [str(python), str(HERE / "compile_kernels.py"), "--out", str(kernels)]
    environment = os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=environment, timeout=COMPILE_S)


def absent_names(site: Path) -> set[str]:
    """Return the names that SGLang takes from `sgl_kernel` and does not find: `name` or `module.name`."""
    imported_names: set[tuple[str, str]] = set()
    for source in (site / "sglang").rglob("*.py"):
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("sgl_kernel."):
                imported_names |= {(str(node.module), alias.name) for alias in node.names}

    absent = set()
    for module, name in imported_names:
        has_name = name in defined_names(site, module) or module_file(site, f"{module}.{name}") is not None
        if not has_name:
            absent.add(f"{module}.{name}".removeprefix("sgl_kernel."))
    return absent


@cache
def defined_names(site: Path, module: str) -> frozenset[str]:
    """Return the names that a module has, by its text; none if there is no such module."""
    names: set[str] = set()
    source = module_file(site, module)
    for node in ast.walk(ast.parse(source.read_text())) if source else ():
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.ImportFrom(module=str(origin), names=[ast.alias(name="*")]):
                names |= defined_names(site, origin)
            case ast.ImportFrom(names=aliases) | ast.Import(names=aliases):
                names |= {alias.asname or alias.name for alias in aliases}
    return frozenset(names)


def module_file(site: Path, module: str) -> Path | None:
    path = site / module.replace(".", "/")
    return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.exists()), None)


def unresolved(library: Path, folders: Sequence[Path]) -> list[str]:
    """Return the symbols and libraries that the dynamic linker does not find for this library, neither in
    these folders nor in the system's. Those of Python and of NVIDIA's driver do not count."""
    search_path = os.pathsep.join(map(str, folders))
    linker = subprocess.run(
        ["ldd", "-r", str(library)],
        env=os.environ | {"LD_LIBRARY_PATH": search_path, "LC_ALL": "C"},
        capture_output=True,
        text=True,
        timeout=LIBRARY_CHECK_S,
    )
    missing = []
    for line in (linker.stdout + linker.stderr).splitlines():
        words = line.split()
        if words[:2] == ["undefined", "symbol:"]:
            missing.append(words[2].rstrip(","))
        elif words[1:] == ["=>", "not", "found"]:
            missing.append(words[0])
    from_elsewhere = ("Py", "_Py", "libcuda.so.1")
    return [name for name in missing if not name.startswith(from_elsewhere) and not is_of_driver(name)]


def is_of_driver(symbol: str) -> bool:
    """Return whether this is a function of libcuda: cuMemMap, not cudaMalloc."""
    return symbol.startswith("cu") and symbol[2:3].isupper()


def problems(folder: Path, library_folders: Sequence[Path]) -> Iterator[str]:
    """Yield a line for each thing that would keep the bundle from running with these libraries of torch."""
    site = folder / "site"
    absent = absent_names(site)
    lines = ABSENT_NAMES.read_text().splitlines()
    expected = {name for line in lines if not line.startswith("#") for name in line.split()}
    for name in sorted(absent - expected):
        yield f"sgl_kernel has no {name}, which SGLang imports: look where, and add it to {ABSENT_NAMES.name}"
    for name in sorted(expected - absent):
        yield f"sgl_kernel has {name}, or SGLang has no use for it: take it out of {ABSENT_NAMES.name}"
    for library in sorted(folder.rglob("*.so*")):
        missing = unresolved(library, [*library_folders, site / "tvm_ffi" / "lib"])
        if missing:
            yield f"{library.relative_to(folder)} does not fit: not found: {', '.join(missing[:5])}"


def machine_of(python: Path) -> tuple[dict[str, str], list[Path]]:
    """Return the versions that a bundle for this Python and its torch is built for, and the folders of their
    libraries. SystemExit: the bundle's packages are for another Python, or it has no torch with CUDA."""
    script = "import json, sys, torch; print(json.dumps([sys.version_info[:2], torch.__version__, "
    script += "torch.version.cuda, torch.__file__]))"
    wanted = "make .venv-kit/bin/python, or name another one by --python"
    if shutil.which(python) is None:
        raise SystemExit(f"there is no {python}: {wanted}")
    run = subprocess.run([str(python), "-c", script], capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(f"{python} has no torch: {wanted}")

    (major, minor), torch_version, cuda_version, torch_file = json.loads(run.stdout)
    python_version = f"{major}.{minor}"
    if cuda_version is None or python_version != PYTHON_VERSION:
        machine_text = (
            f"Python {python_version}, torch {torch_version} {'with' if cuda_version else 'without'} CUDA"
        )
        raise SystemExit(f"{python} is {machine_text}; Python {PYTHON_VERSION} and CUDA are needed: {wanted}")

    built_for = {
        "Python": python_version,
        "torch": ".".join(torch_version.split(".")[:2]),
        "CUDA": cuda_version.split(".")[0],
        "compute capability": ".".join(map(str, CAPABILITY)),
    }
    packages = Path(torch_file).parents[1]
    return built_for, [packages / "torch" / "lib", *sorted(packages.glob("nvidia/*/lib"))]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "sglang.tar.xz")
    parser.add_argument("--python", type=Path, default=ROOT / ".venv-kit" / "bin" / "python")
    args = parser.parse_args()
    began = time.monotonic()
    built_for, library_folders = machine_of(args.python)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        install(folder / "site")
        compile_kernels(args.python, folder / "site", folder / "kernels")
        shutil.copy(HERE / "launch_gpu.py", folder)
        (folder / "built_for.json").write_text(json.dumps(built_for))

        lines = list(problems(folder, library_folders))
        if lines:
            print(*lines, sep="\n", file=sys.stderr)
            return 1

        unfinished = args.out.with_name(f".{args.out.name}")  # `make gpu-visit` takes what has the right name
        with tarfile.open(unfinished, "w:xz") as bundle:
            for path in sorted(folder.iterdir()):
                bundle.add(path, path.name)
        unfinished.rename(args.out)
        kernels = len(list((folder / "kernels").iterdir()))
    size = args.out.stat().st_size / 2**20
    fits = ", ".join(f"{name} {version}" for name, version in built_for.items())
    print(f"{args.out}: {size:.1f} MiB, {kernels} compiled kernels, checked for {fits}")
    print(f"{time.monotonic() - began:.0f} s")
    if size > LIMIT_MIB:
        print(f"that is over {LIMIT_MIB} MiB", file=sys.stderr)
    return size > LIMIT_MIB


if __name__ == "__main__":
    sys.exit(main())
