"""Fetch coding agents for tests and record their first requests (`make harnesses`), or pin newer versions of
them (`--update`).

    python tools/fetch_harnesses.py [--all] [--to .harnesses]
    python tools/fetch_harnesses.py --update codex claude_code=VERSION

Packages come through npm, as this machine has it configured, for Linux on x86-64; nothing of them is part of
the repository. Each becomes a directory with the files that it ships; mini-swe-agent is a package of the
tests' environment. The requests that each sends first, to a server that refuses them, are in requests/.

`--update` fetches another version (the newest, if none is given), writes its number and the SHA-512 of its
archive into PINNED_IN, and runs all tests of this agent with it. If one fails, all is as it was.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

from asyncrl.gateway import Endpoint, load_agent
from asyncrl.gateway.lines import CommandError
from asyncrl.types import Message, Sample

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / ".harnesses"


class Package(NamedTuple):
    """A package of npm. `spec`: name and version. `digest`: the SHA-512 of the archive, in base64."""

    spec: str
    version: str
    digest: str


PACKAGES = {
    "claude_code": Package(
        "@anthropic-ai/claude-code-linux-x64@{version}",
        "2.1.332",
        "f4JWhzwYutJIHScC7/dYOPX6s28tt7ZADhsOi8zwOHq5fFPEuUeChh2NMfinSg0GrUckYxaeebC4h0DqiKzLcw==",
    ),
    "codex": Package(
        "@openai/codex@{version}-linux-x64",
        "0.171.0",
        "l66NZkQgdk2C3pbcfULDz42yEUB581MVA6I+Y43Wp4OIqEy73HCdmZ0GTjeAHY2ycuH4N00d9VsLrwT1jxshTw==",
    ),
}
OTHERS = {  # for `make full`
    "opencode": Package(
        "opencode-linux-x64@{version}",
        "1.18.33",
        "q/t/3p2CTxOT9y2kvjesb/LZab2+1eqlhhWA02Be6mjTtmYtNBcBsrI5yDo4Fw7ZSPBW2oyMIGMNRqiKQjiAWw==",
    ),
    "qwen_code": Package(  # a bundle, whose dependencies are optional
        "@qwen-code/qwen-code@{version}",
        "0.24.4",
        "pmexy/Nj+BKd3Un1ogqGQE8V4GJn5B6N9PQOrU1GH+lMR29kn6Bgf6YdbZa8hNIoTmAKT1LTPK+P8TibZRPPVg==",
    ),
}
PROGRAMS = {  # programs of each package
    "claude_code": "claude_code/claude",
    "codex": "codex/vendor/x86_64-unknown-linux-musl/bin/codex",
    "opencode": "opencode/bin/opencode",
    "qwen_code": "qwen_code/cli-entry.js",
    "mini_swe_agent": f"{sys.prefix}/bin/mini",
}
# Where, and between what, the version of an agent that was tested is written, once.
PINNED_IN = {
    "tools/fetch_harnesses.py": '"{version}"',
    "asyncrl/gateway/harnesses.py": 'tested="{version}"',
    "docs/guides/coding_agents.md": "` {version} |",
    "docs/dev/agents.md": " {version}: `{name}` |",
}
VERSION = re.compile(r"\d+(\.\d+)+")
# The tests that a version has to pass.
TESTS = (
    "tests/integration/test_harnesses.py",
    "tests/integration/test_abandoned.py",
    "tests/unit/conversation/test_real_tokenizers.py",
)
TESTS_SECONDS = 3600.0
SAMPLE = Sample(0, "test", (Message("user", "Count the lines of all files."),), "")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true", help="also fetch opencode and qwen-code")
    parser.add_argument("--to", type=Path, default=TARGET)
    parser.add_argument(
        "--update",
        nargs="+",
        default=[],
        metavar="NAME[=VERSION]",
        help="pin newer versions that pass the tests",
    )
    arguments = parser.parse_args()

    target: Path = arguments.to
    if (machine := (sys.platform, platform.machine())) != ("linux", "x86_64"):
        sys.exit(f"make harnesses: the packages are for Linux on x86-64, not for {' on '.join(machine)}")
    npm = shutil.which("npm")
    if npm is None:
        sys.exit("make harnesses: the harnesses are npm packages, but npm is missing; install npm")

    target.mkdir(parents=True, exist_ok=True)
    if arguments.update:
        signal.signal(
            signal.SIGTERM,
            lambda *_: sys.exit("stopped by SIGTERM; every pinned version has passed the tests"),
        )

    for update in arguments.update:
        name, _, version = update.partition("=")
        if name not in PACKAGES | OTHERS:
            sys.exit(
                f"--update {update}: unknown package {name!r}; available: {', '.join(PACKAGES | OTHERS)}"
            )
        if target.resolve() != TARGET.resolve():
            sys.exit(f"--update: the tests read {TARGET}; leave out --to")
        move_pin(npm, name, version)

    if arguments.update:
        return
    for name, package in (PACKAGES | (OTHERS if arguments.all else {})).items():
        digest = install(npm, name, package.spec.format(version=package.version), target, package.digest)
        print(f"{name}: {package.version}, SHA-512 {digest[:12]}…")

    for name, program in PROGRAMS.items():
        if (target / program).exists():
            record(name, target / program, target / "requests")


def install(npm: str, name: str, spec: str, target: Path, expected: str = "") -> str:
    """Unpack a package in place of the present one, and return the digest of its archive.

    SystemExit: the digest is not the expected one.
    """
    with tempfile.TemporaryDirectory(dir=target) as scratch:
        archive = packed(npm, spec, Path(scratch))
        digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
        if expected and digest != expected:
            sys.exit(f"{spec} has the SHA-512 {digest}, not {expected}")
        with tarfile.open(archive) as files:
            files.extractall(scratch, filter="data")
        shutil.rmtree(target / name, ignore_errors=True)
        (Path(scratch) / "package").rename(target / name)

    described = json.loads((target / name / "package.json").read_text())
    for program in described.get("bin", {}).values():
        (target / name / program).chmod(0o755)  # as npm does when it installs
    return digest


def move_pin(npm: str, name: str, version: str) -> None:
    """Pin another version of a coding agent (empty: the newest), if this version passes the tests."""
    package = (PACKAGES | OTHERS)[name]
    version = version or newest_version(npm, package.spec.rpartition("@")[0])
    if not VERSION.fullmatch(version):
        sys.exit(
            f"--update {name}={version}: give a version such as {package.version}, or leave the "
            "version out for the newest"
        )

    texts = {path: (ROOT / path).read_text() for path in PINNED_IN}
    moved_texts = {
        path: moved(text, PINNED_IN[path], name, package.version, version) for path, text in texts.items()
    }
    requests = TARGET / "requests" / f"{name}.jsonl"

    parts = {part: part.exists() for part in (TARGET / name, requests)}
    passed = False
    with tempfile.TemporaryDirectory(dir=TARGET) as scratch:
        before = Path(scratch)
        try:
            for part, existed in parts.items():
                if existed:
                    part.rename(before / part.name)

            digest = install(npm, name, package.spec.format(version=version), TARGET)
            record(name, TARGET / PROGRAMS[name], requests.parent)
            for path, text in moved_texts.items():
                (ROOT / path).write_text(text.replace(package.digest, digest))

            environment = {
                **os.environ,
                "ASYNCRL_REQUIRE_HARNESSES": "1",
                "ASYNCRL_REQUIRE_HARNESSES_ALL": "1",
            }

            family = name.partition("_")[0]  # names of tests may say claude, or codex
            words = [sys.executable, "-m", "pytest", "-q", "-m", "not long", "-k", family, *TESTS]
            passed = subprocess.run(words, cwd=ROOT, env=environment, timeout=TESTS_SECONDS).returncode == 0
        finally:
            if not passed:
                for path, text in texts.items():
                    (ROOT / path).write_text(text)
                for part, existed in parts.items():
                    if existed and not (before / part.name).exists():
                        continue  # the old folder was not moved away yet
                    shutil.rmtree(part, ignore_errors=True)
                    part.unlink(missing_ok=True)
                    if existed:
                        (before / part.name).rename(part)

    if not passed:
        sys.exit(f"{name} {version} does not pass the tests above; {package.version} stays pinned")
    print(f"{name}: {package.version} -> {version}; check the changes in {', '.join(PINNED_IN)}")


def moved(text: str, form: str, name: str, old: str, new: str) -> str:
    """Write a new version in place of the old one.

    Mentions of the old version elsewhere stay, as their figures were measured with the old version.
    """
    old_text, new_text = (form.format(name=name, version=version) for version in (old, new))
    if (count := text.count(old_text)) != 1:
        sys.exit(
            f"--update {name}: {old_text} must occur exactly once, but occurs {count} times; check PINNED_IN"
        )
    return text.replace(old_text, new_text)


def newest_version(npm: str, package: str) -> str:
    """Ask npm for the newest version of a package."""
    words = [npm, "view", package, "version"]
    viewed = subprocess.run(words, timeout=600, stdout=subprocess.PIPE, text=True)
    if viewed.returncode or not viewed.stdout.strip():
        sys.exit(f"npm view {package} failed; check the network, or give a version: --update NAME=VERSION")
    return viewed.stdout.strip()


def packed(npm: str, package: str, folder: Path) -> Path:
    packing = subprocess.run(
        [npm, "pack", "--silent", package], cwd=folder, timeout=600, stdout=subprocess.PIPE, text=True
    )
    if packing.returncode:
        code = packing.returncode
        sys.exit(f"npm pack {package} exited with code {code}; check the version and the network")
    return folder / packing.stdout.split()[-1]


def record(name: str, program: Path, folder: Path) -> None:
    """Record the bodies and paths of an agent's requests."""
    requests: list[dict[str, str]] = []

    class Refusing(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            requests.append({"path": self.path.partition("?")[0], "body": body.decode()})
            answer = b'{"type": "error", "error": {"type": "invalid_request_error", "message": "no"}}'
            self.send_response(400)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()

        endpoint = Endpoint(f"http://127.0.0.1:{server.server_port}/v1", "key", max_tokens=65536)
        agent = load_agent({name: {"program": str(program), "sandbox": "none"}})
        try:
            asyncio.run(agent(SAMPLE, endpoint))
        except CommandError as error:  # the server refuses the agent's requests
            if not requests:
                sys.exit(f"{name} made no request: {error}")
        finally:
            server.shutdown()

    folder.mkdir(exist_ok=True)
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(request) + "\n" for request in requests))
    print(f"{name}: {len(requests)} first requests")


if __name__ == "__main__":
    main()
