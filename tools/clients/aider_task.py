"""aider: writes a file and commits it. It asks for a commit message last, of its weak model if it has one."""

import os
import subprocess
import sys

from aider.main import main

WORDS = """--model openai/policy --yes-always --no-check-update --no-analytics --no-show-model-warnings
    --no-gitignore --map-tokens 0 --no-pretty --message"""
weak = ["--weak-model", "openai/small"] if sys.argv[1].startswith("weak") else []

for line in ("init -q", "config user.name me", "config user.email me@here"):
    subprocess.run(["git", *line.split()], check=True)
os.environ["OPENAI_API_BASE"] = os.environ["OPENAI_BASE_URL"]
main([*weak, *WORDS.split(), "Write into said.txt what 1 + 2 is."])
subject = subprocess.run(["git", "log", "-1", "--format=%s"], capture_output=True, text=True).stdout.strip()
with open("said.txt") as answer_file:
    print(answer_file.read().strip())
sys.exit(subject != "feat: say the sum" and f"the commit message is {subject!r}")
