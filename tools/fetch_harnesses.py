"""Fetch coding agents for tests and record their first requests: `make harnesses`.

    python tools/fetch_harnesses.py [--all] [--to .harnesses]

Packages come through npm, as this machine has it configured, for Linux on x86-64; nothing of them is part of
the repository. Each becomes a directory with the files that it ships; mini-swe-agent is a package of the
tests' environment. The requests that each sends first, to a server that refuses them, are in requests/.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import hashlib
import json
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from asyncrl.gateway import Endpoint, load_agent
from asyncrl.gateway.lines import CommandError
from asyncrl.types import Message, Sample

TARGET = Path(__file__).resolve().parents[1] / ".harnesses"
PACKAGES = {  # each with the SHA-512 of its archive, as npm writes it
    "claude_code": (
        "@anthropic-ai/claude-code-linux-x64@2.1.331",
        "IpvZ9c/NopO/sr8ThWLVAUDXVAFT3auLWrhbR6wq1dgkuJfZYdTtoXf6GajE5KL9R58iTt/86OPXrJAsM4+l8g==",
    ),
    "codex": (
        "@openai/codex@0.169.0-linux-x64",
        "o05NyAOCDygSPRo1yinzxvkRSdmsZyBD9E7mbpmjRanSfM8lypqWtQgEo4XfNkwhuCR2aFu8mlGOsQGFXVbVww==",
    ),
}
OTHERS = {  # for `make full`
    "opencode": (
        "opencode-linux-x64@1.18.33",
        "q/t/3p2CTxOT9y2kvjesb/LZab2+1eqlhhWA02Be6mjTtmYtNBcBsrI5yDo4Fw7ZSPBW2oyMIGMNRqiKQjiAWw==",
    ),
    "qwen_code": (  # a bundle, whose dependencies are optional
        "@qwen-code/qwen-code@0.24.4",
        "pmexy/Nj+BKd3Un1ogqGQE8V4GJn5B6N9PQOrU1GH+lMR29kn6Bgf6YdbZa8hNIoTmAKT1LTPK+P8TibZRPPVg==",
    ),
}
PROGRAMS = {  # of each package
    "claude_code": "claude_code/claude",
    "codex": "codex/vendor/x86_64-unknown-linux-musl/bin/codex",
    "opencode": "opencode/bin/opencode",
    "qwen_code": "qwen_code/cli-entry.js",
    "mini_swe_agent": f"{sys.prefix}/bin/mini",
}
SAMPLE = Sample(0, "test", (Message("user", "Count the lines of all files."),), "")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true", help="opencode and qwen-code, too")
    parser.add_argument("--to", type=Path, default=TARGET)
    arguments = parser.parse_args()
    target: Path = arguments.to
    if (here := (sys.platform, platform.machine())) != ("linux", "x86_64"):
        sys.exit(f"make harnesses: the packages are for Linux on x86-64, not for {' on '.join(here)}")
    npm = shutil.which("npm")
    if npm is None:
        sys.exit("make harnesses: they are npm packages, and there is no npm; install it")
    target.mkdir(parents=True, exist_ok=True)
    for name, (package, digest) in (PACKAGES | (OTHERS if arguments.all else {})).items():
        with tempfile.TemporaryDirectory(dir=target) as scratch:
            archive = packed(npm, package, Path(scratch))
            found = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
            if found != digest:
                sys.exit(f"{package} has the SHA-512 {found}, not {digest}")
            shutil.rmtree(target / name, ignore_errors=True)
            with tarfile.open(archive) as files:
                files.extractall(scratch, filter="data")
            (Path(scratch) / "package").rename(target / name)
        described = json.loads((target / name / "package.json").read_text())
        for program in described.get("bin", {}).values():
            (target / name / program).chmod(0o755)  # as npm does when it installs
        print(f"{name}: {described['version']}")
    for name, program in PROGRAMS.items():
        if (target / program).exists():
            record(name, target / program, target / "requests")


def packed(npm: str, package: str, folder: Path) -> Path:
    made = subprocess.run(
        [npm, "pack", "--silent", package],
        cwd=folder,
        check=True,
        timeout=600,
        stdout=subprocess.PIPE,
        text=True,
    )
    return folder / made.stdout.split()[-1]


def record(name: str, program: Path, folder: Path) -> None:
    """Write down the bodies of its requests and where they went."""
    asked: list[dict[str, str]] = []

    class Refusing(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            asked.append({"path": self.path.partition("?")[0], "body": body.decode()})
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
        except CommandError as error:  # its requests are refused
            if not asked:
                sys.exit(f"{name} made no request: {error}")
        finally:
            server.shutdown()
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in asked))
    print(f"{name}: {len(asked)} first requests")


if __name__ == "__main__":
    main()
