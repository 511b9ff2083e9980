"""A module that is imported when something of it is used."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
from asyncrl.runtime.process import defer_import

defer_import("torch")
defer_import("no_such_module")
import asyncrl.algorithms.recipe
import asyncrl.launch.start
import torch

assert "torch.nn" not in sys.modules and "no_such_module" not in sys.modules
assert not hasattr(torch, "__warningregistry__") and "torch.nn" not in sys.modules
from torch import Tensor

assert "torch.nn" in sys.modules and torch.Tensor is Tensor is sys.modules["torch"].Tensor
assert torch.nn.functional is not None
"""


def test_the_launcher_does_not_import_torch_before_it_uses_it() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True, timeout=120)
