"""Pack SGLang for a GPU machine without a network: one file, from which check.py starts a server.

    python tools/gpu_kit/sglang_bundle/pack.py [--out build/sglang.tar.xz]

It holds launch_gpu.py, and in site/ the packages of requirements.txt for Python 3.12 on x86-64, without what
a server of a language model does not read.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from build import PLATFORM, ROOT  # noqa: E402

LIMIT_MIB = 40
UNUSED = [
    "bin",
    "jedi/third_party/django-stubs",
    "sglang/multimodal_gen",
    "sglang/test",
    "zstandard/_cffi*.so",
    # Built for other versions of torch: launch_gpu.py does without.
    "sglang/srt/mem_cache/rust_tree_core/*.so",
    "sglang/srt/rust_extensions/*.so",
    "torchvision/*.so",
    "torchvision.libs",
]


def install(site: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet", "--no-deps"]
    pip += ["--no-compile", "--target", str(site), "--requirement", str(HERE / "requirements.txt")]
    subprocess.run([*pip, *PLATFORM, "--platform", "manylinux_2_34_x86_64"], check=True)
    for found in [found for pattern in UNUSED for found in site.glob(pattern)]:
        if found.is_dir():
            shutil.rmtree(found)
        else:
            found.unlink()
    for library in site.rglob("*.so*"):
        subprocess.run(["strip", "--strip-debug", str(library)], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "sglang.tar.xz")
    args = parser.parse_args()
    began = time.monotonic()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as made:
        site = Path(made) / "site"
        install(site)
        half = args.out.with_name(f".{args.out.name}")  # `make gpu-visit` takes what has the right name
        with tarfile.open(half, "w:xz") as bundle:
            bundle.add(site, "site")
            bundle.add(HERE / "launch_gpu.py", "launch_gpu.py")
        half.rename(args.out)
    size = args.out.stat().st_size / 2**20
    print(f"{args.out}: {size:.1f} MiB, {time.monotonic() - began:.0f} s")
    if size > LIMIT_MIB:
        print(f"that is over {LIMIT_MIB} MiB", file=sys.stderr)
    return size > LIMIT_MIB


if __name__ == "__main__":
    sys.exit(main())
