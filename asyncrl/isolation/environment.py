"""Chooses the environment variables of a program that the model leads: keys and tokens are not among them."""

from __future__ import annotations

import os
from collections.abc import Iterable

NAMES = frozenset({
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "LANG", "TZ", "TMPDIR"),
    *("LD_LIBRARY_PATH", "VIRTUAL_ENV", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TORCH_HOME"),
    *("OPENBLAS_NUM_THREADS", "TOKENIZERS_PARALLELISM", "NO_PROXY", "no_proxy"),
})  # fmt: skip
PREFIXES = ("LC_", "XDG_", "PYTHON", "OMP_", "MKL_", "CONDA_", "CUDA_")


def inherited(names: Iterable[str] = ()) -> dict[str, str]:
    """Variables that say where programs, libraries and temporary files are, and the variables `names`, where
    they are set."""
    allowed = NAMES.union(names)
    return {name: value for name, value in os.environ.items() if name in allowed or name.startswith(PREFIXES)}
