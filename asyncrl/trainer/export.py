"""The policy as a Hugging Face directory: weights, config, tokenizer."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import torch.distributed as dist

from asyncrl.trainer.model import Policy, full_state

WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".index.json")


def export_hf(directory: Path, policy: Policy, source: str) -> None:
    """Write what `from_pretrained` reads, in the configured dtype. A collective; rank 0 writes.

    Everything but the weights (tokenizer, chat template, generation settings) is that of `source`.
    """
    state = full_state(policy)
    if dist.get_rank() != 0:
        return
    directory.mkdir(parents=True, exist_ok=True)
    for file in sorted(Path(source).iterdir()):
        if file.is_file() and not file.name.endswith(WEIGHT_FILES):
            shutil.copyfile(file, directory / file.name)
    policy.lm.save_pretrained(directory, state_dict=state)
    config = copy.deepcopy(policy.lm.config)  # it names the dtype of the master weights
    config.dtype = policy.export_dtype
    config.save_pretrained(directory)
