"""Make the shell's tasks: folders in Harbor's format, and the two images that hold their packages.

    python tools/make_shell_tasks.py --out examples/multiturn/shell_tasks/tasks

Writes OUT/train and OUT/test, a folder for each package, and imports the images `shell-tasks-train` and
`shell-tasks-test`, over one of this machine's `sh`, `cat`, `sed` and the like. No word of a held-out package
is in the training image. The same seed writes the same files.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from shell_puzzles import Puzzle, make_puzzle, split_words

PROGRAMS = ("sh", "cat", "sed", "ls", "mkdir", "rm", "mv", "cp", "grep", "env", "tail")
DIRECTORIES = ("proc", "dev", "sys", "etc", "tmp", "root", "repo")
TASK = """\
[environment]
docker_image = "{image}"
workdir = "/repo/{package}"
network_mode = "no-network"

[verifier]
timeout_sec = 20
"""
TEST = """\
#!/bin/sh
# Each function in a shell of its own, which cannot read what is expected; a report of them all, and Harbor's
# reward.
set -f
set -- $(cat /tests/expected)
rm /tests/expected
cd /repo/{package}
reward=1
cases=$(while [ $# -gt 0 ]; do
    printed=$(sh -c ". ./{package}.sh; $1" </dev/null)
    [ "$printed" = "$2" ] && result="" || result="<failure>expected $2</failure>"
    echo "<testcase classname='{package}' name='$1'>$result</testcase>"
    shift 2
done)
kill -s KILL -- -1 2>/dev/null  # all but this shell: none may write the report after it
case $cases in *"<failure>"*) reward=0 ;; esac
mkdir -p /logs/verifier
echo "<testsuite>$cases</testsuite>" >/logs/verifier/report.xml
echo $reward >/logs/verifier/reward.txt
"""


def write_task(folder: Path, puzzle: Puzzle, image: str) -> None:
    ids = {name: f"{puzzle.package}::{name}" for name in puzzle.expected}
    passing_tests = [test for name, test in ids.items() if name != puzzle.wrong_function]
    edit = f"/{puzzle.wrong_function}/s/{puzzle.printed}/{puzzle.wanted}/"
    files = {
        "instruction.md": puzzle.question,  # no newline at its end: the start model has seen none
        "task.toml": TASK.format(image=image, package=puzzle.package),
        "tests/test.sh": TEST.format(package=puzzle.package),
        "tests/expected": "".join(f"{name} {word}\n" for name, word in puzzle.expected.items()),
        "tests/config.json": json.dumps(
            {"FAIL_TO_PASS": [ids[puzzle.wrong_function]], "PASS_TO_PASS": passing_tests}
        ),
        "solution/solve.sh": f"sed -i {edit} {puzzle.package}.sh\n",
    }

    _write(folder, files)


def _write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def copy_programs(tree: Path) -> None:
    """Copy programs of this machine, with the libraries that `ldd` names."""
    programs = [path for name in PROGRAMS if (path := shutil.which(name, path="/usr/bin:/bin"))]
    ldd_output = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=True).stdout
    for library in {*re.findall(r"(/\S+) \(0x", ldd_output)}:
        target = tree / library[1:]
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, target)

    for name in (*DIRECTORIES, "bin"):
        (tree / name).mkdir(exist_ok=True)
    for program in programs:
        shutil.copy(program, tree / "bin")


def import_image(tree: Path, name: str, *options: str) -> None:
    command = [sys.executable, "-m", "asyncrl.cli", "image", "import", str(tree), "--name", name, *options]
    subprocess.run(command, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the shell tasks and their images.")
    parser.add_argument("--out", type=Path, required=True, help="directory for train/ and test/")
    parser.add_argument("--train", type=int, default=512, help="number of training tasks, at most 512")
    parser.add_argument("--test", type=int, default=256, help="number of held-out tasks, at most 256")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as work:
        base = Path(work, "base")
        base.mkdir()
        copy_programs(base)
        import_image(base, "shell-tasks")

        for split, words in split_words().items():
            rng = random.Random(f"{split} {args.seed}")
            image = f"shell-tasks-{split}"
            tree = Path(work, split)
            for package in words.packages[: getattr(args, split)]:
                puzzle = make_puzzle(rng, words, package)
                _write(tree / "repo" / package, puzzle.files)
                write_task(args.out / split / package, puzzle, image)
            import_image(tree, image, "--over", "shell-tasks")

    print(json.dumps({"out": str(args.out), "train": args.train, "test": args.test}))


if __name__ == "__main__":
    main()
