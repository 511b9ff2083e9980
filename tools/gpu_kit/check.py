"""Check asyncrl on this machine's GPU, part by part, and write a report.

    python check.py --minutes 30 --out DIR [--only PART...] [--device cpu]

The most important parts run first, each in a process with a deadline of its own; one that fails, hangs or
is killed does not end the others. DIR/report.md and DIR/report.json grow with each part; DIR/parts.log
has the last output of each part. Exit code: 0 when every part that had to run did and met its goals, else 1.
"""

from __future__ import annotations

import argparse
import ast
import ctypes
import importlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parts.common import Context, Finding, append, failure

HERE = Path(__file__).resolve().parent
# In the order of their value: the last ones may find no time left.
ORDER = ["devices", "engine", "packing", "mfu", "server", "end_to_end", "images", "tests"]
SMALL_SECONDS = 120.0
LEAST_S = 8.0  # a part that would get less is not started
POLL_S = 0.1
KILL_S = 10.0
LOG_BYTES = 200_000  # of each part, in parts.log
CELL = 400  # characters of a cell of the first table
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


@dataclass
class Part:
    """One part, from waiting to its end. `state`: waiting, running, done, failed, killed, cut (optional, and
    out of time) or not run."""

    name: str
    goal: str = ""
    seconds: float = 0.0
    small_seconds: float = SMALL_SECONDS
    optional: bool = False
    about: str = ""
    state: str = "waiting"
    why: str = ""
    took: float = 0.0
    findings: list[Finding] = field(default_factory=list)

    @classmethod
    def read(cls, name: str) -> Part:
        """From the constants of its module, which is not imported: that may take long, or fail."""
        try:
            tree = ast.parse((HERE / "parts" / f"{name}.py").read_text())
        except (OSError, SyntaxError) as error:
            return cls(name, state="failed", why=str(error))
        fields: dict[str, Any] = {}
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                with suppress(ValueError):
                    fields[node.targets[0].id] = ast.literal_eval(node.value)
        return cls(
            name,
            goal=fields.get("GOAL", ""),
            seconds=fields.get("SECONDS", 60.0),
            small_seconds=fields.get("SMALL_SECONDS", SMALL_SECONDS),
            optional=fields.get("OPTIONAL", False),
            about=ast.get_docstring(tree) or "",
        )

    @property
    def ok(self) -> bool | None:
        if self.state in ("failed", "killed") or any(finding.ok is False for finding in self.findings):
            return False
        if self.state == "not run" and not self.optional:
            return False
        return True if any(found.ok for found in self.findings) else None

    @property
    def measured(self) -> str:
        """What bears on the goal, in a line."""
        chosen = [
            finding for finding in self.findings if finding.goal or finding.ok is not None
        ] or self.findings[:3]
        summary = "; ".join(f"{one.name}: {one.value}" for one in chosen)
        if self.state not in ("done", "running", "waiting"):
            summary = f"**{self.state}** ({self.why}) {summary}"
        return summary if len(summary) <= CELL else summary[: CELL - 1] + "…"


class Stopped(BaseException):
    """A signal asks the driver to end."""


class Driver:
    """Runs parts one after another and writes what they find."""

    def __init__(self, parts: list[Part], *, out: Path, work: Path, device: str, minutes: float) -> None:
        self.parts = parts
        self.out = out
        self.work = work
        self.device = device
        self.began = time.monotonic()
        self.end = self.began + minutes * 60
        self.stopped = ""

    def run(self) -> bool:
        """Run every part for which there is time; True where nothing failed."""
        try:
            for part in self.parts:
                self.run_part(part)
                verdict = {True: "ok", False: "NOT OK", None: ""}[part.ok]
                print(f"{part.name:12} {part.state:8} {part.took:6.1f} s  {verdict}", flush=True)
        except Stopped as signalled:
            self.stopped = str(signalled)
        finally:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            end_descendants()
            self.write()
        return not self.stopped and all(part.ok is not False for part in self.parts)

    def run_part(self, part: Part) -> None:
        """Start it, copy its findings into the report as they come, and end it at its deadline."""
        if part.state != "waiting":
            return
        wanted = part.small_seconds if self.device == "cpu" else part.seconds
        granted = min(wanted, self.end - time.monotonic() - 2.0)
        if granted < min(LEAST_S, wanted):
            part.state = "not run"
            part.why = "no time left"
            return
        part.state = "running"
        began = time.monotonic()
        findings = self.work / f"{part.name}.jsonl"
        log = self.work / f"{part.name}.log"
        findings.touch()
        self.write()
        seen = 0
        try:
            with log.open("wb") as output:
                process = self.start(part, findings, granted, output)
            while (code := process.poll()) is None and time.monotonic() - began < granted:
                time.sleep(POLL_S)
                if (size := findings.stat().st_size) != seen:
                    seen = size
                    part.findings = read_findings(findings)
                    part.took = time.monotonic() - began
                    self.write()
            self.conclude(part, code, granted < wanted, granted)
        except Stopped as signalled:
            part.state = "killed"
            part.why = f"the check was ended by {signalled}"
            raise
        finally:
            end_descendants()
            part.findings = read_findings(findings)
            part.took = time.monotonic() - began
            self.keep_log(part, log)
            self.write()

    def start(self, part: Part, findings: Path, granted: float, output: Any) -> subprocess.Popen[bytes]:
        part_directory = self.work / part.name
        part_directory.mkdir()
        paths = f"{HERE / 'site'}{os.pathsep}{HERE}"
        offline = {"HF_HUB_OFFLINE": "1"}  # without a network it would try again and again
        environment = os.environ | offline | {"PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}
        # An image may have come without bytecode, and forbid to write it: 12 s more at every process's start.
        environment["PYTHONPYCACHEPREFIX"] = str(self.work / "bytecode")
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        own_command = [sys.executable, str(HERE / "check.py"), "--part", part.name, "--device", self.device]
        part_arguments = [
            "--findings",
            str(findings),
            "--work",
            str(part_directory),
            "--seconds",
            f"{granted:.1f}",
        ]
        return subprocess.Popen(
            own_command + part_arguments,
            env=environment,
            cwd=part_directory,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def conclude(self, part: Part, code: int | None, short: bool, granted: float) -> None:
        if code is None:
            part.state = "cut" if part.optional and short else "killed"
            part.why = f"still running after {granted:.0f} s"
        elif code < 0:
            part.state = "failed"
            part.why = f"ended by {signal.Signals(-code).name}"
        elif code:
            part.state = "failed"
            part.why = f"exit code {code}"
        else:
            part.state = "done"

    def keep_log(self, part: Part, log: Path) -> None:
        with suppress(OSError), (self.out / "parts.log").open("ab") as all_logs, log.open("rb") as output:
            output.seek(max(0, log.stat().st_size - LOG_BYTES))
            all_logs.write(f"\n===== {part.name}: {part.state} {part.why}\n".encode() + output.read())

    def write(self) -> None:
        """Both reports, each at once: a reader never sees half of one."""
        replace(self.out / "report.json", json.dumps(self.document(), indent=1))
        replace(self.out / "report.md", "\n".join(self.page()) + "\n")

    def document(self) -> dict[str, Any]:
        part_entries = [
            {key: value for key, value in part.__dict__.items() if key != "findings"}
            | {"ok": part.ok, "findings": [finding.__dict__ for finding in part.findings]}
            for part in self.parts
        ]
        return {
            "device": self.device,
            "seconds": round(self.took, 1),
            "stopped": self.stopped,
            "parts": part_entries,
        }

    @property
    def took(self) -> float:
        return time.monotonic() - self.began

    def page(self) -> Iterator[str]:
        """A table of the parts, then what each found."""
        date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
        yield "# asyncrl on this machine\n"
        revision = HERE / "revision"
        if revision.exists():
            yield f"asyncrl at commit {revision.read_text()}.\n"
        yield f"Device: {self.device}; Python {platform.python_version()}; {date}; {self.took:.0f} s so far."
        if self.stopped:
            yield f"\n**Ended early by {self.stopped}.**"
        yield "\n| part | goal | measured | ok | seconds |\n|---|---|---|---|---|"
        for part in self.parts:
            name = part.name + (" (optional)" if part.optional else "")
            cells = [name, part.goal, part.measured, verdict(part.ok), f"{part.took:.0f}"]
            yield f"| {' | '.join(map(one_cell, cells))} |"
        for part in self.parts:
            yield from self.details(part)

    def details(self, part: Part) -> Iterator[str]:
        yield f"\n## {part.name}\n\n{part.about}\n\nState: {part.state}{part.why and ': ' + part.why}.\n"
        if part.findings:
            yield "| finding | value | goal | ok |\n|---|---|---|---|"
            for finding in part.findings:
                cells = [finding.name, finding.value, finding.goal, verdict(finding.ok)]
                yield f"| {' | '.join(map(one_cell, cells))} |"
        for finding in part.findings:
            if finding.note and "\n" not in finding.note:
                yield f"\n- {finding.name}: {finding.note}"
            elif finding.note:
                yield f"\n- {finding.name}:\n\n```\n{finding.note.replace('```', '` ` `')}\n```"


def verdict(ok: bool | None) -> str:
    return {True: "yes", False: "**NO**", None: ""}[ok]


def one_cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def replace(file: Path, text: str) -> None:
    """At most 5 MB, whatever a part yields."""
    half = file.with_name(f".{file.name}")
    half.write_bytes(text.encode(errors="replace")[:5_000_000])
    half.rename(file)


def read_findings(file: Path) -> list[Finding]:
    """Those of whole lines: the last one may be half written."""
    lines = file.read_text(errors="replace").split("\n")[:-1]
    return [Finding(**json.loads(line)) for line in lines]


def end_descendants() -> None:
    """Kill what a part left, also in sessions of its own: orphans become children of this process. One that
    hangs in the GPU's driver does not die."""
    deadline = time.monotonic() + KILL_S
    while (process_ids := descendants(os.getpid())) and time.monotonic() < deadline:
        for process_id in process_ids:
            with suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


def descendants(ancestor: int) -> list[int]:
    """Processes below it, as /proc has them."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):
            fields = stat.read_text().rpartition(")")[2].split()
            parents[int(stat.parent.name)] = int(fields[1])
    process_ids = []
    frontier = {ancestor}
    while frontier:
        frontier = {child for child, parent in parents.items() if parent in frontier}
        process_ids += frontier
    return process_ids


def run_here(name: str, device: str, seconds: float, work: Path, findings: Path) -> int:
    """Be the process of a part: 0 when it ended by itself, 1 after an exception."""
    began = time.monotonic()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    try:
        if device != "cpu":
            import torch

            if not torch.cuda.is_available():
                raise RuntimeError(f"torch {torch.__version__} sees no GPU; --device cpu runs small sizes")
        module = importlib.import_module(f"parts.{name}")
        for finding in module.run(Context(device, began + seconds, work, HERE)):
            append(findings, finding)
    except BaseException as error:
        append(findings, failure("error", error))
        raise
    return 0


def stop(number: int, _frame: object) -> None:
    raise Stopped(signal.Signals(number).name)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="time for all parts together")
    parser.add_argument("--out", type=Path, default=Path("gpu-report"), help="directory of the report")
    parser.add_argument("--only", nargs="+", metavar="PART", default=ORDER, help=", ".join(ORDER))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # from here on: the process of a part
    for flag, kind in (("--findings", Path), ("--work", Path), ("--seconds", float)):
        parser.add_argument(flag, type=kind, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    args = arguments()
    if args.part:
        return run_here(args.part, args.device, args.seconds, args.work, args.findings)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    (out / "parts.log").unlink(missing_ok=True)
    work = Path(tempfile.mkdtemp(prefix="gpu-check-"))
    parts = [Part.read(name) for name in dict.fromkeys(args.only)]
    driver = Driver(parts, out=out, work=work, device=args.device, minutes=args.minutes)
    try:
        fine = driver.run()
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(f"the report: {out / 'report.md'}")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
