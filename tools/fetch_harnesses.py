"""Fetch coding agents for tests, as their packages ship them: `make harnesses`.

    python tools/fetch_harnesses.py [--all] [--to .harnesses]

Packages come through npm, as this machine has it configured, for Linux on x86-64; nothing of them is part of
the repository. Each becomes a directory with the package's files. mini-swe-agent is a package of the tests'
environment, so it is not fetched here.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

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


if __name__ == "__main__":
    main()
