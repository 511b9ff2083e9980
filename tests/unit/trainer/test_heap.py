"""What the allocator holds back."""

from __future__ import annotations

import subprocess
import sys

# 64 MB of blocks too small to be mapped one by one, with one block above them that stays.
HOLES = """
import psutil
from asyncrl.trainer.memory import trim_heap

blocks = [bytes([1]) * 100_000 for _ in range(640)]
last = bytes([1]) * 100_000
blocks.clear()
held = psutil.Process().memory_info().rss
trim_heap()
print(held - psutil.Process().memory_info().rss)
"""


def test_freed_memory_goes_back_to_the_system() -> None:
    done = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 40e6
