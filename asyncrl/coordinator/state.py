"""The state that the coordinator's handlers share, in three parts: ledger, fleet and journal."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec

from asyncrl.algorithms.advantages import configured_advantage
from asyncrl.buffer.batches import Batches
from asyncrl.buffer.prompts import ComparedParts, Prompts
from asyncrl.buffer.replay import ReplayBuffer
from asyncrl.config import RunConfig
from asyncrl.coordinator.fleet import Fleet
from asyncrl.coordinator.journal import Journal, TransactionalOutbox
from asyncrl.coordinator.ledger import Ledger, restore_from_store
from asyncrl.coordinator.versions import VersionLedger
from asyncrl.data import EpochOrder, Samples, check_same_data, samples_path
from asyncrl.store.runstore import RunStore
from asyncrl.types import NO_VERSION, Sample
from asyncrl.weights.manifest import WeightsRef
from asyncrl.weights.model_files import MODEL_KEY, model_identity
from asyncrl.wire.messages.shared import Welcome

log = logging.getLogger("asyncrl.coordinator")


class RunState:
    """The state of the run. Only the coordinator's thread reads and writes it.

    ledger: episodes and batches, and what became of them.
    fleet: the processes of the run, and the engines' versions.
    journal: the store and the outbox, by which a pass of the loop becomes durable and known.
    """

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        samples: Sequence[Sample],
        buffer: ReplayBuffer,
        batches: Batches,
        versions: VersionLedger,
        store: RunStore,
        outbox: TransactionalOutbox,
    ) -> None:
        self.config = config
        self.run_dir = run_dir
        self.ledger = Ledger(config, samples, buffer, batches, store)
        self.fleet = Fleet(config, versions, store)
        self.fleet.record_launch(batches.committed)
        self.journal = Journal(config, run_dir, self.ledger, self.fleet.liveness, store, outbox)

    def send_welcome(self, peer: bytes) -> None:
        """Answer a hello."""
        self.journal.outbox.to_control(peer, self.welcome_message)

    @property
    def welcome_message(self) -> Welcome:
        limits = self.ledger.memory_limits
        return Welcome(
            self.journal.store.epoch,
            self.fleet.trainer_epoch,
            self.ledger.batches.committed,
            limits.tokens,
            limits.recompute_every,
        )


def load_state(config: RunConfig, run_dir: Path, store: RunStore, outbox: TransactionalOutbox) -> RunState:
    """Return the state of a run, restored from the store, or a new state if the store is empty."""
    samples = Samples.open(samples_path(run_dir, "train"))
    check_same_data(samples, store.reader.meta("data"))
    store.put_meta("data", samples.fingerprint)
    sample_order = EpochOrder(samples, config.data, config.seed, samples_path(run_dir, "train").parent)

    buffer_config = config.buffer
    advantage_inputs = configured_advantage(config)
    buffer = ReplayBuffer(
        buffer_config,
        Prompts(len(samples), sample_order, config.data.epochs),
        total_groups=config.total_steps * buffer_config.groups_per_batch,
        retries=config.rollout.retries,
        group_bytes=config.group_bytes
        + advantage_inputs.greedy * config.group_bytes // buffer_config.episodes_per_group,
        greedy=advantage_inputs.greedy,
        compared=ComparedParts(turns=advantage_inputs.turns, components=advantage_inputs.components),
        publish_every=config.weights.every,
    )

    trainer = config.trainer
    flush = config.data.at_end == "flush"
    batches = Batches(buffer, trainer.micro_batch_tokens, flush, trainer.packing)
    restore_from_store(config, store, buffer, batches)

    if not store.reader.meta(MODEL_KEY):
        store.put_meta(MODEL_KEY, json.dumps(model_identity(config.model.path)))

    ref = msgspec.json.decode(store.reader.meta("version", "null"), type=WeightsRef | None)
    version = ref.version if ref else NO_VERSION
    versions = VersionLedger(version, ref if ref and Path(ref.path).is_dir() else None)
    return RunState(config, run_dir, samples, buffer, batches, versions, store, outbox)
