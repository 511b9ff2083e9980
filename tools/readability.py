"""Report what makes the changed lines of Python files hard to read. It reports; it does not fail.

    python tools/readability.py                 # lines that differ from origin/main
    python tools/readability.py --since COMMIT
    python tools/readability.py --all asyncrl   # every line of a folder

The rules are in CONTRIBUTING.md ("How a line should read"). tests/test_layering.py fails for
the few words that no good name contains (`RETIRED`); all else is for the author to judge.
"""

from __future__ import annotations

import argparse
import ast
import io
import os
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("asyncrl", "tools", "tests", "examples")
MAX_FINDINGS = 40

# Words that name a role in a sentence, and no thing.
# fmt: off
VAGUE = frozenset({
    "found", "own", "one", "given", "asked", "told", "said", "known", "shown", "made", "held",
    "kept", "taken", "whose", "who", "wrong", "others", "got", "begun", "ended", "what", "which",
    "due", "late", "looked", "here", "there", "most", "each", "mine", "whole", "other", "rest",
    "this", "that", "gone", "how", "makes", "needs", "has", "holds", "reads", "alike", "much",
    "many", "place", "places"
})
# fmt: on
COMMENT_START = re.compile(
    r"#\s*(it|its|they|those|these|that|this|what|which|who|whose|and|of)\b", re.IGNORECASE
)


class Finding(NamedTuple):
    path: Path
    line: int
    text: str


def bound_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield each bound name with its line: variables, attributes, parameters, functions and classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield (node.id if isinstance(node, ast.Name) else node.attr), node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno


def findings(path: Path) -> Iterator[Finding]:
    """Yield vague names, parallel assignments, literal tuples in calls, and comments that start oddly."""
    source = path.read_text()
    tree = ast.parse(source)

    for name, line in bound_names(tree):
        if name.strip("_") in VAGUE:
            yield Finding(path, line, f"'{name}' does not say what it names")

    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            targets = node.targets[0]
            if isinstance(targets, ast.Tuple) and not _is_swap(targets, node.value):
                yield Finding(path, node.lineno, "several assignments in one statement")
        elif isinstance(node, ast.Call):
            unpacked = (argument.value for argument in node.args if isinstance(argument, ast.Starred))
            if any(isinstance(value, ast.Tuple | ast.List) for value in unpacked):
                yield Finding(path, node.lineno, "a literal tuple is unpacked into a call")

    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and (match := COMMENT_START.match(token.string)):
            yield Finding(path, token.start[0], f"a comment begins with '{match.group(1)}'")


def _is_swap(targets: ast.Tuple, values: ast.Tuple) -> bool:
    return {ast.unparse(target) for target in targets.elts} == {ast.unparse(value) for value in values.elts}


def changed_lines(since: str) -> dict[Path, set[int]]:
    """Return the numbers of the lines that differ from `since`. CalledProcessError: no such commit."""
    python_files = [f"{folder}/*.py" for folder in FOLDERS]
    command = ["git", "diff", "--unified=0", "--no-color", since, "--", *python_files]

    diff = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout

    changed: dict[Path, set[int]] = {}
    for line in diff.splitlines():
        if line.startswith("+++ "):
            path = ROOT / line.removeprefix("+++ b/")
        elif match := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            first_line = int(match.group(1))
            line_count = int(match.group(2) or 1)
            changed.setdefault(path, set()).update(range(first_line, first_line + line_count))

    return {path: lines for path, lines in changed.items() if path.exists()}


def default_base() -> str:
    """Return where the branch left main, HEAD or its parent: the first from which a line differs; else ""."""
    for arguments in (["merge-base", "HEAD", "origin/main"], ["rev-parse", "HEAD"], ["rev-parse", "HEAD~1"]):
        answer = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
        commit = answer.stdout.strip()
        if answer.returncode == 0 and changed_lines(commit):
            return commit
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--since",
        default="",
        help="check lines changed since this commit (default: where the branch left origin/main)",
    )
    parser.add_argument("--all", type=Path, help="check every line in this folder")
    options = parser.parse_args()

    if options.all:
        reported = [finding for path in sorted(options.all.rglob("*.py")) for finding in findings(path)]
    else:
        base = options.since or default_base()
        changed = changed_lines(base) if base else {}
        reported = [
            finding for path, lines in changed.items() for finding in findings(path) if finding.line in lines
        ]

    for finding in reported[:MAX_FINDINGS]:
        print(f"{os.path.relpath(finding.path)}:{finding.line}: {finding.text}")
    if reported:
        print(f"readability: {len(reported)} lines to look at again, see CONTRIBUTING.md")


if __name__ == "__main__":
    main()
