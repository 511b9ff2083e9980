"""Build what `visit.py` needs on a borrowed GPU machine and does not travel with the repository.

    python tools/gpu_kit/pack_visit.py [--out build/gpu-visit] [--no-site]

The folders load-1, load-2, … of at most 50 MiB each (load-1: 34) are carried by one call each; the machine
keeps them. load-1 has all that call A needs:

    site/         packages that torch, transformers, accelerate and pytest do not bring (build.py); kernels of
                  layers with a state
    models/       the sizes of Qwen3 without weights
    examples/     the demo's data as JSON lines

SmolLM2 in parts (four_bits.py) and SGLang's bundle, if `make gpu-kit-sglang` has made one, are spread over
them. Last, it prints for each load which paths its call carries: load-1 goes with `caches` of the visit
before, where they have been copied. --no-site: without site/, for a rehearsal with the Python that runs this.

Exit code 1 and one line: the bundle is older than its sources, pip failed, or a call would carry too much.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from build import HERE, PACKAGES, ROOT, copy_examples, install, write_models

CALL_BYTES = 64 << 20  # what one call carries at most, the files of the checkout included
CHECKOUT_BYTES = 13 << 20  # of these files, at most
LOAD_BYTES = 50 << 20
FIRST_BYTES = 33 << 20  # of load-1: the kernels that the visit before compiled are carried with it
SMOLLM2 = ROOT / ".models" / "smollm2-135m-instruct"
PACKED = ROOT / "build" / "smollm2"
BUNDLE = ROOT / "build" / "sglang.tar.xz"
# Without launch_gpu.py: the machine starts the one of the checkout (parts/bundle.py).
BUNDLE_SOURCES = [
    HERE / "sglang_bundle" / name
    for name in ("requirements.txt", "absent_names.txt", "pack.py", "fatbin.py", "compile_kernels.py")
]
# Kernels of layers with a state: pure Python, compiled by Triton there. causal-conv1d and mamba-ssm have no
# wheels on the index, and a visit has no time to compile them.
KERNELS = ["fla-core", "einops"]
MIB = 1 << 20


def pack_smollm2() -> None:
    """Pack the model, unless that was done since the model and the packer changed. SystemExit without one."""
    weights = SMOLLM2 / "model.safetensors"
    packer = HERE / "four_bits.py"
    index = PACKED / "index.json"
    if not weights.exists():
        raise SystemExit(f"{weights} is missing: make smollm2")
    newest = max(weights.stat().st_mtime, packer.stat().st_mtime)
    if index.exists() and index.stat().st_mtime >= newest:
        return
    shutil.rmtree(PACKED, ignore_errors=True)
    line = [sys.executable, str(packer), "pack", "--model", str(SMOLLM2), "--out", str(PACKED)]
    subprocess.run([*line, "--data", str(ROOT / "examples" / "multiturn" / "smollm2" / "data")], check=True)


def check_bundle(bundle: Path, sources: Sequence[Path]) -> None:
    """SystemExit if one of these files has changed since the bundle was made. No bundle is no error."""
    if not bundle.exists():
        return
    bundle_time = bundle.stat().st_mtime_ns
    changed = [source.name for source in sources if source.stat().st_mtime_ns > bundle_time]
    if changed:
        raise SystemExit(
            f"{bundle} is older than {', '.join(changed)}: make gpu-kit-sglang; "
            f"or, if only comments changed, touch {bundle}"
        )


def spread(sizes: Sequence[int], first: int, limit: int = LOAD_BYTES) -> list[int]:
    """The load of each file, from 0, the largest files first. `first`: bytes that load 0 has room for; the
    others have `limit`. ValueError if a file is larger than a load."""
    room = [first]
    chosen = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        if sizes[index] > limit:
            raise ValueError(f"{sizes[index]:,} bytes do not fit into a load of {limit:,}")
        number = next((number for number, left in enumerate(room) if sizes[index] <= left), len(room))
        if number == len(room):
            room.append(limit)
        room[number] -= sizes[index]
        chosen[index] = number
    return chosen


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def replace_loads(out: Path, load_directory: Path, spread_files: Iterable[tuple[Path, Path]]) -> None:
    """Put new loads in the place of old ones. `made`: what load-1 has. `spread_files`: path within the loads
    and source of each further file."""
    for old in out.glob("load-*"):
        shutil.rmtree(old)
    out.mkdir(parents=True, exist_ok=True)
    shutil.move(load_directory, out / "load-1")
    files = list(spread_files)
    loads = spread([source.stat().st_size for _, source in files], FIRST_BYTES - size_of(out / "load-1"))
    for (path, source), load in zip(files, loads, strict=True):
        target = out / f"load-{load + 1}" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)


def checkout_bytes() -> int:
    """Return the size of the files that travel with each call: tracked ones, and new ones that git does not
    ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    files = (ROOT / name for name in names if name)
    return sum(file.stat().st_size for file in files if file.is_file() and not file.is_symlink())


def carried(out: Path, load: Path) -> list[Path]:
    """Return the paths that are carried by the call which brings this load."""
    caches = out / "caches"
    return [load, caches] if load.name == "load-1" and caches.is_dir() else [load]


def print_calls(out: Path) -> bool:
    """Print what is in each load, and what its call carries. Return whether no call carries too much."""
    checkout = checkout_bytes()
    fits = True
    for load in sorted(out.glob("load-*")):
        names = ", ".join(sorted(path.name for path in load.iterdir() if path.name != "smollm2"))
        parts = len([*load.glob("smollm2/part-*")])
        print(f"{load}: {size_of(load) / MIB:.1f} MiB: {names and f'{names}, '}{parts} parts of smollm2")

        paths = carried(out, load)
        relative = [str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path) for path in paths]
        size = checkout + sum(map(size_of, paths))
        print(
            f"  carry {json.dumps(relative)}: {size / MIB:.1f} MiB with the checkout's {checkout / MIB:.1f}"
        )
        if size > CALL_BYTES:
            print(f"  that is over the {CALL_BYTES // MIB} MiB of a call", file=sys.stderr)
            fits = False
    return fits


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-visit")
    parser.add_argument("--no-site", action="store_true", help="without the packages")
    args = parser.parse_args()
    check_bundle(BUNDLE, BUNDLE_SOURCES)
    pack_smollm2()
    files = [(Path("smollm2") / file.name, file) for file in sorted(PACKED.iterdir())]
    if BUNDLE.exists():
        files.append((Path(BUNDLE.name), BUNDLE))
    with tempfile.TemporaryDirectory() as folder:
        load_directory = Path(folder) / "load"
        copy_examples(load_directory)
        write_models(load_directory / "models")
        if not args.no_site:
            try:
                install(load_directory / "site", [*PACKAGES, *KERNELS])
            except subprocess.CalledProcessError as error:
                raise SystemExit(f"site/ is missing: pip ended with {error.returncode}, see above") from None
        replace_loads(args.out, load_directory, files)
    fits = print_calls(args.out.resolve())
    if not BUNDLE.exists():
        print(f"{BUNDLE} is missing: make gpu-kit-sglang, or the calls B and C have no server")
    return 0 if fits else 1


if __name__ == "__main__":
    sys.exit(main())
