"""Run tests/unit with other versions of Python, torch and transformers, each in a fresh environment.

    python tools/versions.py "3.12 torch==2.11.0 transformers==5.17.0" "3.13 torch==2.14.1"

A case is a Python, found on PATH as python3.12, and requirements. These replace the pins of the same
packages in constraints.txt; the other pins stay. Where that has no solution, name what else must give way:
"setuptools<82" for torch 2.11.0, "huggingface-hub<2" for transformers 5.17.0. Each case in turn: an
environment under --envs, `pip install -e .[test]`, the tests in one process, a row of the table; then the
environment is removed, some 8 GB with torch for CUDA. What pip and pytest print is kept beside it. Failing
tests end no run; the exit code is 1 if there was one.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = """
import json, platform, torch, transformers
found = {"python": platform.python_version(), "torch": torch.__version__}
print(json.dumps(found | {"transformers": transformers.__version__}))
"""


def constraints(requirements: Sequence[str]) -> str:
    """Put these requirements in place of the lines of the same packages in constraints.txt."""
    replaced = {re.split(r"[<>=!~]", requirement)[0].lower() for requirement in requirements}
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    return "\n".join([*(pin for pin in pins if pin.partition("==")[0] not in replaced), *requirements, ""])


def install(python: str, requirements: Sequence[str], env: Path, log: IO[str]) -> None:
    """Make the environment and install asyncrl with the packages that its tests need."""
    subprocess.run([f"python{python}", "-m", "venv", "--clear", str(env)], check=True)
    pins = env / "constraints.txt"
    pins.write_text(constraints(requirements))
    pip = [str(env / "bin/python"), "-m", "pip", "install", "--progress-bar", "off"]
    # An old pip needs long to see that there is no solution.
    for pip_arguments in (["--upgrade", "pip"], ["--constraint", str(pins), "--editable", ".[test]"]):
        subprocess.run([*pip, *pip_arguments], cwd=ROOT, stdout=log, stderr=log, check=True)


def run_tests(env: Path, tests: Sequence[str], minutes: float, log: IO[str]) -> None:
    """Run the tests, for at most so many minutes."""
    command = [env / "bin/python", "-m", "pytest", *tests, "-q", "-m", "not long", f"--junitxml={env}.xml"]
    path = f"{env / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environ = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, stdout=log, stderr=log, timeout=60 * minutes)
    if done.returncode not in (0, 1):
        sys.exit(f"the tests exited with code {done.returncode} (-11 is a segmentation fault); see {env}.log")


def row(report: Path) -> dict[str, Any]:
    """Read the counts of a JUnit report and the names of the tests that failed."""
    (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    failed = counts["failures"] + counts["errors"]
    passed = counts["tests"] - failed - counts["skipped"]

    cases = [
        case
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return {
        "passed": passed,
        "failed": failed,
        "skipped": counts["skipped"],
        "seconds": round(float(suite.attrib["time"])),
        "failures": [f"{case.attrib['classname']}::{case.attrib['name']}" for case in cases],
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    heads = [name for name in rows[0] if name != "failures"]
    lines = [heads, ["---"] * len(heads), *([str(row[head]) for head in heads] for row in rows)]
    failures = [f"{row['python']}, torch {row['torch']}: {name}" for row in rows for name in row["failures"]]
    return "\n".join([*("| " + " | ".join(line) + " |" for line in lines), *failures])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="+", help='for example "3.12 torch==2.11.0 transformers==5.17.0"')
    parser.add_argument("--envs", type=Path, default=ROOT / "build/versions")
    parser.add_argument("--tests", nargs="+", default=["tests/unit"])
    parser.add_argument(
        "--minutes", type=float, default=60, help="time limit for the tests of one case, in minutes"
    )
    args = parser.parse_args()

    args.envs.mkdir(parents=True, exist_ok=True)
    rows = []
    for case in args.cases:
        python, *requirements = case.split()

        env = args.envs.resolve() / re.sub(r"[^\w.]+", "-", case)
        begin = time.monotonic()
        with open(f"{env}.log", "w") as log:
            install(python, requirements, env, log)
            installed = round(time.monotonic() - begin)
            versions_json = subprocess.check_output([env / "bin/python", "-c", VERSIONS])
            run_tests(env, args.tests, args.minutes, log)

        rows.append(json.loads(versions_json) | {"installed in": f"{installed} s"} | row(Path(f"{env}.xml")))
        print(table(rows[-1:]), flush=True)
        shutil.rmtree(env)

    print(table(rows))
    return int(any(version_row["failed"] for version_row in rows))


if __name__ == "__main__":
    sys.exit(main())
