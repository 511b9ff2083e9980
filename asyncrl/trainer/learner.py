"""The learner: models, optimizers and schedule; turns a stream of micro-batches into optimizer steps.

    stream    accumulate(work): advantages, forward, backward ──► gradients, undivided
              finish(): replicas' mean, / D, clip, optimizer step
    barrier   accumulate(work): the samples are held
              finish(): scores, advantages of the whole batch; for each mini-batch as in the stream

Exactness: the loss of a batch is (Σ_t w_t·L_t)/D with w_t fixed before the forward and a single D, known only
when the batch is complete. FSDP2, and replicas once a step, *average* gradients over ranks, so every loss is
multiplied by the number of ranks. All ranks run the same number of forwards; a rank without trajectories runs
a dummy token and, where other ranks have images, a rank without images runs a dummy image.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from asyncrl.algorithms.diagnostics import report_tokens
from asyncrl.algorithms.kl import adapted
from asyncrl.algorithms.normalise import Whitening
from asyncrl.algorithms.recipe import compose
from asyncrl.buffer.packing import Piece, micro_batches
from asyncrl.config import RunConfig, described_recomputation
from asyncrl.data.storage import SEQUENCE_IMAGE_IDS, stored_sequence_image_ids
from asyncrl.episodes.image_checks import run_image_layout
from asyncrl.errors import recorded
from asyncrl.runtime.liveness import silence_limit
from asyncrl.trainer import report
from asyncrl.trainer.advantages import with_advantages, with_kl_penalty, with_scaled_advantages
from asyncrl.trainer.barrier import advantage_scaling, compare_batch, partition_groups, prepare_batch
from asyncrl.trainer.batch import (
    MicroBatch,
    TrainingSample,
    collate,
    partition_plan,
    training_sample,
    with_values,
)
from asyncrl.trainer.footprint import RECOMPUTED_EVERY, least_recomputation
from asyncrl.trainer.images import ImagePixels, contains_images, digests_in
from asyncrl.trainer.layers import compiled_graphs
from asyncrl.trainer.loading import master_dtype
from asyncrl.trainer.model import Critic, load_critic, load_policy, load_reference
from asyncrl.trainer.objective import MicroBatchLoss, evaluate
from asyncrl.trainer.optimizer import (
    SpikeError,
    learning_rate,
    make_optimizer,
    norm_limit,
    record_norm,
    take_step,
)
from asyncrl.trainer.packing import packing_for
from asyncrl.trainer.performance import FlopCount, Stopwatch
from asyncrl.trainer.prefix_tree import common_prefix
from asyncrl.trainer.recompute import Recomputation
from asyncrl.trainer.scores import Scores
from asyncrl.trainer.teacher import Teacher
from asyncrl.trainer.world import World
from asyncrl.types import Turn
from asyncrl.vision.layout import layout_or_refusal
from asyncrl.wire.messages.trainer import PlannedTrajectory

PlannedWork = Sequence[tuple[PlannedTrajectory, Sequence[Turn]]]
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _TrainedMicroBatch:
    """Holds a micro-batch between its backward and the count of its loss terms. `logprobs`: [N]."""

    samples: Sequence[TrainingSample]
    micro_batch: MicroBatch
    logprobs: Tensor
    loss: MicroBatchLoss


def sequence_image_ids(config: RunConfig) -> int:
    """Return the most ids of images in a sequence that is trained, as the launcher has saved the number; 0
    without the number, with a warning if the run reads images."""
    run_directory = Path(config.run_dir) / config.name
    image_ids = stored_sequence_image_ids(run_directory)
    if image_ids is None and layout_or_refusal(partial(run_image_layout, config))[0] is not None:
        logger.warning(
            "%s has no file data/%s, so the memory estimate leaves out the images of the data; share run_dir "
            "with the launcher",
            run_directory,
            SEQUENCE_IMAGE_IDS,
        )
    return image_ids or 0


TrainMicroBatch = Callable[[Sequence[TrainingSample], MicroBatch], _TrainedMicroBatch]


class Learner:
    """Trains as one rank of the trainer.

    Methods are collectives: all ranks call the same methods in the same order. Where the recipe has a barrier
    the samples wait for `finish`, which compares the whole batch (see barrier.py).

    `step`: the number of completed batches (V); the step under way is `step + 1`. `state`: the numbers that a
    checkpoint stores beside models and optimizers. Training changes them only in `finish`: the gradient norms
    with each optimizer step, the others at the end of `finish`.
    """

    def __init__(self, config: RunConfig, world: World) -> None:
        self.config = config
        self.world = world
        self.recipe = compose(config)
        self.recomputation = self._choose_recomputation()
        self.policy = load_policy(
            config.model,
            world,
            trainer=config.trainer,
            recomputation=self.recomputation,
            adapters=config.adapters,
            offload=config.trainer.offload_optimizer,
        )
        self.critic = load_critic(config, world, self.recomputation) if self.recipe.critic else None
        self.scorers_read_reference = self.recipe.reference and config.scored_reference
        self.reference = None
        policies = [self.policy]
        if self.recipe.reference and not self.scorers_read_reference:
            self.reference = load_reference(config, world, self.policy)
            if self.reference.policy is not self.policy:
                policies.append(self.reference.policy)

        models = [*policies, *([self.critic] if self.critic else [])]  # in the same order on all ranks
        self.packing = packing_for(
            models, config.trainer.packing, config.model.dtype, world, config.trainer.compile
        )
        for policy in policies:
            policy.packing = self.packing

        # After the check, which holds gradients.
        self.optimizer = make_optimizer(self.policy, config.trainer, lr=config.trainer.lr)
        self.agent_names = tuple(config.adapters) or ("",)
        self.step = 0
        self.state: dict[str, float] = {"kl_coef": config.kl.coef}
        self.on_spike = config.trainer.on_spike
        # A step takes the mean of the gradients of this many data ranks, so losses are multiplied by it.
        self.averaged_ranks: float = world.data_ranks
        self.max_staleness = config.buffer.max_staleness
        self.token_budget = config.trainer.micro_batch_tokens  # less after a lack of memory
        # Tokens, including padding, and episodes of the micro-batch under way; 0: none.
        self.micro_batch_size = (0, 0)
        self.dtype = master_dtype(config.model.dtype)  # dtype of numbers per token
        self.stopwatch = Stopwatch()
        # Called after every micro-batch, and after some images that were read, for signs of life.
        self.note_work: Callable[[], None] = lambda: None
        # Called with the name of a wait, again and again until the wait is over, and then with ''.
        self.announce_wait: Callable[[str], None] = lambda name: None
        self._image_pixels: ImagePixels | None = None  # made with the first image
        self.ratio_recorder: report.RatioRecorder | None = None  # records ratios of single tokens
        self._expected_denominator = 256.0  # estimate of D, for a loss of about 1; see _take_optimizer_step
        self._held_samples: list[TrainingSample] = []
        self._tally = report.MetricSums()
        self._flop_count = FlopCount.of(self.policy.lm)

        # Tokens, including padding, of the policy's forwards in this step.
        self._computed_tokens = 0
        self._computed_flops = 0.0

    def _choose_recomputation(self) -> Recomputation:
        """Return the configured recomputation; for `auto` on GPUs, the least with which every rank fits into
        its GPU. A collective."""
        device = self.world.device
        recomputation = Recomputation(self.config.trainer)
        if not recomputation.automatic or device.type != "cuda":
            return recomputation

        device_memory = torch.cuda.get_device_properties(device).total_memory
        with recorded() as failure:
            least_every = least_recomputation(
                self.config,
                device_memory,
                device.index or 0,
                torch.cuda.device_count(),
                sequence_image_ids(self.config),
            )

        if failure:
            logger.warning("the memory estimate failed, so all layers are recomputed: %s", failure.line)
            least_every = 1

        recomputation.every = max(self.world.gather(least_every, int), key=RECOMPUTED_EVERY.index)
        logger.info("trainer.activation_checkpointing=auto: %s", described_recomputation(recomputation.every))

        return recomputation

    # -- a batch ---------------------------------------------------------------------------------------

    @property
    def behind_barrier(self) -> bool:
        """True if the batch is trained behind a barrier: always, or because running statistics are still
        unknown."""
        return self.recipe.barrier or (self.recipe.scale == "whiten_running" and self.whitening is None)

    @property
    def whitening(self) -> Whitening | None:
        """Return the running statistics of earlier batches; None while unknown."""
        return Whitening.from_state(self.state)

    @property
    def image_pixels(self) -> ImagePixels:
        """Return the reader of the run's images. ConfigError where the run cannot train on images."""
        if self._image_pixels is None:
            self._image_pixels = ImagePixels(
                self.config.model.path,
                run_image_layout(self.config),
                time_limit=silence_limit(self.config),
                announce_wait=lambda wait_name: self.announce_wait(wait_name),
                note_work=lambda: self.note_work(),
            )
        return self._image_pixels

    def rank_part(self, planned: Sequence[PlannedTrajectory]) -> list[list[PlannedTrajectory]]:
        """Return this rank's share of one part of the plan, in lists of about a micro-batch each."""
        data_ranks = self.world.data_ranks
        return self.partition(planned, data_ranks)[self.world.rank * data_ranks // self.world.size]

    def partition(
        self, planned: Sequence[PlannedTrajectory], rank_count: int
    ) -> list[list[list[PlannedTrajectory]]]:
        """Return the shares of all `rank_count` data ranks, each as `rank_part` returns it."""
        hidden_size = self.policy.lm.config.get_text_config().hidden_size
        return partition_plan(planned, self.packing, self.token_budget, hidden_size, rank_count)

    def read_images(self, work: PlannedWork, image_files: Mapping[str, bytes]) -> PlannedWork:
        """Read the images of this rank's trajectories of one part of the plan, if there are any, before
        `accumulate`. Returns the work without the trajectories that cannot be trained because of an image,
        and logs why. `image_files`: the stored files, by digest, of the images in the turns (`digests_of`),
        without those that are lost."""
        self.image_pixels.add_files(image_files)
        reasons = self.image_pixels.read_images_of_episodes(
            {planned.uid: turns for planned, turns in work}, behind_barrier=self.behind_barrier
        )
        for uid, reason in reasons.items():
            logger.error("episode %s is not trained: %s", uid, reason)
        return [(planned, turns) for planned, turns in work if planned.uid not in reasons]

    def accumulate(self, work: PlannedWork) -> None:
        """Train on this rank's trajectories of one part of the plan, or hold them behind the barrier. An idle
        rank has none. Images are those of `read_images`, called for this part."""
        forced_routes = self.policy.forced_routes
        samples = [
            training_sample(
                planned,
                turns,
                self.step,
                self.max_staleness,
                self.recipe.aggregate,
                mask_truncated=self.config.algorithm.mask_truncated,
                expert_choices=forced_routes.choices_per_token if forced_routes is not None else 0,
                scorer_topk=self.config.kl.top_k if self.scorers_read_reference else None,
                agent_names=self.agent_names,
            )
            for planned, turns in work
        ]
        report.tally_samples(self._tally, samples, self.config.rollout.longest_prompt)

        if self.behind_barrier:
            self._held_samples += samples
        else:
            self._train_streamed(samples)

    def finish(self) -> dict[str, float]:
        """Complete the batch: take its optimizer step(s), update the state, return the metrics of all ranks.
        Raises SpikeError on all ranks if the batch is to be left out; this learner cannot be used
        afterwards."""
        if self.behind_barrier:
            tally = report.merged_sums(self.world.gather_data(self._tally, report.MetricSums))
            tally.merge(self._train_held_batch())
        else:
            tally = self._take_optimizer_step(self._tally)

        self._held_samples = []
        if self._image_pixels is not None:
            self._image_pixels.drop_files()
        self._tally = report.MetricSums()
        self.step += 1
        metrics = report.batch_metrics(tally, advantage_scaling(self.recipe, tally.sums, self.whitening))
        self._update_state(tally.sums, metrics)

        if metrics.get("trainer/replayed_share") == 0:
            logger.warning(
                "trainer.router_replay: the servers returned no routed experts that fit the model, so no "
                "routes were replayed; start the servers (engine.urls) with model.path"
            )

        if self.config.trainer.compile:
            metrics["perf/compiled_graphs"] = compiled_graphs()
        metrics["perf/recomputed_layers"] = self.recomputation.recomputed_fraction

        return metrics

    def _update_state(self, sums: report.BatchSums, metrics: dict[str, float]) -> None:
        """Update the state for the next batch: the KL coefficient, and the running moments of advantages."""
        kl_config = self.config.kl
        if kl_config.where != "none":
            metrics["actor/kl_coef"] = self.state["kl_coef"]
            self.state["kl_coef"] = adapted(
                self.state["kl_coef"],
                metrics.get("actor/ref_kl", kl_config.target),
                kl_config.target,
                sums.trajectories,
                kl_config.horizon,
            )

        if self.recipe.scale == "whiten_running":
            self.state |= Whitening.updated(self.whitening, sums.token_advantages).state()

    # -- streamed --------------------------------------------------------------------------------------

    def _train_streamed(self, samples: Sequence[TrainingSample]) -> None:
        """Train on samples as they arrive. Advantages that no model enters are computed before any forward;
        others once critic and reference have scored the micro-batch."""
        if self.critic is None and self.reference is None:
            samples = self._with_advantages(samples)
        self._train_samples(samples, self._tally, self._train_streamed_micro_batch)

    def _train_streamed_micro_batch(
        self, samples: Sequence[TrainingSample], micro_batch: MicroBatch
    ) -> _TrainedMicroBatch:
        """Run forward and backward of a micro-batch of the stream, with the missing advantages in between."""
        if self.reference is not None:
            if self.recipe.scores_reference:
                with self.stopwatch.phase("ref"):
                    reference_logprobs = self.reference.logp(micro_batch.reference_tokens)
                    samples = with_values(samples, "reference", reference_logprobs)
            if self.critic is None:
                samples = self._with_advantages(samples)
            micro_batch = micro_batch.updated(samples)

        scores, values = self._forward(micro_batch)
        if values is not None:
            samples = self._with_advantages(with_values(samples, "value", values.detach()))
            micro_batch = micro_batch.updated(samples)

        return self._backward(samples, micro_batch, scores, values)

    def _with_advantages(self, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
        """Return the samples with advantages that depend on no other episodes of the batch, and count
        these."""
        if self.config.kl.where == "reward":
            samples = [
                with_kl_penalty(sample, self.state["kl_coef"], self.recipe.kl_estimator)[0]
                for sample in samples
            ]

        with self.stopwatch.phase("adv"):
            samples = [with_advantages(sample, self.recipe) for sample in samples]
        report.tally_advantages(self._tally, samples)

        whitening = self.whitening
        if whitening is not None and self.recipe.scale == "whiten_running":
            samples = [with_scaled_advantages(sample, whitening.apply) for sample in samples]
        return samples

    # -- behind the barrier ----------------------------------------------------------------------------

    def _train_held_batch(self) -> report.MetricSums:
        """Score, compare and prepare the held batch, then take its optimizer steps: `epochs` passes over
        `steps_per_batch` mini-batches. Returns the tally of all ranks.

        Mini-batches consist of whole groups, each with its own denominator. The lag was checked once, at the
        start of the batch; the policy's drift inside the batch shows as `actor/ppo_kl`.
        """
        samples = self._score_held_samples()
        with self.stopwatch.phase("adv"):
            kl_penalty = self.state["kl_coef"] if self.config.kl.where == "reward" else None
            samples, batch_tally = compare_batch(self.world, samples, self.recipe, kl_penalty, self.whitening)
        samples = prepare_batch(self.world, samples, self.recipe.loss)

        mini_batches = self.config.algorithm.steps_per_batch
        groups = set().union(*self.world.gather({sample.group for sample in samples}, set[str]))
        for index in range(self.recipe.optimizer_steps):
            epoch, mini_batch = divmod(index, mini_batches)
            mini_batch_of = partition_groups(groups, mini_batches, f"{self.config.seed}/{self.step}/{epoch}")
            tally = report.MetricSums()
            mini_batch_samples = [sample for sample in samples if mini_batch_of[sample.group] == mini_batch]
            progress = index / self.recipe.optimizer_steps
            self._train_samples(
                mini_batch_samples, tally, partial(self._train_held_micro_batch, progress=progress)
            )
            batch_tally.merge(self._take_optimizer_step(tally))

        return batch_tally

    def _score_held_samples(self) -> list[TrainingSample]:
        """Return the held samples with log-probs and values of the current models, where the recipe asks."""
        recipe = self.recipe
        needs_policy = recipe.prox == "recompute"
        if not (needs_policy or recipe.critic or self.reference is not None):
            return self._held_samples

        scored_samples = list[TrainingSample]()
        for part_samples, micro_batch in self._collated_micro_batches(self._held_samples):
            columns: dict[str, Tensor | None] = {}
            with torch.no_grad():
                if needs_policy:
                    scores = self.policy(micro_batch.selected, with_collision=recipe.advantage.whole_group)
                    columns |= {"proximal_logprobs": scores.logp, "collision": scores.collision}

                if self.critic is not None:
                    with self.stopwatch.phase("values"):
                        columns["value"] = self.critic(micro_batch.selected)

            if self.reference is not None and recipe.scores_reference:
                with self.stopwatch.phase("ref"):
                    columns["reference"] = self.reference.logp(micro_batch.reference_tokens)

            for name, values in columns.items():
                if values is not None:
                    part_samples = with_values(part_samples, name, values)

            scored_samples += part_samples
            self.note_work()

        return scored_samples

    def _train_held_micro_batch(
        self, samples: Sequence[TrainingSample], micro_batch: MicroBatch, progress: float
    ) -> _TrainedMicroBatch:
        """Run forward and backward of a micro-batch whose advantages are fixed. `progress`: the fraction of
        the batch's optimizer steps already taken."""
        scores, values = self._forward(micro_batch)
        return self._backward(samples, micro_batch, scores, values, progress)

    # -- micro-batches ---------------------------------------------------------------------------------

    def _train_samples(
        self,
        samples: Sequence[TrainingSample],
        tally: report.MetricSums,
        train_micro_batch: TrainMicroBatch,
    ) -> None:
        """Run forward and backward of all samples, one micro-batch after another; gradients add up, not yet
        divided, and counts go to `tally`. Samples without effect on the gradient are counted only."""
        if self.recipe.skips_inert:
            report.tally_unscored(
                tally, [sample for sample in samples if not sample.is_scored], self.agent_names
            )
            samples = [sample for sample in samples if sample.is_scored]

        collated_micro_batches = self._collated_micro_batches(samples)
        collated = next(collated_micro_batches, None)
        while collated is not None:
            part_samples, micro_batch = collated
            trained = train_micro_batch(part_samples, micro_batch)

            # The GPU computes the backward meanwhile; counting reads from the GPU and waits for it.
            collated = next(collated_micro_batches, None)
            self._count_micro_batch(trained, tally)
            if self.reference is not None:
                self.reference.release()
            self.note_work()

    def _collated_micro_batches(
        self, samples: Sequence[TrainingSample]
    ) -> Iterator[tuple[list[TrainingSample], MicroBatch]]:
        """Yield this rank's samples in micro-batches under the token budget, as many as on the other ranks,
        with each micro-batch on the device. The images of the next micro-batch are read meanwhile."""
        sample_lists = self._cut_samples(samples)
        own_work = len(sample_lists), contains_images(_all_sequences(samples))
        work_by_rank = self.world.gather(own_work, tuple[int, bool])
        most_lists = max(count for count, _ in work_by_rank)
        sample_lists += [[] for _ in range(most_lists - len(sample_lists))]
        # With images on one rank, all ranks run the models' towers.
        image_pixels = self.image_pixels if any(reads_images for _, reads_images in work_by_rank) else None

        for index, part_samples in enumerate(sample_lists):
            if image_pixels is not None:
                soon_read = chain.from_iterable(sample_lists[index : index + 2])
                image_pixels.prefetch(digests_in(_all_sequences(soon_read)))
            yield part_samples, self._collate_on_device(part_samples, image_pixels)

    def _cut_samples(self, samples: Sequence[TrainingSample]) -> list[list[TrainingSample]]:
        """Cut this rank's samples under the token budget."""
        first_sequences: dict[str, np.ndarray] = {}  # by key, the sequence whose prefix others may share
        pieces = []
        for sample in samples:
            prefix_key = (
                f"{sample.group}/{sample.sequence_adapters[:1]}"
                if self.packing == "tree"
                else sample.planned.uid
            )
            shared_tokens = common_prefix(
                first_sequences.setdefault(prefix_key, sample.sequences[0]), sample.sequences[0]
            )
            pieces.append(
                Piece(
                    prefix_key,
                    sample.total_tokens,
                    shared_tokens,
                    len(sample.sequences),
                    sample.longest_sequence,
                )
            )

        index_lists = micro_batches(pieces, self.token_budget, padded=self.packing == "padded")
        return [[samples[index] for index in indices] for indices in index_lists]

    def _collate_on_device(
        self, samples: Sequence[TrainingSample], image_pixels: ImagePixels | None
    ) -> MicroBatch:
        micro_batch = collate(samples, self.dtype, self.packing, image_pixels)
        # From here on the micro-batch takes the device's memory.
        self.micro_batch_size = (micro_batch.selected.ids.numel(), len(samples))
        return micro_batch.to(self.world.device)

    def _forward(self, micro_batch: MicroBatch) -> tuple[Scores, Tensor | None]:
        """Return the policy's scores of a micro-batch and the critic's values [N], both with gradient."""
        selected = micro_batch.selected
        self._computed_tokens += selected.ids.numel()
        self._computed_flops += self._flop_count.total_flops(
            selected.host_positions,
            len(selected.labels),
            patches=0 if selected.images is None else len(selected.images.pixels.pixel_values),
        )

        teacher = None
        if self.recipe.divergence:
            divergence = self.recipe.divergence
            top_k = self.config.kl.top_k
            with self.stopwatch.phase("ref"):
                if self.reference is None:  # servers have scored the tokens
                    teacher = Teacher(divergence, top_k)
                else:
                    teacher = self.reference.teacher(micro_batch.reference_tokens, divergence, top_k)

        scores = self.policy(
            micro_batch.selected,
            entropy_grad=self.config.algorithm.entropy_coef > 0,
            teacher=teacher,
        )

        values: Tensor | None = None
        if self.critic is not None:
            with self.stopwatch.phase("values"):
                values = self.critic(micro_batch.selected)

        return scores, values

    def _backward(
        self,
        samples: Sequence[TrainingSample],
        micro_batch: MicroBatch,
        scores: Scores,
        values: Tensor | None,
        progress: float = 0.0,
    ) -> _TrainedMicroBatch:
        """Compute the loss of a micro-batch that has its advantages, and run its backward."""
        loss = evaluate(
            micro_batch, scores, values, self.config, self.recipe, self.state["kl_coef"], progress
        )
        (loss.loss_sum * (self.averaged_ranks / self._expected_denominator)).backward()
        return _TrainedMicroBatch(samples, micro_batch, scores.logp.detach(), loss)

    def _count_micro_batch(self, trained: _TrainedMicroBatch, tally: report.MetricSums) -> None:
        """Count the loss terms of a micro-batch, and record ratios of single tokens."""
        micro_batch = trained.micro_batch
        token_state = trained.loss.token_state

        # Demonstrations have no rollout log-probs.
        if self.ratio_recorder is not None and not self.recipe.loss.demonstrations:
            is_dropped = token_state.correction.masked & token_state.trainable
            log_ratio = trained.logprobs - micro_batch.rollout_logprobs
            self.ratio_recorder.record_micro_batch(trained.samples, log_ratio, is_dropped)

        denominator = math.fsum(sample.denominator for sample in trained.samples)
        tally.sums.denominator += denominator
        if self.policy.forced_routes is not None:
            routes = micro_batch.selected.routes
            replayed_tokens = 0.0 if routes is None else float((routes[:, 0] >= 0).sum())
            tally.add_ratio("trainer/replayed_share", replayed_tokens, micro_batch.selected.ids.numel())
        report.tally_tokens(tally, report_tokens(token_state))
        report.tally_agents(tally, self.agent_names, micro_batch.adapter_index, token_state)
        report.tally_terms(tally, trained.loss.loss_terms, denominator)

    # -- an optimizer step -----------------------------------------------------------------------------

    def _take_optimizer_step(self, tally: report.MetricSums) -> report.MetricSums:
        """Divide the gradients by the true D, clip, step. Returns the tally of all ranks, with the metrics of
        the step.

        Without a kept token there is nothing to learn, and neither Adam's moments nor weight decay act.
        """
        report.tally_computed(tally, self._computed_tokens, self._computed_flops)
        self._computed_tokens = 0
        self._computed_flops = 0.0
        self.micro_batch_size = (0, 0)

        batch_tally = report.merged_sums(self.world.gather_data(tally, report.MetricSums))
        denominator = self.recipe.aggregate.divisor(batch_tally.sums.denominator)
        if denominator:
            gradient_scale = self._expected_denominator / denominator
            if self.critic is not None:
                with self.stopwatch.phase("update_critic"):
                    self._step_critic(self.critic, batch_tally, gradient_scale)
            self._step_actor(batch_tally, gradient_scale)
            # A power of two scales exactly: the estimate never changes a bit of the result.
            self._expected_denominator = 2.0 ** round(math.log2(denominator))
        else:
            batch_tally.add_total("actor/skipped_steps", 1)

        self.optimizer.zero_grad()
        if self.critic is not None:
            self.critic.optimizer.zero_grad()

        return batch_tally

    def _step_actor(self, batch_tally: report.MetricSums, gradient_scale: float) -> None:
        """Take the policy's step, unless the critic warms up."""
        config = self.config
        recipe = self.recipe
        if recipe.critic and self.step < config.critic.warmup_steps:
            return

        # Terms beside the policy loss also count tokens that the correction, or the loss, drops.
        has_kl_term = config.kl.in_loss and (recipe.loss.ratio == "mu" or bool(recipe.divergence))
        has_other_terms = config.algorithm.entropy_coef > 0 or has_kl_term
        sums = batch_tally.sums
        learned_tokens = sums.tokens.trainable_tokens if has_other_terms else sums.tokens.kept_tokens
        trained_by_agent = self.policy.trained_parameters
        if len(self.agent_names) > 1:
            learned_by_agent = sums.trainable_by_agent if has_other_terms else sums.kept_by_agent
            for agent in self.agent_names:
                if not learned_by_agent.get(agent):
                    for parameter in trained_by_agent[agent]:
                        parameter.grad = None  # no gradient: neither moments nor decay act

        step_rate = self._learning_rate() * (
            report.ess_factor(sums.tokens) if config.algorithm.ess_lr else 1.0
        )

        norms = [0.0]
        is_taken = False
        if learned_tokens:
            # The whole batch's factor on the gradient. Behind a barrier, advantages were divided before.
            batch_factor = 1.0 if self.behind_barrier else report.advantage_factor(recipe.scale, sums)
            if recipe.batch_mean_weight and sums.tokens.weight:
                batch_factor *= sums.tokens.kept_tokens / sums.tokens.weight
            largest_norm = norm_limit(self.state, config.trainer.spike_factor)
            sums.tokens.loss *= batch_factor
            sums.loss_by_agent = {agent: loss * batch_factor for agent, loss in sums.loss_by_agent.items()}
            self.world.average_gradients(self.policy.parameters())
            norms, is_taken = take_step(
                trained_by_agent.values(),
                self.optimizer,
                step_rate,
                gradient_scale * batch_factor,
                config.trainer.grad_clip,
                largest_norm,
            )
            total_norm = math.hypot(*norms)
            if not is_taken and self.on_spike != "skip":
                raise SpikeError(self.step + 1, total_norm, largest_norm)
            if is_taken and config.trainer.spike_factor:
                record_norm(self.state, self.step, total_norm)

        batch_tally.add_highest("actor/lr", step_rate)
        batch_tally.add_total("actor/skipped_steps", float(not is_taken))
        if is_taken:
            report.record_norms(batch_tally, self.agent_names, norms)

    def _step_critic(self, critic: Critic, batch_tally: report.MetricSums, gradient_scale: float) -> None:
        critic_rate = self._learning_rate() * self.config.critic.lr / self.config.trainer.lr
        batch_tally.add_highest("critic/lr", critic_rate)

        if batch_tally.sums.tokens.trainable_tokens:
            self.world.average_gradients(critic.parameters())
            norms, is_taken = take_step(
                [[*critic.parameters()]],
                critic.optimizer,
                critic_rate,
                gradient_scale,
                self.config.trainer.grad_clip,
            )
            if is_taken:
                batch_tally.add_highest("critic/grad_norm", norms[0])

    def _learning_rate(self) -> float:
        return learning_rate(self.config.trainer, self.step, self.config.total_steps)


def _all_sequences(samples: Iterable[TrainingSample]) -> list[np.ndarray]:
    """Return the sequences of samples, also those behind a teacher's prompts."""
    return [sequence for sample in samples for sequence in (*sample.sequences, *sample.teacher_sequences)]
