"""The slow imports of the process that `forked` forks others from."""

from __future__ import annotations

import os
from importlib import import_module

os.environ["OMP_NUM_THREADS"] = "1"  # numpy's library would start threads, which a fork does not have

from asyncrl.runtime.process import quick_imports

IMPORTS = (
    *("pytest", "hydra", "pyarrow.parquet", "rich._emoji_codes"),
    *("transformers.models.auto.tokenization_auto", "transformers.models.llama.modeling_llama"),
    *("asyncrl.commands.train", "asyncrl.launch.start", "asyncrl.launch.role", "asyncrl.algorithms.recipe"),
    *(
        "asyncrl.coordinator.loop",
        "asyncrl.rollout.worker",
        "asyncrl.trainer.rank",
        "asyncrl.server_supervisor.supervisor",
    ),
    *("asyncrl.engines.torch", "asyncrl.engines.sglang.server"),
    *("tests.fakes.training", "tests.fakes.group_sender"),
)

with quick_imports():
    for name in IMPORTS:
        import_module(name)
