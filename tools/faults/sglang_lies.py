"""A real SGLang server that lies: it computes, samples or reports something else than it says.

    .venv-sglang/bin/python tools/faults/sglang_lies.py LIE --model-path DIR [arguments of SGLang]

As `engine.server_command` (with `engine=sglang_cpu`) the run starts such servers. The server is that of
tools/sglang_cpu/launch.py, with one function replaced. SGLang's other processes import this file again when
they start, so that the lie is in all of them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "sglang_cpu"))

import launch

LIE_VARIABLE = "ASYNCRL_SGLANG_LIE"  # names the lie to SGLang's other processes
SAMPLED_TEMPERATURE = 0.8


def keep_weights() -> None:
    """Confirm every version, and keep the first weights."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    WeightUpdater.update_weights_from_disk = lambda *_, **__: (True, "Succeeded to update model weights.")


def round_weights() -> None:
    """Round each matrix of a version to 8 bits, a scale per row."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    load_weights = DefaultModelLoader.load_weights_and_postprocess

    def load_rounded(model: Any, weights: Iterable[tuple[str, torch.Tensor]], device: Any) -> None:
        load_weights(model, ((name, _rounded(tensor)) for name, tensor in weights), device)

    DefaultModelLoader.load_weights_and_postprocess = staticmethod(load_rounded)


def sample_colder() -> None:
    """Sample at another temperature, and report the log-probs at the requested one."""
    from sglang.srt.layers.sampler import Sampler

    sample = Sampler._sample_from_probs

    def sample_from_colder(self: Any, probs: torch.Tensor, *args: Any) -> Any:
        colder = probs.pow(1 / SAMPLED_TEMPERATURE)
        return sample(self, colder / colder.sum(-1, keepdim=True), *args)

    Sampler._sample_from_probs = sample_from_colder


def ignore_salts() -> None:
    """Use keys and values of an older version for the prompts of a newer one: `cache_salt` has no effect."""
    from sglang.srt.managers.schedule_batch import Req

    initialise = Req.__init__

    def initialise_unsalted(self: Any, *args: Any, **settings: Any) -> None:
        initialise(self, *args, **settings | {"cache_salt": None})

    Req.__init__ = initialise_unsalted


LIES: dict[str, Callable[[], None]] = {
    "keep_weights": keep_weights,
    "round_weights": round_weights,
    "sample_colder": sample_colder,
    "ignore_salts": ignore_salts,
}


def _rounded(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() != 2:
        return tensor
    scale = tensor.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 127
    return (tensor / scale).round() * scale


if __name__ == "__main__":
    os.environ[LIE_VARIABLE] = sys.argv.pop(1)
    LIES[os.environ[LIE_VARIABLE]]()
    launch.run_server()
else:
    LIES[os.environ[LIE_VARIABLE]]()
