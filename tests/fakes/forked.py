"""Processes of tests, forked from one that has the slow imports behind it: torch, transformers and the like.

Python has one such process, with the imports that were asked for last before it started: so all tests ask
for the same. A process that was forked has none: one that it starts imports everything again, which takes
seconds. So a test starts all processes itself, and passes on what connects them."""

from __future__ import annotations

import multiprocessing

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(
    [
        *("pytest", "hydra", "pyarrow.parquet", "transformers.models.auto.tokenization_auto"),
        *("asyncrl.launch.start", "asyncrl.engines.sglang.server", "asyncrl.algorithms.recipe"),
        *("tests.fakes.training", "tests.fakes.group_sender"),
    ]
)
