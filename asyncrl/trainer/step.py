"""The learner: model, optimizer and schedule; turns a stream of micro-batches into optimizer steps.

    accumulate(rows) … accumulate(rows) ──► gradients, undivided ──► finish(): / D, clip, AdamW

Exactness: the loss of a batch is (Σ_t w_t·L_t)/D with w_t fixed before the forward and one D, known only
when the batch is complete. FSDP2 *averages* gradients over ranks, so every loss is multiplied by the
number of ranks. All ranks run the same number of forwards; one without rows runs a dummy token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from asyncrl.algorithms.correction import CorrectionInput, corrections
from asyncrl.algorithms.diagnostics import TokenState, token_sums
from asyncrl.algorithms.losses import LossInput, select_loss
from asyncrl.config import RunConfig
from asyncrl.trainer.barrier import train_held
from asyncrl.trainer.batch import Example, MicroBatch, collate, example
from asyncrl.trainer.model import Policy, load_policy
from asyncrl.trainer.report import batch_metrics, tally_examples, tally_tokens
from asyncrl.trainer.schedule import learning_rate
from asyncrl.trainer.tally import Tally
from asyncrl.trainer.world import World
from asyncrl.transport.messages import Row
from asyncrl.types import Turn

Work = Iterable[tuple[Row, Sequence[Turn]]]


class Learner:
    """One rank of the trainer. `step` is V: the number of completed optimizer batches.

    Methods are collectives: all ranks call the same ones in the same order. With
    `steps_per_batch` > 1 the rows wait for `finish` (see barrier.py).
    """

    def __init__(self, config: RunConfig, world: World, policy: Policy | None = None) -> None:
        self.config = config
        self.world = world
        self.policy = policy or load_policy(config.model.path, config.model.dtype, world)
        trainer = config.trainer
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters(), lr=trainer.lr, betas=trainer.betas, weight_decay=trainer.weight_decay
        )
        self.step = 0
        self.averaging: float = world.size  # what FSDP2 divides gradients by
        self.bound = config.buffer.max_staleness
        self.dtype = next(self.policy.parameters()).dtype
        self._loss = select_loss(config.algorithm)
        self._correct = corrections.get(config.algorithm.correction)
        self._expected = 256.0  # guess of D; see _rescale
        self._held: list[Example] = []
        self._tally = Tally()

    def accumulate(self, work: Work) -> None:
        """Train on this rank's rows of one micro-batch; empty for a rank that has nothing."""
        algorithm = self.config.algorithm
        examples = [example(row, turns, self.step, self.bound, algorithm) for row, turns in work]
        tally_examples(self._tally, examples)
        if algorithm.steps_per_batch > 1:
            self._held += examples
        else:
            self.backward(examples, self._tally)

    def finish(self) -> dict[str, float]:
        """The batch is complete: take its optimizer step(s), count it, return the metrics of all ranks."""
        if self.config.algorithm.steps_per_batch > 1:
            tally = merged(self.world.gather(self._tally, Tally))
            tally.merge(train_held(self, self._held))
        else:
            tally = self.apply(self._tally)
        self._held, self._tally = [], Tally()
        self.step += 1
        return batch_metrics(tally)

    def backward(self, examples: Sequence[Example], tally: Tally) -> None:
        """One forward and backward. Gradients add up, undivided; counts go to `tally`."""
        micro = collate(examples, self.dtype).to(self.world.device)
        loss, state = self._forward(micro)
        (loss * (self.averaging / self._expected)).backward()
        denominator = math.fsum(e.denominator for e in examples)
        tally.total("_D", denominator)
        tally_tokens(tally, token_sums(state), denominator)

    def _forward(self, micro: MicroBatch) -> tuple[Tensor, TokenState]:
        """The undivided loss Σ w·L of the tokens that may contribute."""
        config = self.config.algorithm
        logp, entropy = self.policy(micro.selected)
        pi = logp.detach()
        prox = pi if micro.prox is None else micro.prox
        fresh = micro.fresh & torch.isfinite(micro.mu) & torch.isfinite(pi)
        # A bad number must be gone before exp: weight zero times infinity is not zero.
        mu, logp = torch.where(fresh, micro.mu, prox), torch.where(fresh, logp, 0.0)
        correction = self._correct(CorrectionInput(prox - mu, micro.advantage, config))
        token = self._loss.of(LossInput(logp, prox, mu, micro.advantage, micro.row, correction, config))
        weighted = torch.where(fresh, micro.weight * token.value, 0.0)
        state = TokenState(
            logp=pi,
            prox=prox,
            mu=mu,
            entropy=entropy,
            loss=weighted.detach(),
            clipped=token.clipped,
            correction=correction,
            counted=micro.counted,
            in_bound=micro.fresh,
            fresh=fresh,
            exact=micro.exact,
            row=micro.row,
            lag=micro.lag,
        )
        return weighted.sum(), state

    def apply(self, tally: Tally) -> Tally:
        """Divide by the true D, clip, step. Returns the tally of all ranks, with what was done in it.

        Without a kept token there is nothing to learn, and neither Adam's moments nor weight decay act.
        """
        whole = merged(self.world.gather(tally, Tally))
        lr = learning_rate(self.config.trainer, self.step, self.config.total_steps)
        denominator = whole.totals.pop("_D", 0.0)
        norm = self._rescale(denominator) if whole.totals.get("trainer/kept_tokens") else None
        if norm is not None and math.isfinite(norm):
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            whole.high("actor/grad_norm", norm)
        else:
            whole.total("actor/skipped_steps", 1)
        self.optimizer.zero_grad()
        whole.high("actor/lr", lr)
        return whole

    def _rescale(self, denominator: float) -> float:
        """Make the gradients those of the batch's loss, clip them, and return the norm before clipping."""
        grads = [p.grad for p in self.policy.parameters() if p.grad is not None]
        for grad in grads:
            grad.mul_(self._expected / denominator)
        # A power of two scales exactly: the guess never changes a bit of the result.
        self._expected = 2.0 ** round(math.log2(denominator))
        norm = torch.nn.utils.get_total_norm(grads)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        limit = self.config.trainer.grad_clip
        if limit:
            torch.nn.utils.clip_grads_with_norm_(self.policy.parameters(), limit, norm)
        return float(norm)


def merged(tallies: Iterable[Tally]) -> Tally:
    """All ranks' tallies as one, added in rank order."""
    whole = Tally()
    for tally in tallies:
        whole.merge(tally)
    return whole
