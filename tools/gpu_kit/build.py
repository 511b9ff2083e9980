"""Make the folder with which `check.py` runs on a machine that has a GPU, and perhaps no network.

    python tools/gpu_kit/build.py [--out build/gpu-kit] [--no-site]

That machine has Python 3.12, torch, transformers, accelerate and pytest, with what these bring. The folder
has the rest: what else asyncrl needs (in site/, in the versions of constraints.txt), asyncrl itself, its
configurations, the demo, tests/gpu with the fakes, and the sizes of Qwen3 without weights.
--no-site: without site/, for the Python that runs this, where asyncrl is installed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LIMIT_MIB = 15
# Of asyncrl's imports those that torch, transformers, accelerate and pytest do not bring, and what they need.
PACKAGES = [
    *("msgspec", "pyzmq", "hydra-core", "omegaconf", "zstandard", "xxhash"),
    *("aiohttp", "aiohappyeyeballs", "aiosignal", "attrs", "frozenlist", "multidict", "propcache", "yarl"),
]
SOURCE_ONLY = ["antlr4-python3-runtime"]  # of hydra and omegaconf: no wheel is published
PLATFORM = [
    *("--python-version", "3.12", "--implementation", "cp", "--only-binary", ":all:"),
    *("--platform", "manylinux2014_x86_64", "--platform", "manylinux_2_28_x86_64"),
]
EXAMPLE = "examples/multiturn/calculator"
COPIED = ["asyncrl", "configs", "tests/fakes", "tests/gpu"]
KIT_FILES = ["check.py", "parts", "README.md"]
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc", ".*")
# The published configurations: hidden size, that of feed-forward layers, layers, attention heads.
QWEN3 = {
    "qwen3-0.6b": (1024, 3072, 28, 16),
    "qwen3-1.7b": (2048, 6144, 28, 16),
    "qwen3-4b": (2560, 9728, 36, 32),
}


def install(site: Path, packages: Sequence[str] = PACKAGES) -> None:
    """What is missing there, without dependencies, for that machine's Python; without debug symbols."""
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet", "--no-deps"]
    pip += ["--no-compile", "--target", str(site), "--constraint", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, *PLATFORM, *packages], check=True)
    subprocess.run([*pip, *SOURCE_ONLY], check=True)
    shutil.rmtree(site / "bin", ignore_errors=True)
    for unused in site.glob("zstandard/_cffi*.so"):  # the backend of other Pythons
        unused.unlink()
    for library in site.rglob("*.so"):
        subprocess.run(["strip", "--strip-debug", str(library)], check=True)


def copy_all(kit: Path) -> None:
    head = subprocess.run(
        ["git", "rev-parse", "--short=10", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    (kit / "revision").write_text(head.stdout.strip() or "unknown")
    for name in COPIED:
        shutil.copytree(ROOT / name, kit / name, ignore=LEFT_OUT)
    copy_examples(kit)
    (kit / "tests" / "__init__.py").touch()  # or another package of that name, installed there, would win
    for name in KIT_FILES:
        if (HERE / name).is_dir():
            shutil.copytree(HERE / name, kit / name, ignore=LEFT_OUT)
        else:
            shutil.copy(HERE / name, kit / name)


def copy_examples(kit: Path) -> None:
    """Copy the demo, with its tables as JSON lines, too: a machine without pyarrow reads these."""
    import pyarrow.parquet

    shutil.copytree(ROOT / EXAMPLE, kit / EXAMPLE, ignore=LEFT_OUT)
    for table in (kit / EXAMPLE).rglob("*.parquet"):
        rows = pyarrow.parquet.read_table(table).to_pylist()
        table.with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_models(models: Path) -> None:
    import torch
    from transformers import Qwen3Config

    for name, (hidden, feed_forward, layers, heads) in QWEN3.items():
        Qwen3Config(
            hidden_size=hidden,
            intermediate_size=feed_forward,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=8,
            head_dim=128,
            vocab_size=151_936,
            max_position_embeddings=40_960,
            rms_norm_eps=1e-6,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            tie_word_embeddings=True,
            dtype=torch.bfloat16,
            architectures=["Qwen3ForCausalLM"],
        ).save_pretrained(models / name)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-kit")
    parser.add_argument("--no-site", action="store_true", help="without the packages")
    args = parser.parse_args()
    began = time.monotonic()
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    copy_all(args.out)
    write_models(args.out / "models")
    if not args.no_site:
        install(args.out / "site")
    sizes = [file.stat().st_size for file in args.out.rglob("*") if file.is_file()]
    size = sum(sizes) / 2**20
    print(f"{args.out}: {size:.1f} MiB in {len(sizes)} files, {time.monotonic() - began:.0f} s")
    if size > LIMIT_MIB:
        print(f"that is over {LIMIT_MIB} MiB", file=sys.stderr)
    return size > LIMIT_MIB


if __name__ == "__main__":
    sys.exit(main())
