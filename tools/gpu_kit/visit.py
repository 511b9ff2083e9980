"""Spend one call of a visit to a borrowed GPU machine: steps in two lanes, each with a limit.

    make gpu-visit                        # in the checkout at home: what does not travel with the repository
    python3 tools/gpu_kit/visit.py A      # there, in the repository: then B, then C

`--device cpu` is the rehearsal at home, with the same steps in small sizes.

    driver ─fork─► lane "exclusive" ─fork─► one step after another: timings and runs, alone on the GPU
           ─fork─► lane "shared"    ─fork─► one step after another: unpacking and bytecode, without the GPU

A lane is a process that imports torch once; each step is a fork of it, so that a step which hangs is killed
with all its descendants, and the next one runs. Only one driver at a time has the state folder.

The directory of results (--out, else $OUT) gets files of at most 16 MiB and no folders:

    results.jsonl       one JSON object a line, on disk as soon as it is known, also of a call that is cut off
    log.txt             output of all steps
    STEP.tar.gz         what a step left in its folder `keep`: the directory of a run
    caches-0, -1, …     compiled kernels for the next visit, which carries them as build/gpu-visit/caches

build/gpu-visit/state stays on the machine between calls: bytecode, compiled kernels, what was unpacked.
"""

from __future__ import annotations

import argparse
import compileall
import ctypes
import fcntl
import gzip
import importlib
import importlib.util
import io
import json
import os
import platform
import select
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from check import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, Stopped, end_descendants, stop
from parts.common import Context, Finding, failure

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
EXCLUSIVE = "exclusive"
SHARED = "shared"
FILE_BYTES = 16 << 20  # of a file that comes back, at most
CACHE_FILES = 2  # that come back, at most: of 8 files the others are results, the log and three runs
CACHE_FILE_BYTES = 9 << 20  # the next visit carries them with load-1
LOG_BYTES = 4 << 20  # of log.txt, at its end
PACK_S = 15.0  # of a call, at its end, for the caches
SMALL_SECONDS = 300.0  # limit of a step on a CPU, if nothing else is said
LEAST_S = 8.0  # a step that would get less is not started
END_S = 12.0  # from the signal to a lane until it is killed
PRELOADED = "asyncrl.trainer.learner"  # brings torch, transformers and all that training needs
COMPILED = ("torch", "triton", "transformers", "numpy", "sympy")  # packages whose bytecode is made
SMALL_COMPILED = ("safetensors",)
CACHES = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "SGLANG_JIT_CACHE_DIR": "sglang",
}


@dataclass(frozen=True)
class Step:
    """A function `module:name` of one Context that yields findings. `seconds`: its limit. `least`: without so
    many seconds it is not started, which is a failure unless it is `optional`."""

    name: str
    lane: str
    function: str
    seconds: float
    least: float = LEAST_S
    optional: bool = False


@dataclass(frozen=True)
class Call:
    """`seconds`: of the whole command."""

    seconds: float
    steps: tuple[Step, ...]

    def lanes(self) -> dict[str, list[Step]]:
        return {lane: [step for step in self.steps if step.lane == lane] for lane in (EXCLUSIVE, SHARED)}


CALLS = {
    "A": Call(
        210.0,
        (
            Step("bytecode", SHARED, "visit:compile_packages", 80.0),
            Step("mfu-4b", EXCLUSIVE, "parts.mfu:visit_4b", 180.0),
            Step("hybrid", EXCLUSIVE, "parts.hybrid:visit", 90.0, least=40.0, optional=True),
            Step("mfu-1.7b", EXCLUSIVE, "parts.mfu:visit_1_7b", 60.0, least=35.0, optional=True),
        ),
    ),
    "B": Call(
        270.0,
        (
            Step("unpack", SHARED, "parts.server:visit_unpack", 80.0),
            Step("server", EXCLUSIVE, "parts.server:visit_server", 165.0, least=60.0),
            Step("adapters", EXCLUSIVE, "parts.server:visit_adapters", 75.0, least=60.0),
            Step("embedded", EXCLUSIVE, "parts.server:visit_embedded", 50.0, least=25.0),
        ),
    ),
    "C": Call(
        290.0,
        (
            Step("asynchronous", EXCLUSIVE, "parts.end_to_end:visit_asynchronous", 150.0, least=75.0),
            Step("synchronous", EXCLUSIVE, "parts.end_to_end:visit_synchronous", 90.0, least=75.0),
            Step("shifts", EXCLUSIVE, "parts.end_to_end:visit_shifts", 90.0, least=75.0, optional=True),
            Step("images", EXCLUSIVE, "parts.images:run", 110.0, least=40.0, optional=True),
        ),
    ),
}


class Results:
    """Appends to results.jsonl, and says the same on standard output, which comes back, too. Each line is on
    disk when `write` returns, and lines of several processes never mix."""

    def __init__(self, out: Path) -> None:
        self.file = out / "results.jsonl"
        self.began = time.monotonic()
        self.console = os.dup(1)  # a step's standard output is the log

    def write(self, step: str, event: str, **fields: Any) -> None:
        at = round(time.monotonic() - self.began, 1)
        line = json.dumps({"at": at, "step": step, "event": event} | fields)
        with self.file.open("ab", buffering=0) as lines:
            lines.write(f"{line}\n".encode())
        shown_values = "; ".join(str(value) for key, value in fields.items() if key != "note" and value)
        os.write(self.console, f"{at:6.1f} {step:12} {event:8} {shown_values}\n".encode(errors="replace"))

    def finding(self, step: str, finding: Finding) -> None:
        verdict = {True: "ok", False: "NOT OK", None: ""}[finding.ok]
        fields = {"name": finding.name, "value": finding.value, "goal": finding.goal, "verdict": verdict}
        self.write(step, "finding", **fields, note=finding.note)


@dataclass(frozen=True)
class Visit:
    """What the processes of a call share. `end`: of time.monotonic(), when no step runs any more. `limit`: of
    each step in place of its own, in seconds; None: its own."""

    device: str
    end: float
    limit: float | None
    state: Path
    out: Path
    results: Results


# -- a lane ------------------------------------------------------------------------------------------------


def run_lane(lane: str, steps: Sequence[Step], visit: Visit) -> None:
    """Be the process of a lane: run its steps one after another. SIGTERM ends it with the step under way."""
    die_with_parent()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    if lane == SHARED:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif any(step.function.startswith("parts.") for step in steps):
        try:
            importlib.import_module(PRELOADED)
            visit.results.write(lane, "ready")
        except Exception as error:
            visit.results.finding(lane, failure("imports", error))
    for step in steps:
        run_step(step, visit)


def run_step(step: Step, visit: Visit) -> None:
    """Fork the step, wait for it until its limit, kill what is left of it, and pack what it keeps."""
    began = time.monotonic()
    wanted = step.seconds if visit.limit is None else visit.limit
    granted = min(wanted, visit.end - began)
    if granted < min(step.least, wanted):
        state = "left out" if step.optional else "not run"
        visit.results.write(step.name, "end", state=state, why=f"{max(0.0, granted):.0f} s are left")
        return
    work = visit.state / "work" / step.name
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    visit.results.write(step.name, "begin", lane=step.lane, limit=round(granted, 1))
    sys.stdout.flush()
    sys.stderr.flush()
    if (process := os.fork()) == 0:
        be_step(step, Context(visit.device, began + granted, work, visit.state / "home"), visit)
    state = "killed"
    try:
        if wait(process, began + granted):
            code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
            state = {0: "done", 1: "failed"}.get(code, f"ended with {code}")
    finally:
        end_descendants()
        visit.results.write(step.name, "end", state=state, seconds=round(time.monotonic() - began, 1))
        pack_kept(step.name, work / "keep", visit)


def be_step(step: Step, context: Context, visit: Visit) -> None:
    """Be the process of a step; does not return. Exit code 1 after an exception, which is a finding, too."""
    code = 1
    try:
        die_with_parent()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        log = os.open(visit.out / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(context.work)
        module, _, name = step.function.partition(":")
        for finding in getattr(importlib.import_module(module), name)(context):
            visit.results.finding(step.name, finding)
        code = 0
    except BaseException as error:
        visit.results.finding(step.name, failure("error", error))
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def wait(process: int, deadline: float) -> bool:
    """Return whether the child process has ended by the deadline; it is not reaped."""
    descriptor = os.pidfd_open(process)
    try:
        return bool(select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0])
    finally:
        os.close(descriptor)


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def pack_kept(name: str, kept_directory: Path, visit: Visit) -> None:
    """Pack the folder, where a step has made one, into one file of results, unless that is too large."""
    if not kept_directory.is_dir():
        return
    packed = visit.state / f"{name}.tar.gz"
    with tarfile.open(packed, "w:gz", compresslevel=6) as archive:
        archive.add(kept_directory, name)
    size = packed.stat().st_size
    if size > FILE_BYTES:
        visit.results.write(name, "left out", file=packed.name, why=f"{size:,} bytes, over {FILE_BYTES:,}")
    else:
        shutil.move(packed, visit.out / packed.name)


# -- the shared lane's own step ----------------------------------------------------------------------------


def compile_packages(context: Context) -> Iterator[Finding]:
    """Write the bytecode of what training imports, by all cores: an image may have come without."""
    for name in SMALL_COMPILED if context.small else COMPILED:
        began = time.monotonic()
        specification = importlib.util.find_spec(name)
        for folder in (specification and specification.submodule_search_locations) or ():
            compileall.compile_dir(folder, quiet=2, workers=1 if context.small else 0)
        yield Finding(f"bytecode of {name}", f"{time.monotonic() - began:.1f} s")


# -- caches ------------------------------------------------------------------------------------------------


def pack_caches(visit: Visit) -> None:
    """Write compiled kernels into files caches-0, caches-1, … of results. Where all are too many, those of
    the last names in CACHES are left out."""
    caches = visit.state / "caches"
    names = [name for name in CACHES.values() if any(file.is_file() for file in (caches / name).rglob("*"))]
    while names:
        stream = packed_folders(caches, names)
        starts = range(0, len(stream), CACHE_FILE_BYTES)
        if len(starts) <= CACHE_FILES:
            for number, start in enumerate(starts):
                (visit.out / f"caches-{number}").write_bytes(stream[start : start + CACHE_FILE_BYTES])
            visit.results.write("caches", "packed", files=len(starts), bytes=len(stream))
            return
        why = f"{len(stream):,} bytes with it, over {CACHE_FILES} files of {CACHE_FILE_BYTES:,}"
        visit.results.write("caches", "left out", file=names.pop(), why=why)


def packed_folders(parent: Path, names: Sequence[str]) -> bytes:
    """Return a compressed archive of the folder `caches` with these folders of `parent`."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz", compresslevel=6) as tar:
        for name in names:
            tar.add(parent / name, f"caches/{name}")
    return archive.getvalue()


def unpack_caches(visit: Visit, folder: Path) -> None:
    """Bring back the compiled kernels of the visit before, once. Of a missing or damaged file a line is
    written, and none of them comes back."""
    caches = visit.state / "caches"
    files = sorted(folder.glob("caches-*"), key=lambda file: int(file.name.partition("-")[2]))
    if caches.exists() or not files:
        return
    half = visit.state / "unpacked"
    shutil.rmtree(half, ignore_errors=True)
    joined = visit.state / "caches.tar.gz"
    joined.write_bytes(b"".join(file.read_bytes() for file in files))
    try:
        with tarfile.open(joined) as archive:
            archive.extractall(half, filter="data")
        (half / "caches").rename(caches)
        visit.results.write("caches", "unpacked", files=len(files))
    except (OSError, tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        visit.results.write("caches", "left out", file="caches", why=f"{type(error).__name__}: {error}")
    finally:
        joined.unlink()


# -- the driver --------------------------------------------------------------------------------------------


def run_call(call: Call, visit: Visit) -> bool:
    """Run both lanes to their end, or to that of the call. Return whether every step and finding was fine."""
    visit.results.write("call", "begin", **described(visit))
    unpack_caches(visit, visit.state.parent / "caches")
    lanes = dict[int, str]()
    sys.stdout.flush()
    for lane, steps in call.lanes().items():
        if not steps:
            continue
        if (process := os.fork()) == 0:
            code = 1
            try:
                run_lane(lane, steps, visit)
                code = 0
            except Stopped:
                pass
            finally:
                with suppress(BaseException):
                    end_descendants()
                os._exit(code)
        lanes[process] = lane
    try:
        for process in lanes:
            wait(process, visit.end + 1.0)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        end_lanes(lanes)
        pack_caches(visit)
        cut_log(visit)
        visit.results.write("call", "end")
    return all(succeeded(json.loads(line)) for line in visit.results.file.read_text().splitlines())


def end_lanes(lanes: dict[int, str]) -> None:
    """Ask them to end, each with the step under way; kill what is left."""
    for process in lanes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGTERM)
    deadline = time.monotonic() + END_S
    for process in lanes:
        wait(process, deadline)
    end_descendants()


def succeeded(line: dict[str, Any]) -> bool:
    return line.get("verdict") != "NOT OK" and line.get("state", "done") in ("done", "left out")


def described(visit: Visit) -> dict[str, Any]:
    gpu = ["nvidia-smi", "--query-gpu=name,driver_version,memory.used", "--format=csv,noheader"]
    return {
        "device": visit.device,
        "gpu": printed(gpu),
        "python": platform.python_version(),
        "revision": printed(["git", "-C", str(ROOT), "rev-parse", "--short=10", "HEAD"]),
    }


def printed(line: Sequence[str]) -> str:
    """Return what a command prints; '' where it is not there, fails or hangs."""
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(line, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    return ""


def cut_log(visit: Visit) -> None:
    log = visit.out / "log.txt"
    if log.exists() and log.stat().st_size > LOG_BYTES:
        log.write_bytes(log.read_bytes()[-LOG_BYTES:])
        visit.results.write("log", "cut", file=log.name, why=f"the last {LOG_BYTES:,} bytes are kept")


def arrange(folder: Path, state: Path) -> None:
    """Make state/home, the kit that parts read: links to what the loads have brought, and to this checkout.
    Its packages come first on the path of this process and of those that it starts."""
    home = state / "home"
    shutil.rmtree(home, ignore_errors=True)
    for load in sorted(folder.glob("load-*")):
        for file in (file for file in load.rglob("*") if file.is_file()):
            link = home / file.relative_to(load)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(file)
    (home / "tests").mkdir(parents=True)
    (home / "tests" / "__init__.py").touch()  # or another package of that name, installed there, would win
    (home / "tests" / "fakes").symlink_to(ROOT / "tests" / "fakes")
    for name in ("asyncrl", "configs"):
        (home / name).symlink_to(ROOT / name)
    paths = [str(home), str(HERE)]
    if sys.version_info[:2] == (3, 12):  # its extension modules are for no other
        paths.insert(0, str(home / "site"))
    sys.path[:0] = paths
    environment = {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONPYCACHEPREFIX": str(state / "bytecode"),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",  # without a network it would try again and again
        # Or an import that asks torch for a GPU would initialise CUDA, which no fork can use any more.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        **{key: str(state / "caches" / name) for key, name in CACHES.items()},
    }
    os.environ.update(environment)
    # An image may have come without bytecode, and forbid to write it: 12 s more at every process's start.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.pycache_prefix = environment["PYTHONPYCACHEPREFIX"]
    sys.dont_write_bytecode = False


@contextmanager
def alone(state: Path) -> Iterator[None]:
    """Inside, no other call uses the state folder. SystemExit where one does."""
    state.mkdir(parents=True, exist_ok=True)
    with (state / "lock").open("w") as lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # no fork inherits it: a step may outlive us
        except (BlockingIOError, PermissionError):
            raise SystemExit(f"{state}: another call is under way") from None
        yield


def arguments(calls: Sequence[str], words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("call", choices=calls)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "gpu-report")), help="results")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--limit", type=float, default=SMALL_SECONDS, help="seconds of each step, with --device cpu"
    )
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "build" / "gpu-visit", help="what `make gpu-visit` made"
    )
    return parser.parse_args(words)


def main(
    words: Sequence[str] | None = None,
    *,
    calls: dict[str, Call] = CALLS,
    prepare: Callable[[Path, Path], None] = arrange,
) -> int:
    args = arguments([*calls], words)
    began = time.monotonic()
    call = calls[args.call]
    out = args.out.resolve()
    folder = args.folder.resolve()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    out.mkdir(parents=True, exist_ok=True)
    with alone(folder / "state"):
        prepare(folder, folder / "state")
        limit = None
        seconds = call.seconds - PACK_S
        if args.device == "cpu":
            limit = args.limit
            seconds = args.limit * len(call.steps)
        for file in (out / "results.jsonl", out / "log.txt", *out.glob("caches-*")):
            file.unlink(missing_ok=True)  # of an earlier call
        visit = Visit(args.device, began + seconds, limit, folder / "state", out, Results(out))
        try:
            return 0 if run_call(call, visit) else 1
        except Stopped as signalled:
            print(f"ended early by {signalled}")
            return 1


if __name__ == "__main__":
    sys.exit(main())
