"""The learner: models, optimizers and schedule; turns a stream of micro-batches into optimizer steps.

    accumulate(work) … accumulate(work) ──► gradients, undivided ──► finish(): replicas' mean, / D, clip

Exactness: the loss of a batch is (Σ_t w_t·L_t)/D with w_t fixed before the forward and one D, known only
when the batch is complete. FSDP2, and replicas once a step, *average* gradients over ranks, so every loss is
multiplied by the number of ranks. All ranks run the same number of forwards; one without trajectories runs a
dummy token.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asyncrl.algorithms.diagnostics import token_sums
from asyncrl.algorithms.kl import adapted
from asyncrl.algorithms.normalise import Whitening
from asyncrl.algorithms.recipe import compose
from asyncrl.buffer.packing import Piece, micro_batches
from asyncrl.config import RunConfig, described_recomputation
from asyncrl.errors import recorded
from asyncrl.trainer import report
from asyncrl.trainer.barrier import compare_batch, partition_groups, prepare_batch, advantage_scaling
from asyncrl.trainer.batch import TrainingSample, MicroBatch, collate, partition_plan, training_sample, with_values
from asyncrl.trainer.advantages import with_advantages, with_kl_penalty, with_scaled_advantages
from asyncrl.trainer.footprint import RECOMPUTED_EVERY, least_recomputation
from asyncrl.trainer.layers import compiled_graphs
from asyncrl.trainer.loading import master_dtype
from asyncrl.trainer.model import Critic, load_critic, load_policy, load_reference
from asyncrl.trainer.objective import Evaluated, evaluate, teacher_of
from asyncrl.trainer.optimizer import (
    SpikeError,
    learning_rate,
    make_optimizer,
    norm_limit,
    note_norm,
    take_step,
)
from asyncrl.trainer.packing import packing_for
from asyncrl.trainer.performance import FlopCount, Stopwatch
from asyncrl.trainer.prefix_tree import common
from asyncrl.trainer.recompute import Recomputation
from asyncrl.trainer.world import World
from asyncrl.types import Turn
from asyncrl.wire.messages.trainer import PlannedTrajectory

Work = Iterable[tuple[PlannedTrajectory, Sequence[Turn]]]
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _ScoredMicroBatch:
    """A micro-batch between its forward and the count of what its loss is made of. `logp`: [N]."""

    examples: Sequence[TrainingSample]
    micro: MicroBatch
    logp: Tensor
    evaluated: Evaluated


class Learner:
    """Trains as one rank of the trainer. `step` is V: the number of completed optimizer batches.

    Methods are collectives: all ranks call the same ones in the same order. Where the recipe has a barrier
    the episodes wait for `finish`, which compares the whole batch (see barrier.py). `state`: the numbers that
    belong to a checkpoint beside models and optimizers; they are frozen within a batch.
    """

    def __init__(self, config: RunConfig, world: World) -> None:
        self.config = config
        self.world = world
        self.recipe = compose(config)
        self.recomputation = self._chosen_recomputation()
        self.policy = load_policy(
            config.model,
            world,
            trainer=config.trainer,
            recomputation=self.recomputation,
            adapters=config.adapters,
            value_head=self.recipe.shared_critic,
            offload=config.trainer.offload_optimizer,
        )
        self.critic = load_critic(config, world, self.recomputation) if self.recipe.own_critic else None
        self.scored = self.recipe.reference and config.scored_reference
        own = self.recipe.reference and not self.scored
        self.reference = load_reference(config, world, self.policy) if own else None
        policies = [self.policy]
        if self.reference is not None and self.reference.policy is not self.policy:
            policies.append(self.reference.policy)
        models = [*policies, *([self.critic] if self.critic else [])]  # in one order on all ranks
        layout = config.trainer.packing
        dtype = config.model.dtype
        compiled = config.trainer.compile
        self.packing = packing_for(models, layout, dtype, world, compiled)
        for policy in policies:
            policy.packing = self.packing
        # After the check, which holds gradients.
        self.optimizer = make_optimizer(self.policy, config.trainer, lr=config.trainer.lr)
        self.agents = tuple(config.adapters) or ("",)
        self.step = 0
        self.state: dict[str, float] = {"kl_coef": config.kl.coef}
        self.on_spike = config.trainer.on_spike
        self.averaging: float = world.data_ranks  # of whose gradients a step takes the mean
        self.bound = config.buffer.max_staleness
        self.budget = config.trainer.micro_batch_tokens  # or less, where that took too much memory
        self.size = (0, 0)  # tokens, padding included, and episodes of the micro-batch under way; 0: none
        self.dtype = master_dtype(config.model.dtype)  # of numbers per token
        self.watch = Stopwatch()
        self.pulse: Callable[[], None] = lambda: None  # called after every micro-batch, for signs of life
        self.ratios: report.Ratios | None = None  # who looks at single tokens
        self._expected = 256.0  # estimate of D, for a loss of about 1; see apply
        self._held: list[TrainingSample] = []
        self._tally = report.MetricSums()
        self._flop_count = FlopCount.of(self.policy.lm)
        # tokens, padding included, of its forwards in this step
        self._computed = 0
        self._flops = 0.0

    def _chosen_recomputation(self) -> Recomputation:
        """As configured; `auto` on GPUs: the least with which every rank fits into its own. A collective."""
        device = self.world.device
        recomputation = Recomputation(self.config.trainer)
        if not recomputation.automatic or device.type != "cuda":
            return recomputation

        memory = torch.cuda.get_device_properties(device).total_memory
        with recorded() as failure:
            least = least_recomputation(self.config, memory, device.index or 0, torch.cuda.device_count())
        if failure:
            logger.warning("the memory estimate failed, so all layers are recomputed: %s", failure.line)
            least = 1
        recomputation.every = max(self.world.gather(least, int), key=RECOMPUTED_EVERY.index)
        logger.info("trainer.activation_checkpointing=auto: %s", described_recomputation(recomputation.every))
        return recomputation

    # -- a batch ---------------------------------------------------------------------------------------

    @property
    def behind_barrier(self) -> bool:
        """The batch is trained behind a barrier: always, or because running statistics are still unknown."""
        return self.recipe.barrier or (self.recipe.scale == "whiten_running" and self.whitening is None)

    @property
    def whitening(self) -> Whitening | None:
        """Return the running statistics of earlier batches; None while they are unknown."""
        return Whitening.from_state(self.state)

    def accumulate(self, work: Work) -> None:
        """Train on this rank's trajectories of one micro-batch; empty for a rank that has nothing."""
        masked = self.config.algorithm.mask_truncated
        rule = self.recipe.aggregate
        choices = self.policy.replay.choices if self.policy.replay is not None else 0
        examples = [
            training_sample(
                *(planned, turns, self.step, self.bound, rule),
                mask_truncated=masked,
                expert_choices=choices,
                scorer_topk=self.config.kl.top_k if self.scored else None,
                agent_names=self.agents,
            )
            for planned, turns in work
        ]
        report.tally_examples(self._tally, examples, self.config.rollout.longest_prompt)
        if self.behind_barrier:
            self._held += examples
            return
        self._train(examples, self._tally)

    def finish(self) -> dict[str, float]:
        """The batch is complete: take its optimizer step(s), count it, return the metrics of all ranks.
        Raises SpikeError, on all ranks, if it is to be left out: this learner is of no use then."""
        if self.behind_barrier:
            tally = report.merged(self.world.gather_data(self._tally, report.MetricSums))
            tally.merge(self._train_held())
        else:
            tally = self.apply(self._tally)
        self._held = []
        self._tally = report.MetricSums()
        self.step += 1
        metrics = report.batch_metrics(tally, advantage_scaling(self.recipe, tally, self.whitening))
        self._advance(tally, metrics)
        if metrics.get("trainer/replayed_share") == 0:
            logger.warning(
                "trainer.router_replay: the servers returned no routed experts that fit the model, so none "
                "were replayed; start them (engine.urls) with the model of model.path"
            )
        if self.config.trainer.compile:
            metrics["perf/compiled_graphs"] = compiled_graphs()
        metrics["perf/recomputed_layers"] = self.recomputation.recomputed_fraction
        return metrics

    def _advance(self, tally: report.MetricSums, metrics: dict[str, float]) -> None:
        """Update what the next batch uses: the KL coefficient, the running moments of advantages."""
        kl = self.config.kl
        if kl.where != "none":
            metrics["actor/kl_coef"] = self.state["kl_coef"]
            episodes = int(metrics.get("trainer/trajectories", 0))
            self.state["kl_coef"] = adapted(
                self.state["kl_coef"], metrics.get("actor/ref_kl", kl.target), kl.target, episodes, kl.horizon
            )
        if self.recipe.scale == "whiten_running":
            self.state |= Whitening.updated(self.whitening, report.advantage_tokens(tally)).state()

    # -- behind the barrier ----------------------------------------------------------------------------

    def _train_held(self) -> report.MetricSums:
        """Score, compare and prepare the held batch, then take its optimizer steps: `epochs` passes over
        `steps_per_batch` mini-batches. The tally is that of all ranks.

        Mini-batches are of whole groups, each with its own denominator. The lag was checked once, at the
        start of the batch; what the policy drifts inside it shows as `actor/ppo_kl`.
        """
        steps = self.config.algorithm.steps_per_batch
        coef = self.state["kl_coef"]
        scored = self._scored(self._held)
        with self.watch.phase("adv"):
            penalty = coef if self.config.kl.where == "reward" else None
            held, whole = compare_batch(self.world, scored, self.recipe, penalty, self.whitening)
        held = prepare_batch(self.world, held, self.recipe.loss)
        groups = set().union(*self.world.gather({e.group for e in held}, set[str]))
        for index in range(self.recipe.optimizer_steps):
            epoch, k = divmod(index, steps)
            part_of = partition_groups(groups, steps, f"{self.config.seed}/{self.step}/{epoch}")
            tally = report.MetricSums()
            part = [e for e in held if part_of[e.group] == k]
            self._train(part, tally, progress=index / self.recipe.optimizer_steps)
            whole.merge(self.apply(tally))
        return whole

    def _scored(self, held: Sequence[TrainingSample]) -> list[TrainingSample]:
        """The examples with the log-probs and values of the models as they are now, where the recipe asks."""
        recipe = self.recipe
        done = list[TrainingSample]()
        of_policy = recipe.prox == "recompute" or recipe.shared_critic
        if not (of_policy or recipe.critic or self.reference is not None):
            return list(held)
        for part in self._micro_batches(held):
            micro = self._collate(part)
            found: dict[str, Tensor | None] = {}
            with torch.no_grad():
                if of_policy:
                    scores = self.policy(micro.selected, collision=recipe.advantage.whole_group)
                    found |= {"prox": scores.logp, "collision": scores.collision, "value": scores.value}
                if self.critic is not None:
                    with self.watch.phase("values"):
                        found["value"] = self.critic(micro.selected)
            if self.reference is not None and recipe.scores_reference:
                with self.watch.phase("ref"):
                    found["reference"] = self.reference.logp(micro.reference_tokens)
            for name, values in found.items():
                if values is not None and not (name == "prox" and recipe.prox != "recompute"):
                    part = with_values(part, name, values)
            done += part
            self.pulse()
        return done

    def share(self, planned: Sequence[PlannedTrajectory]) -> list[list[PlannedTrajectory]]:
        """This rank's part of a plan, in parts of about a micro-batch."""
        ranks = self.world.data_ranks
        return self.deal(planned, ranks)[self.world.rank * ranks // self.world.size]

    def partition_groups(self, planned: Sequence[PlannedTrajectory], ranks: int) -> list[list[list[PlannedTrajectory]]]:
        """The shares of so many ranks."""
        hidden = self.policy.lm.config.get_text_config().hidden_size
        return partition_plan(planned, self.packing, self.budget, hidden, ranks)

    def _micro_batches(self, examples: Sequence[TrainingSample]) -> list[list[TrainingSample]]:
        """Cut this rank's examples under the token budget, padded to the same count on all ranks."""
        first: dict[str, np.ndarray] = {}  # of each key, a row that others may begin like
        pieces = []
        for e in examples:
            key = f"{e.group}/{e.sequence_adapters[:1]}" if self.packing == "tree" else e.planned.uid
            shared = common(first.setdefault(key, e.sequences[0]), e.sequences[0])
            pieces.append(Piece(key, e.total_tokens, shared, len(e.sequences), e.longest_sequence))
        packed = micro_batches(pieces, self.budget, padded=self.packing == "padded")
        count = max(self.world.gather(len(packed), int))
        cut = [[examples[i] for i in part] for part in packed]
        return cut + [[] for _ in range(count - len(cut))]

    def _collate(self, examples: Sequence[TrainingSample]) -> MicroBatch:
        micro = collate(examples, self.dtype, self.packing)
        self.size = micro.selected.ids.numel(), len(examples)  # from here on it takes the device's memory
        return micro.to(self.world.device)

    # -- a micro-batch ---------------------------------------------------------------------------------

    def _train(self, examples: Sequence[TrainingSample], tally: report.MetricSums, progress: float = 0.0) -> None:
        """Forward and backward of some episodes; gradients add up, undivided, and counts go to `tally`.

        Behind a barrier the examples come with their advantages and `progress`, the share of the batch's
        optimizer steps that were taken; else they get theirs here, or from the critic as it scores them.
        Episodes that nothing reads are counted only.
        """
        if not self.behind_barrier and not (self.recipe.critic or self.reference is not None):
            examples = self._credited(examples, tally)
        if self.recipe.skips_inert:
            report.tally_unscored(tally, [e for e in examples if not e.is_scored], self.agents)
            examples = [e for e in examples if e.is_scored]
        parts = self._micro_batches(examples)
        collated = map(self._collate, parts)
        micro = next(collated, None)
        for part in parts:
            assert micro is not None
            scored = self._backward(part, micro, tally, progress)
            # A GPU computes the backward meanwhile. What is counted is read from it, so one waits there.
            micro = next(collated, None)
            self._count(scored, tally)
            if self.reference is not None:
                self.reference.release()
            self.pulse()

    def _backward(
        self, examples: Sequence[TrainingSample], micro: MicroBatch, tally: report.MetricSums, progress: float
    ) -> _ScoredMicroBatch:
        """Runs forward and backward of one micro-batch, of these examples. `tally` gets their credit only."""
        if not self.behind_barrier and self.reference is not None:
            if self.recipe.scores_reference:
                with self.watch.phase("ref"):
                    of_reference = self.reference.logp(micro.reference_tokens)
                    examples = with_values(examples, "reference", of_reference)
            if not self.recipe.critic:
                examples = self._credited(examples, tally)
            micro = micro.updated(examples)
        scored = self._score(examples, micro, tally, progress)
        (scored.evaluated.loss * (self.averaging / self._expected)).backward()
        return scored

    def _score(
        self, examples: Sequence[TrainingSample], micro: MicroBatch, tally: report.MetricSums, progress: float
    ) -> _ScoredMicroBatch:
        """Run the forward of a micro-batch. Its loss is undivided. `tally` gets the examples' credit only."""
        self._computed += micro.selected.ids.numel()
        self._flops += self._flop_count.in_all(micro.selected.host_positions, len(micro.selected.labels))
        entropy_grad = self.config.algorithm.entropy_coef > 0
        teacher = None
        if self.recipe.divergence:
            with self.watch.phase("ref"):
                teacher = teacher_of(micro, self.reference, self.recipe.divergence, self.config.kl.top_k)
        scores = self.policy(micro.selected, entropy_grad=entropy_grad, teacher=teacher)
        value = scores.value
        if self.critic is not None:
            with self.watch.phase("values"):
                value = self.critic(micro.selected)
        if not self.behind_barrier and value is not None:
            examples = self._credited(with_values(examples, "value", value.detach()), tally)
            micro = micro.updated(examples)
        kl_coef = self.state["kl_coef"]
        evaluated = evaluate(micro, scores, value, self.config, self.recipe, kl_coef, progress)
        return _ScoredMicroBatch(examples, micro, scores.logp.detach(), evaluated)

    def _count(self, scored: _ScoredMicroBatch, tally: report.MetricSums) -> None:
        """Count what the loss of a micro-batch is made of, and note ratios of single tokens."""
        examples = scored.examples
        micro = scored.micro
        evaluated = scored.evaluated
        if self.ratios is not None and not self.recipe.loss.demonstrations:  # those have no mu
            dropped = evaluated.state.correction.masked & evaluated.state.fresh
            self.ratios.note(examples, scored.logp - micro.rollout_logprobs, dropped)
        denominator = math.fsum(e.denominator for e in examples)
        if self.policy.replay is not None:
            report.tally_routes(tally, micro.selected.routes, micro.selected.ids.numel())
        tally.total("_D", denominator)
        report.tally_tokens(tally, token_sums(evaluated.state), denominator)
        report.tally_agents(tally, self.agents, micro.adapter_index, evaluated.state, denominator)
        report.tally_terms(tally, evaluated.terms, denominator)

    def _credited(self, examples: Sequence[TrainingSample], tally: report.MetricSums) -> list[TrainingSample]:
        """Advantages of episodes that need no others of the batch."""
        if self.config.kl.where == "reward":
            examples = [with_kl_penalty(e, self.state["kl_coef"], self.recipe.kl_estimator)[0] for e in examples]
        with self.watch.phase("adv"):
            examples = [with_advantages(e, self.recipe) for e in examples]
        report.tally_credit(tally, examples)
        whitening = self.whitening if self.recipe.scale == "whiten_running" else None
        return [with_scaled_advantages(e, whitening.apply) for e in examples] if whitening else examples

    # -- an optimizer step -----------------------------------------------------------------------------

    def apply(self, tally: report.MetricSums) -> report.MetricSums:
        """Divide by the true D, clip, step. Returns the tally of all ranks, with what was done in it.

        Without a kept token there is nothing to learn, and neither Adam's moments nor weight decay act.
        """
        report.tally_computed(tally, self._computed, self._flops)
        self._computed = 0
        self._flops = 0.0
        self.size = (0, 0)
        whole = report.merged(self.world.gather_data(tally, report.MetricSums))
        denominator = self.recipe.aggregate.divisor(whole.totals.pop("_D", 0.0))
        if denominator:
            scale = self._expected / denominator
            if self.critic is not None:
                with self.watch.phase("update_critic"):
                    self._apply_critic(self.critic, whole, scale)
            self._apply_actor(whole, scale)
            # A power of two scales exactly: the estimate never changes a bit of the result.
            self._expected = 2.0 ** round(math.log2(denominator))
        else:
            whole.total("actor/skipped_steps", 1)
        self.optimizer.zero_grad()
        if self.critic is not None:
            self.critic.optimizer.zero_grad()
        return whole

    def _apply_actor(self, whole: report.MetricSums, scale: float) -> None:
        """The policy's step. While the critic warms up, a value head on its backbone is all that moves."""
        config = self.config
        recipe = self.recipe
        warming = recipe.critic and self.step < config.critic.warmup_steps
        if warming:
            for name, parameter in self.policy.lm.named_parameters():
                if not name.startswith("value_head."):
                    parameter.grad = None
        # Terms beside the policy loss also count tokens that the correction, or the loss, drops.
        kl = config.kl.in_loss and (recipe.loss.ratio == "mu" or bool(recipe.divergence))
        beside = config.algorithm.entropy_coef > 0 or recipe.shared_critic or kl
        learns = whole.totals.get("_fresh" if beside else "trainer/kept_tokens", 0.0) > 0
        trained = self.policy.trained
        for agent in report.without_tokens(whole, self.agents, beside):
            for parameter in trained[agent]:
                parameter.grad = None  # as of a batch without tokens: no moments, no decay
        lr = self._rate() * (report.ess_factor(whole) if config.algorithm.ess_lr else 1.0)
        norms = [0.0]
        taken = False
        if learns and (recipe.shared_critic or not warming):
            factor = self._end_factor(whole)
            limit = norm_limit(self.state, config.trainer.spike_factor)
            report.scale_losses(whole, factor)
            clip = config.trainer.grad_clip
            self.world.average_gradients(self.policy.parameters())
            norms, taken = take_step(trained.values(), self.optimizer, lr, scale * factor, clip, limit)
            norm = math.hypot(*norms)
            if not taken and self.on_spike != "skip":
                raise SpikeError(self.step + 1, norm, limit)
            if taken and config.trainer.spike_factor:
                note_norm(self.state, self.step, norm)
        if not warming:
            whole.high("actor/lr", lr)
            whole.total("actor/skipped_steps", float(not taken))
            if taken:
                report.note_norms(whole, self.agents, norms)

    def _apply_critic(self, critic: Critic, whole: report.MetricSums, scale: float) -> None:
        lr = self._rate() * self.config.critic.lr / self.config.trainer.lr
        whole.high("critic/lr", lr)
        if whole.totals.get("_fresh"):
            own = [[*critic.parameters()]]
            clip = self.config.trainer.grad_clip
            self.world.average_gradients(critic.parameters())
            norms, taken = take_step(own, critic.optimizer, lr, scale, clip)
            if taken:
                whole.high("critic/grad_norm", norms[0])

    def _rate(self) -> float:
        return learning_rate(self.config.trainer, self.step, self.config.total_steps)

    def _end_factor(self, whole: report.MetricSums) -> float:
        """Factor of the gradient from the whole batch: 1/std of advantages, 1/mean weight. Behind a barrier
        the advantages were divided already."""
        factor = 1.0
        if self.recipe.batch_mean_weight and whole.totals.get("_weight"):
            factor *= whole.totals["trainer/kept_tokens"] / whole.totals["_weight"]
        if not self.behind_barrier:
            factor *= report.advantage_factor(self.recipe.scale, whole)
        return factor
