"""A check that the embedded engine gives the log-probs of a plain forward, on a small copy of the model."""

from __future__ import annotations

import copy
import math

import numpy as np
import torch
from transformers import AutoConfig, PreTrainedModel

from asyncrl.engines.base import Request, Sampling
from asyncrl.engines.torch.batch import Batcher
from asyncrl.errors import ConfigError, one_line
from asyncrl.shrunk import AGREE, RESERVED, passes, remembered
from asyncrl.types import Generation

# tokens of a turn; of a slot; of a step's prompts
NEW = 24
LONGEST = 112
CHUNK = 24


def check_served(model_path: str) -> None:
    """ConfigError for an architecture that the slots of the embedded engine compute otherwise."""
    config = AutoConfig.from_pretrained(model_path)
    found = remembered(config, "engine", lambda model: {"decoding": decodes(model)})
    if found and (problem := found["decoding"]):
        kind = (config.architectures or [type(config).__name__])[0]
        raise ConfigError(
            f"engine.name=torch: the embedded engine cannot serve {kind}: {problem}; use engine=sglang"
        )


def decodes(model: PreTrainedModel) -> str:
    """Says what is wrong with turns of three sessions, with prompts in chunks, a prefix that two share, and a
    second turn; '' for nothing."""
    plain = copy.deepcopy(model)
    rng = np.random.default_rng(0)
    size = model.config.get_text_config().vocab_size
    start, *ends = (rng.integers(min(RESERVED, size - 1), size, n).tolist() for n in (33, 9, 14, 12, 5))
    prompts = {"a": start + ends[0], "b": start + ends[1], "c": ends[2]}
    try:
        batcher = Batcher(model, len(prompts), LONGEST, CHUNK, version=0)
        found = _turns(batcher, prompts)
        prompts["d"] = prompts["c"] + [*found["c"].ids] + ends[3]
        found["d"] = _turns(batcher, {"c": prompts["d"]})["c"]
        gap = max(_gap(plain, prompts[name], turn) for name, turn in found.items())
    except Exception as error:
        if passes(error):
            raise
        return str(error) if isinstance(error, ConfigError) else f"it fails with {one_line(error)}"
    return "" if gap < AGREE else f"it gives log-probs that differ by {gap:.1e} from those of a plain forward"


def _turns(batcher: Batcher, prompts: dict[str, list[int]]) -> dict[str, Generation]:
    """A turn of each session, sampled together."""
    runs = {
        batcher.add(Request(name, tuple(ids), Sampling(NEW, stop_ids=()), key)): name
        for key, (name, ids) in enumerate(prompts.items())
    }
    found: dict[str, Generation] = {}
    while len(found) < len(runs):
        found |= {runs[run]: batcher.end(run) for run in batcher.step()}
    return found


@torch.no_grad()
def _gap(plain: PreTrainedModel, prompt: list[int], turn: Generation) -> float:
    ids = torch.tensor([[*prompt, *turn.ids]])
    table = plain(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    wanted = table.gather(1, ids[0, len(prompt) :, None])[:, 0]
    gap = float((wanted - torch.tensor(turn.logprobs)).abs().max())
    return math.inf if math.isnan(gap) else gap
