"""Runs one trainer rank.

    consumes: plans with their trajectories (bulk), welcome, committed, stop (control)
    waits for: ready trajectories, other ranks (broadcasts, collectives), the ack of a commit, each by name
    unblocks: the coordinator (commits), the engines (published versions, devices)

The loop: `_take_plan`, then `_train_part` for a part of the plan or `_finish_batch` for the optimizer step
(commit, then publish, then perhaps save), until a `WorkPlan` of kind `end` or `stop`. All ranks run the same
sequence of collectives: rank 0 alone asks for plans and commits, the others follow its broadcasts, and no
rank starts before all hold their payloads. Requests, waits and heartbeats are those of `trainer/client.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NoReturn

import torch

from asyncrl.config import RunConfig
from asyncrl.errors import GaveUpError, users_code
from asyncrl.observe.timeline import START_EVENT, Timeline
from asyncrl.runtime.liveness import progress_limit, silence_limit
from asyncrl.trainer import world
from asyncrl.trainer.batch import with_turns
from asyncrl.trainer.checkpointing import Checkpointing, shared_checkpoints
from asyncrl.trainer.client import CoordinatorClient, Stopped, await_devices, meet_others
from asyncrl.trainer.device_offload import DeviceOffload
from asyncrl.trainer.images import digests_of
from asyncrl.trainer.learner import Learner, PlannedWork
from asyncrl.trainer.memory import give_up_message, is_tiny, try_largest
from asyncrl.trainer.optimizer import SpikeError
from asyncrl.trainer.performance import peak_flops, performance
from asyncrl.trainer.publishing import Publishing
from asyncrl.trainer.report import RatioRecorder
from asyncrl.trainer.sample_scores import sum_surprisals
from asyncrl.types import PolicyVersion, Turn
from asyncrl.weights.memory import trim_heap
from asyncrl.wire.messages import shared, trainer
from asyncrl.wire.sockets import Endpoints

log = logging.getLogger("asyncrl.trainer")
PAYLOAD_WAIT = "the other ranks' payloads"  # name of the wait
SAVE_POLL_SECONDS = 0.05  # seconds between two checks for the end of a checkpoint
SAVE_AGAIN_SECONDS = 5.0  # seconds after a last checkpoint that could not be written


def run(config: RunConfig, endpoints: Endpoints, rank: int, incarnation: str, rendezvous: str = "") -> int:
    """Run a trainer rank until the coordinator sends Stop. Returns the exit code."""
    torch.set_num_threads(config.launch.threads)
    torch.manual_seed(config.seed)

    try:
        if config.shifts:
            await_devices(endpoints, rank, incarnation)
        trainer_world = world.join_ranks(
            rank,
            config.trainer.ranks,
            rendezvous,
            config.model.device,
            timeout_s=progress_limit(config),
            meet_s=silence_limit(config),
            wait_for_ranks=partial(meet_others, endpoints, rank, incarnation),
        )
    except Stopped as stop:
        log.info("leaving: %s", stop)
        return 0

    trainer_world = trainer_world.arranged(
        config.trainer.replicas, config.trainer.sequence_parallel, progress_limit(config)
    )

    trainer_rank = TrainerRank(config, endpoints, trainer_world, incarnation)
    try:
        with users_code():  # losses, advantages
            trainer_rank.loop()
    except Stopped as stop:
        log.info("leaving: %s", stop)
        trainer_rank.publishing.drain()
    except Exception as error:
        give_up_text = trainer_rank.report_failure(error)
        # A spike is raised on all ranks; a lack of memory leaves other ranks in a collective.
        if isinstance(error, SpikeError):
            trainer_rank.publishing.drain()
            if config.trainer.on_spike == "stop":
                return 0
        raise GaveUpError(give_up_text) from error
    finally:
        trainer_rank.close()
        world.leave_ranks()

    return 0


class TrainerRank:
    """Runs the loop of one rank around a Learner."""

    def __init__(
        self, config: RunConfig, endpoints: Endpoints, trainer_world: world.World, incarnation: str
    ) -> None:
        self.config = config
        self.trainer_world = trainer_world
        self.run_dir = Path(config.run_dir) / config.name
        self.is_first = trainer_world.rank == 0

        checkpoints = shared_checkpoints(config, self.run_dir, trainer_world)
        self.learner = Learner(config, trainer_world)
        self.checkpointing = Checkpointing(config, checkpoints, self.learner)
        self.checkpointing.resume()

        self.timeline = Timeline(self.run_dir / "timeline" / f"trainer-{trainer_world.rank}.jsonl")
        self.timeline.record_past(START_EVENT, 0.0)
        self.device_offload = DeviceOffload(self.learner, self.timeline, self.run_dir)
        self.stopwatch = self.learner.stopwatch
        self.peak_flops = peak_flops(trainer_world.device, config.model.dtype)
        self.ratio_recorder = RatioRecorder(self.run_dir, trainer_world.rank, config.buffer.groups_per_batch)
        self.learner.ratio_recorder = self.ratio_recorder

        self.publishing = Publishing(config, endpoints, self.run_dir, trainer_world, self.learner.policy)
        self.client = CoordinatorClient(
            config,
            endpoints,
            trainer_world,
            incarnation,
            self.learner,
            self.checkpointing,
            self.publishing,
        )
        self.learner.note_work = self.client.note_work
        self.learner.announce_wait = self.client.announce_wait

        self.trainer_epoch = 0
        self.is_repeating = False
        self.published_step = -1
        self._batch_uids: list[str] = []
        self._lost_uids: list[str] = []  # of the batch: turns or images could not be read

    # -- the loop --------------------------------------------------------------------------------------

    def loop(self) -> None:
        """Take, train, commit, publish, until the coordinator sends Stop."""
        frontier = self._await_welcome().step
        # The engines keep their newer weights while committed steps are repeated.
        self.is_repeating = self.client.committed_step < frontier
        self._publish_probe()

        if not frontier:  # ranks that are started again lose no time on what has been shown
            self.client.announce_wait("trying the largest micro-batch")
            with self.timeline.span(self.client.waiting_for):
                try_largest(self.learner)

        part_index = 0
        while True:
            plan, work = self._take_plan(part_index)
            if plan.kind not in ("rest", "stop"):  # a checkpoint is made of offloaded shards, too
                self.device_offload.onload()

            match plan.kind:
                case "rest":  # the wire's word for an offload
                    self.device_offload.offload(self.client.meet_ranks)
                case "work":
                    self._train_part(plan, work)
                    part_index += 1
                case "probe":
                    self._publish_probe()
                case "probe_samples":
                    self._score_samples(plan)
                case "step":
                    self._finish_batch(plan)
                    part_index = 0
                case "end" | "stop":
                    if plan.kind == "end":  # no plan follows, and engines may still be started
                        self._publish_probe()
                    self._save_last()
                    if plan.kind == "end" and self.config.shifts:  # engines still evaluate
                        self.device_offload.offload(self.client.meet_ranks)
                    self._await_stop()

    def _train_part(self, plan: trainer.WorkPlan, work: PlannedWork) -> None:
        uids = [planned.uid for planned, _ in work]
        self.trainer_world.check_shared(uids, list[str])  # a payload may have become unreadable in between
        with (
            self.timeline.span("train", step=plan.step, micro=plan.part),
            self.stopwatch.phase("update_actor"),
        ):
            self.learner.accumulate(work)
        self._batch_uids += uids

    def _finish_batch(self, plan: trainer.WorkPlan) -> None:
        """Take the optimizer step and commit it; publish and save only after the ack."""
        # A step that was committed once is not left out.
        self.learner.on_spike = "skip" if self.is_repeating else self.config.trainer.on_spike

        with self.timeline.span("step", step=plan.step), self.stopwatch.phase("update_actor"):
            metrics = self.learner.finish()
            if not is_tiny(self.learner):
                trim_heap()

        batch_uids = self._gather_uids(self._batch_uids)
        lost_uids = self._gather_uids(self._lost_uids)
        self.checkpointing.add_trained(batch_uids)
        self._batch_uids = []
        self._lost_uids = []
        metrics["trainer/trajectories_total"] = float(self.checkpointing.trained_total)
        rounding = self.publishing.rounding
        if rounding is not None:
            metrics["weights/probe_noise_floor"] = rounding.largest
            metrics["weights/probe_rounding_median"] = rounding.median
        metrics["trainer/lost_episodes"] = float(len(lost_uids))
        metrics |= performance(*self.stopwatch.lap(), metrics, self.peak_flops, self.trainer_world.size)
        with self._waiting("wait_commit"):
            to_publish = self._commit_step(plan, metrics, trained=batch_uids, lost=lost_uids)
        self.client.committed_step = self.learner.step
        self.ratio_recorder.save_step(self.learner.step)

        if to_publish and (self.is_repeating or self.learner.step % self.config.weights.every == 0):
            self.is_repeating = False
            self._publish_version()

        self._save_if_due()

    def _gather_uids(self, rank_uids: list[str]) -> list[str]:
        """Return the uids of all data ranks."""
        return [*chain.from_iterable(self.trainer_world.gather_data(rank_uids, list[str]))]

    # -- requests to the coordinator -------------------------------------------------------------------

    def _await_welcome(self) -> shared.Welcome:
        with self._waiting("wait_welcome"):
            welcome, _ = self.client.request(self.client.hello_message(), "the coordinator's welcome message")
        self.trainer_epoch = welcome.trainer_epoch
        self.learner.token_budget = welcome.micro_tokens or self.learner.token_budget
        self.learner.recomputation.recompute_at_least(welcome.recompute_every)
        return welcome

    def _take_plan(self, part_index: int) -> tuple[trainer.WorkPlan, PlannedWork]:
        """Return the coordinator's next `WorkPlan` (a part of the batch's plan, or an order such as `step` or
        `end`), with this rank's share of its trajectories and their turns, once all ranks hold their payloads
        and have read their images."""
        step = self.learner.step + 1
        planned_work = list[tuple[trainer.PlannedTrajectory, list[Turn]]]()

        offload_note = " (offloaded while engines sample)" if self.device_offload.is_offloaded else ""
        wait_name = "wait_devices" if offload_note else "wait_data"
        with self._waiting(wait_name):
            request = trainer.PlanRequest(
                self.trainer_epoch, step, part_index, self.device_offload.is_offloaded
            )
            plan = self.client.request_for_all(
                request, f"trajectories of step {step}{offload_note}", is_patient=True
            )

            for part in self.learner.rank_part(plan.trajectories):
                payload_request = trainer.PayloadRequest(
                    self.trainer_epoch, step, tuple(trajectory.uid for trajectory in part)
                )
                payload_answer, frames = self.client.request(payload_request, f"payloads of step {step}")
                self._lost_uids += payload_answer.lost
                planned_work += with_turns(
                    [trajectory for trajectory in part if trajectory.uid not in payload_answer.lost], frames
                )

            digests = digests_of(turn for _, turns in planned_work for turn in turns)
            if not digests:
                self.client.meet_ranks(PAYLOAD_WAIT)
                return plan, planned_work
            image_files = self._fetch_images(digests, step)

        trainable_work = self._read_images(planned_work, image_files)
        with self._waiting(wait_name):
            self.client.meet_ranks(PAYLOAD_WAIT)

        return plan, trainable_work

    def _fetch_images(self, digests: Sequence[str], step: int) -> dict[str, bytes]:
        """Return the stored files of these images by digest, without those that are lost."""
        image_files: dict[str, bytes] = {}
        for start in range(0, len(digests), shared.MAX_REQUESTED_IMAGES):
            request = shared.ImageRequest(tuple(digests[start : start + shared.MAX_REQUESTED_IMAGES]))
            answer, frames = self.client.request(request, f"images of step {step}")
            image_files |= answer.files(frames)

        return image_files

    def _read_images(self, planned_work: PlannedWork, image_files: Mapping[str, bytes]) -> PlannedWork:
        """Read the images of these trajectories; return the trajectories that can be trained, and note the
        others as lost."""
        with self.timeline.span("read_images"), self.stopwatch.phase("read_images"):
            trainable_work = self.learner.read_images(planned_work, image_files)

        trainable_uids = {planned.uid for planned, _ in trainable_work}
        self._lost_uids += [planned.uid for planned, _ in planned_work if planned.uid not in trainable_uids]
        return trainable_work

    def _commit_step(
        self,
        plan: trainer.WorkPlan,
        metrics: dict[str, float],
        *,
        trained: list[str],
        lost: list[str],
    ) -> bool:
        """Commit the step. `trained`, `lost`: uids of all ranks. Returns whether this version is to be
        published."""
        step = self.learner.step
        commit = trainer.Commit(
            self.trainer_epoch,
            step,
            plan.plan_hash,
            trained=tuple(trained),
            metrics=metrics,
            lost=tuple(lost),
        )
        answer = self.client.request_for_all(commit, f"the commit of step {step}")
        self.checkpointing.best_step = answer.best
        return bool(answer.publish)

    def _await_stop(self) -> NoReturn:
        """Report the checkpoint again until Stop comes: a restarted coordinator does not know the checkpoint
        yet."""
        with self._waiting("wait_stop"):
            self.client.request(
                self._checkpointed_message(), "the coordinator's stop message", is_patient=True
            )
        raise AssertionError("unreachable: only Stop ends this wait")

    def _checkpointed_message(self) -> shared.WireMessage:
        """Return rank 0's report for all ranks, or another rank's heartbeat."""
        if not self.is_first:
            return self.client.heartbeat_message()
        newest = self.checkpointing.newest_manifest
        assert newest is not None, "no checkpoint has been written"
        return trainer.Checkpointed(
            self.trainer_epoch, newest.step, newest.trained_total, self.device_offload.is_offloaded
        )

    def report_failure(self, error: Exception) -> str:
        """Tell the coordinator that this rank gives up the batch. Returns the reason and the coordinator's
        decision."""
        message = give_up_message(error, self.trainer_epoch, self.trainer_world.rank, self.learner)
        try:
            self.client.request(message, "the coordinator's answer about an abandoned batch")
        except Stopped as stop:
            return f"{message.detail}: {stop}"
        raise AssertionError("unreachable: only Stop ends this wait")

    @contextmanager
    def _waiting(self, name: str) -> Iterator[None]:
        """Record the body as a wait, in the timeline and in the timings of the step."""
        with self.timeline.span(name), self.stopwatch.phase(name, waiting=True):
            yield

    # -- publishing and saving -------------------------------------------------------------------------

    def _publish_version(self) -> None:
        self.published_step = self.learner.step
        version = PolicyVersion(self.trainer_epoch, self.learner.step)
        with self.timeline.span("snapshot", version=version), self.stopwatch.phase("update_weights"):
            self.publishing.publish(version)

    def _publish_probe(self) -> None:
        """Score the probe with a published version (published now, if needed), for comparison by the engines.
        Nothing happens while steps are repeated: the engines then keep their newer weights."""
        if self.is_repeating:
            return
        if self.published_step != self.learner.step:  # the first version, or one that weights.every skips
            self._publish_version()
        with self.timeline.span("probe"), self.stopwatch.phase("update_weights"):
            probe = self.publishing.score_probe()

        if self.is_first:
            version = PolicyVersion(self.trainer_epoch, self.published_step)
            self.client.probed_message = trainer.Probed(version, probe)
            self.client.control.send(self.client.probed_message)

    def _score_samples(self, plan: trainer.WorkPlan) -> None:
        """Score the sequences that engines have sampled with the version that this trainer holds."""
        with self.timeline.span("probe"), self.stopwatch.phase("update_weights"):
            scored_sums = sum_surprisals(
                self.learner.policy,
                plan.samples,
                temperature=self.config.rollout.temperature,
                token_budget=self.learner.token_budget,
                device=self.trainer_world.device,
                after_forward=self.client.note_work,
            )

        if self.is_first:
            version = PolicyVersion(self.trainer_epoch, self.learner.step)
            self.client.control.send(trainer.ScoredSamples(version, scored_sums))

    def _save_if_due(self) -> None:
        """Begin a checkpoint after a commit, if due; a checkpoint that becomes due while another is being
        written begins after the first step without. Writing goes on beside training, where there is memory
        for a copy."""
        self._report_saved()
        if self.learner.step % self.config.checkpoint.pause == 0:
            self.checkpointing.is_due = True

        if self.checkpointing.is_due and not self.checkpointing.is_writing:
            with self.timeline.span("checkpoint"), self.stopwatch.phase("save_checkpoint"):
                if not self.checkpointing.begin_checkpoint(self.trainer_epoch):
                    self._await_saved()

    def _save_last(self) -> None:
        """Save the last committed step, and return when its checkpoint is complete; a full disk may have room
        later."""
        with self.timeline.span("checkpoint"), self.stopwatch.phase("save_checkpoint"):
            while self.checkpointing.newest_step != self.learner.step:
                if not self.checkpointing.is_writing:
                    self.checkpointing.begin_checkpoint(self.trainer_epoch, self.device_offload)
                self._await_saved()
                if self.checkpointing.problem:
                    self.client.wait_for(SAVE_AGAIN_SECONDS)

    def _await_saved(self) -> None:
        """Send heartbeats, with the bytes written so far, until the checkpoint under way has ended."""
        while self.checkpointing.is_writing:
            written_megabytes = self.checkpointing.checkpoints.written_bytes / 1e6
            self.client.waiting_for = f"a checkpoint is being written ({written_megabytes:,.0f} MB so far)"
            self._report_saved()
            self.client.wait_for(SAVE_POLL_SECONDS)
        self.client.waiting_for = ""

    def _report_saved(self) -> None:
        """Tell the coordinator once the checkpoint under way is complete."""
        if self.checkpointing.poll_checkpoint() and self.is_first:
            self.client.control.send(self._checkpointed_message())

    def close(self) -> None:
        self.timeline.close()
        self.client.close()
