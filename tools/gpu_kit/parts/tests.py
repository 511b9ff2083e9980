"""What do the tests of tests/gpu say, one by one?"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from xml.etree import ElementTree

from parts.common import Context, Finding

SECONDS = 150
GOAL = "all pass"
OPTIONAL = True  # other parts ask the same, and more

LINES = 15  # of a failure


def run(context: Context) -> Iterator[Finding]:
    report = context.work / "junit.xml"
    command = [sys.executable, "-m", "pytest", str(context.kit / "tests" / "gpu"), "-q", "-c", "/dev/null"]
    command += ["--rootdir", str(context.kit), "--import-mode=importlib", "-p", "no:cacheprovider"]
    try:
        code = subprocess.run([*command, f"--junitxml={report}"], timeout=context.left() - 3).returncode
    except subprocess.TimeoutExpired:
        yield Finding("pytest", "not over in time", ok=False, note="its output is in parts.log")
        return
    cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    yield Finding("pytest", f"{len(cases)} tests, exit code {code}", "0", code == 0)
    for case in cases:
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        problems = [problem for kind in ("failure", "error") for problem in case.findall(kind)]
        skipped = case.find("skipped")
        if problems:
            text = "\n".join((problems[0].text or "").strip().splitlines()[-LINES:])
            yield Finding(name, "failed", "passes", False, text)
        elif skipped is not None:
            yield Finding(name, f"skipped: {skipped.get('message')}")
        else:
            yield Finding(name, f"passed in {float(case.get('time', 0)):.1f} s", "passes", True)
