"""Rows of tokens to compute gradients of, by the trainer's policy and by a plain loop; used by the kit and by
tools/bench/packing.py."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from asyncrl.config import Packing
from asyncrl.trainer.scores import Selected

MEMBERS = 8


class Rows(NamedTuple):
    """Rows of ids, and how many of each are its prompt."""

    ids: list[np.ndarray]
    prompts: list[int]

    def selected(self, packing: Packing) -> Selected:
        """The responses, which are what is scored."""
        scored = [len(row) - prompt for row, prompt in zip(self.ids, self.prompts, strict=True)]
        row = np.repeat(np.arange(len(scored)), scored)
        spans = zip(self.prompts, self.ids, strict=True)
        position = np.concatenate([np.arange(prompt, len(ids)) for prompt, ids in spans])
        return Selected.lay_out(self.ids, row, position, torch.ones(len(row)), packing)

    @property
    def useful(self) -> int:
        return sum(map(len, self.ids))


def ragged(rng: np.random.Generator, vocabulary: int, count: int, typical: int) -> Rows:
    """Return rows of lengths with a heavy tail; a fifth of each row is its prompt."""
    lengths = np.clip(rng.lognormal(np.log(typical), 0.7, count), 20, 8 * typical).astype(int)
    return rows_of(rng, vocabulary, lengths)


def like(rng: np.random.Generator, vocabulary: int, count: int, typical: int) -> Rows:
    """Return rows whose lengths are within a tenth of the typical one; a fifth of each row is its prompt."""
    return rows_of(rng, vocabulary, (typical * rng.uniform(0.9, 1.1, count)).astype(int))


def rows_of(rng: np.random.Generator, vocabulary: int, lengths: np.ndarray) -> Rows:
    return Rows([rng.integers(0, vocabulary, length) for length in lengths], (lengths // 5).tolist())


def grouped(rng: np.random.Generator, vocabulary: int, groups: int, prompt: int, response: int) -> Rows:
    """Responses of 0.7 to 1.3 times the typical length."""
    ids = []
    prompts = []
    for _ in range(groups):
        start = rng.integers(0, vocabulary, prompt)
        for _ in range(MEMBERS):
            length = int(response * rng.uniform(0.7, 1.3))
            ids.append(np.concatenate([start, rng.integers(0, vocabulary, length)]))
            prompts.append(prompt)
    return Rows(ids, prompts)


def plain_backward(model: Any, rows: Rows) -> list[torch.Tensor]:
    """The log-probs of the responses by a model of transformers, a row at a time without padding; gradients
    of their sum are left."""
    gradients = []
    for ids, prompt in zip(rows.ids, rows.prompts, strict=True):
        row = torch.from_numpy(ids)[None].to(model.device)
        logits = model(input_ids=row, use_cache=False, logits_to_keep=len(ids) - prompt + 1).logits[0, :-1]
        table = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        logp = table.gather(1, row[0, prompt:, None])[:, 0]
        logp.sum().backward()
        gradients.append(logp.detach())
    return gradients


def measured(model: Any, logp: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, Any]]:
    """Log-probs, and gradients by name, in float64."""
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    full_gradients = {
        name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in gradients.items()
    }
    return torch.cat(logp).double(), {name: g.double() for name, g in full_gradients.items()}


def distances(measured_values: tuple[torch.Tensor, dict[str, Any]], wanted: Any) -> tuple[float, float]:
    """Relative, of log-probs and of all gradients."""
    (logp, grads), (true_logp, true_grads) = measured_values, wanted
    assert grads.keys() == true_grads.keys(), grads.keys() ^ true_grads.keys()
    off = sum(float((grads[name] - true).square().sum()) for name, true in true_grads.items())
    size = sum(float(true.square().sum()) for true in true_grads.values())
    return float((logp - true_logp).norm() / true_logp.norm()), (off / size) ** 0.5


def formatted(pair: Any) -> str:
    logp, grads = pair
    return f"log-probs {logp:.1e}, gradients {grads:.1e}"
