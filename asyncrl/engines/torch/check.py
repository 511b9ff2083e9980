"""A check that the embedded engine gives the log-probs of a plain forward, on a small copy of the model."""

from __future__ import annotations

import copy
import math

import numpy as np
import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from asyncrl.engines.base import Request, Sampling
from asyncrl.engines.torch.batch import Batcher
from asyncrl.engines.torch.slots import KVCache
from asyncrl.errors import ConfigError, one_line
from asyncrl.model_class import auto_class_of
from asyncrl.shrunk import (
    LOGPROB_TOLERANCE,
    RESERVED_IDS,
    attention_arguments,
    cached_findings,
    is_passing_error,
)
from asyncrl.types import Generation

NEW_TOKENS = 24  # sampled in a turn
SLOT_TOKENS = 112  # room of a slot
CHUNK_TOKENS = 24  # prompt tokens of a step


def check_served(model_path: str) -> bool:
    """Raise ConfigError for an architecture whose log-probs differ in the slots of the embedded engine.
    Return False where no small copy of the architecture can be made and nothing was checked."""
    config = AutoConfig.from_pretrained(model_path)
    known_result = cached_findings(config, "engine", lambda model: {"decoding": decoding_problem(model)})
    if known_result and (problem := known_result["decoding"]):
        architecture = (config.architectures or [type(config).__name__])[0]
        raise ConfigError(
            f"engine.name=torch: the embedded engine cannot serve {architecture}: {problem}; "
            "use engine=sglang"
        )
    return known_result is not None


def slot_sizes(config: PreTrainedConfig) -> tuple[int, int]:
    """Return how many numbers the keys and values of a token are, and how many bytes the states of a slot
    take, with their snapshots; of the whole model, which is built without memory."""
    with torch.device("meta"):
        model: PreTrainedModel = auto_class_of(config).from_config(
            copy.deepcopy(config),
            dtype=torch.float32,
            experts_implementation="batched_mm",  # other ways look at values
            **attention_arguments(config),
        )
        cache = KVCache(model.eval(), slot_count=1, max_len=1)

    kv_numbers = sum(pool.numel() for pool in cache.kv_pools) // cache.columns
    state_bytes = sum(pool.nbytes for pool in (*cache.states.pools, *cache.states.snapshots))
    return kv_numbers, state_bytes


def decoding_problem(model: PreTrainedModel) -> str:
    """Describe how the engine's log-probs differ from a plain forward, '' if they agree: for turns of three
    sessions, with prompts in chunks, a prefix that two sessions share and one of them copies, a second turn,
    and a second turn behind a first one that was rewritten."""
    plain_model = copy.deepcopy(model)
    generator = np.random.default_rng(0)
    vocabulary_size = model.config.get_text_config().vocab_size
    shared_prefix, *endings = (
        generator.integers(min(RESERVED_IDS, vocabulary_size - 1), vocabulary_size, length).tolist()
        for length in (33, 9, 14, 12, 5, 7)
    )

    prompts = {"a": shared_prefix + endings[0], "b": shared_prefix + endings[1], "c": endings[2]}
    try:
        batcher = Batcher(model, len(prompts), SLOT_TOKENS, CHUNK_TOKENS, version=0)
        turns = _sample_turns(batcher, prompts)
        second_prompts = {
            "a": prompts["a"] + [*turns["a"].ids[4:]] + endings[4],  # the beginning is gone
            "c": prompts["c"] + [*turns["c"].ids] + endings[3],
        }
        second_turns = _sample_turns(batcher, second_prompts)
        prompts |= {f"second {name}": prompt for name, prompt in second_prompts.items()}
        turns |= {f"second {name}": turn for name, turn in second_turns.items()}
        gap = max(_logprob_gap(plain_model, prompts[name], turn) for name, turn in turns.items())
    except Exception as error:
        if is_passing_error(error):
            raise
        return str(error) if isinstance(error, ConfigError) else f"sampling fails with {one_line(error)}"

    return (
        ""
        if gap < LOGPROB_TOLERANCE
        else f"its log-probs differ by up to {gap:.1e} from those of a plain forward pass"
    )


def _sample_turns(batcher: Batcher, prompts: dict[str, list[int]]) -> dict[str, Generation]:
    """Sample a turn of each session, all in one batch."""
    runs = {
        batcher.add_request(Request(name, tuple(ids), Sampling(NEW_TOKENS, stop_ids=()), key)): name
        for key, (name, ids) in enumerate(prompts.items())
    }

    turns: dict[str, Generation] = {}
    while len(turns) < len(runs):
        turns |= {runs[run]: batcher.end_run(run) for run in batcher.step()}

    return turns


@torch.no_grad()
def _logprob_gap(plain_model: PreTrainedModel, prompt: list[int], turn: Generation) -> float:
    ids = torch.tensor([[*prompt, *turn.ids]])
    logprobs = plain_model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    expected_logprobs = logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0]
    gap = float((expected_logprobs - torch.tensor(turn.logprobs)).abs().max())
    return math.inf if math.isnan(gap) else gap
