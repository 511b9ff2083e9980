"""Reads a run: episodes, plans, commits and payloads, also while the coordinator writes."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from asyncrl.buffer.batches import Baseline, Batch
from asyncrl.buffer.records import EpisodeRecord, GroupRecord, State
from asyncrl.errors import lacks_resources
from asyncrl.store.schema import DATABASE, StoreError, damage_error, open_to_read
from asyncrl.store.segments import FrameLocation, SegmentReader
from asyncrl.types import NO_STEP

log = logging.getLogger("asyncrl.store")

T = TypeVar("T")
# The column `step` of a held-out episode is the step of the validation; no batch takes such an episode.
EPISODE_QUERY = f"""SELECT record, state, reason, CASE kind WHEN 'train' THEN coalesce(step, {NO_STEP})
    ELSE {NO_STEP} END FROM episodes WHERE """
COVERED_TO = "covered_to"  # key in meta: a checkpoint covers the steps up to this number
IMAGE_KIND = "image:"
# uid, turn, generated | replied | result | image_kind; uid, session, part_kind
FrameKey = tuple[str, int, str]
IMAGE_QUERY = """SELECT segment, offset FROM frames WHERE kind=? AND kind > 'image:' AND kind < 'image;'
    AND (segment, offset) < (?, ?) ORDER BY segment DESC, offset DESC LIMIT 1"""
AFTER_ALL = FrameLocation(segment=2**63 - 1, offset=0)  # the largest number of SQLite


def part_kind(number: int) -> str:
    """Return the kind of the payload of a part, from the number within the turn."""
    return f"part {number}"


def image_kind(digest: str) -> str:
    """Return the kind of the payload that is the file of an image."""
    return f"{IMAGE_KIND}{digest}"


class StoredRun(msgspec.Struct):
    """The contents of a store, for a coordinator that starts with this store."""

    groups: list[GroupRecord]
    episodes: list[EpisodeRecord]
    pruned_counts: dict[State, int]
    next_group: int
    cursor: int
    retired: set[int]
    batches: list[Batch]
    planned_episodes: list[EpisodeRecord]  # episodes of the plans, including trained and lost episodes
    baselines: dict[int, Baseline]  # keys: groups of the taken episodes
    committed_steps: int


class RunReader:
    """Queries a run's database and segments. No query keeps a transaction open; all raise StoreError.
    `unwritten`: payloads that the writer has not committed yet. `damaged_images`: locations at which the
    record of an image is damaged or gone."""

    def __init__(
        self, db: sqlite3.Connection, segments: SegmentReader, unwritten: Mapping[FrameKey, bytes] = {}
    ) -> None:
        self._db = db
        self._segments = segments
        self._unwritten = unwritten
        self.damaged_images: set[FrameLocation] = set()

    @classmethod
    def open(cls, run_dir: Path) -> RunReader:
        """Open the store of a run directory to read only. ConfigError for another version's schema."""
        return cls(open_to_read(run_dir), SegmentReader(run_dir / "segments"))

    def close(self) -> None:
        self._db.close()
        self._segments.close()

    def meta(self, key: str, default: str = "") -> str:
        rows = self.rows("SELECT value FROM meta WHERE key=?", key)
        return rows[0][0] if rows else default

    def turn_frames(
        self, uid: str, turns: int, kinds: Sequence[str] = ("generated", "replied"), first_turn: int = 0
    ) -> Iterator[bytes]:
        """Yield payloads of these kinds of the turns `first_turn` to `turns` - 1; b'' for a missing payload.
        StoreError for an unreadable payload."""
        rows = self.rows("SELECT turn, kind, segment, offset FROM frames WHERE uid=?", uid)
        frame_places = {(turn, kind): FrameLocation(segment, offset) for turn, kind, segment, offset in rows}
        for turn in range(first_turn, turns):
            for kind in kinds:
                if (uid, turn, kind) in self._unwritten:
                    yield self._unwritten[uid, turn, kind]
                else:
                    frame_place = frame_places.get((turn, kind))
                    yield self._segments.read_record(frame_place) if frame_place else b""

    def image_location(self, digest: str, *, before: FrameLocation = AFTER_ALL) -> FrameLocation | None:
        """Return the newest location, `before` another location, of an image's file; None if the image is not
        stored there."""
        rows = self.rows(IMAGE_QUERY, image_kind(digest), *before)
        return FrameLocation(*rows[0]) if rows else None

    def image_file(self, digest: str) -> bytes | None:
        """Return the file of an image that a stored turn or reply brought into its episode: of its readable
        locations the newest; None if the image is not stored. StoreError if no location can be read."""
        kind = image_kind(digest)
        unwritten_file = next((file for key, file in self._unwritten.items() if key[2] == kind), None)
        if unwritten_file is not None:
            return unwritten_file

        newest_failure: StoreError | None = None
        location = self.image_location(digest)
        while location is not None:
            try:
                return self._segments.read_record(location)
            except StoreError as error:
                # The record may be sound if only descriptors or memory were lacking.
                if location not in self.damaged_images and not lacks_resources(error):
                    log.warning("image %s: a stored file cannot be read: %s", digest, error)
                    self.damaged_images.add(location)
                newest_failure = newest_failure or error
            location = self.image_location(digest, before=location)

        if newest_failure is not None:
            raise newest_failure
        return None

    def plan_hash(self, step: int) -> str | None:
        rows = self.rows("SELECT plan_hash FROM commits WHERE step=?", step)
        return rows[0][0] if rows else None

    def restarts(self) -> list[int]:
        """Return the first step of each trainer after the first trainer."""
        rows = self.rows("SELECT min(step) FROM commits GROUP BY trainer_epoch ORDER BY 1")
        return [step for (step,) in rows[1:]]

    def checkpoints(self) -> list[int]:
        """Return steps of all checkpoints ever recorded."""
        return [step for (step,) in self.rows("SELECT step FROM checkpoints ORDER BY step")]

    def counts(self) -> dict[State, int]:
        """Count episodes by state in the index, including forgotten episodes: the audit compares the counts
        with the buffer's."""
        rows = self.rows(
            "SELECT state, sum(n) FROM ("
            "SELECT state, count(*) AS n FROM episodes WHERE group_id >= 0 GROUP BY state "
            "UNION ALL SELECT state, count FROM pruned) GROUP BY state"
        )
        return {State(state): count for state, count in rows}

    def committed_plans(self) -> list[Batch]:
        """Return the plans of committed batches, oldest first, as far as no checkpoint covers these
        batches."""
        query = "SELECT record FROM plans JOIN commits USING (step) WHERE step>? ORDER BY step"
        return self._records(Batch, query, self.covered_step)

    def planned_steps(self) -> set[int]:
        """Return the committed steps whose plan and payloads are still stored."""
        return {step for (step,) in self.rows("SELECT step FROM plans JOIN commits USING (step)")}

    def plan(self, step: int) -> Batch:
        """Return the plan of a step from `planned_steps`."""
        query = "SELECT record FROM plans WHERE step=?"
        return _first_record(self._records(Batch, query, step), "the plan for step", step)

    @property
    def covered_step(self) -> int:
        """Return the newest step whose plan no resume needs: a resume begins at a checkpoint of this step, or
        later."""
        return int(self.meta(COVERED_TO, "0"))

    def plans(self) -> list[Batch]:
        """Return the batches that no retained checkpoint covers, oldest first."""
        return self._records(Batch, "SELECT record FROM plans WHERE step>? ORDER BY step", self.covered_step)

    def trained_in_plans(self) -> int:
        """Count trajectories in committed batches: in the stored plans, and the recorded count of the
        forgotten plans. Trajectories lost to a repeated step count until the step is committed again."""
        plans = self.committed_plans()
        trained_lost = sum(self.episode(uid).state is State.TRAINED for batch in plans for uid in batch.lost)
        return int(self.meta("covered", "0")) + sum(len(batch.uids) for batch in plans) + trained_lost

    def episode(self, uid: str) -> EpisodeRecord:
        return _first_record(self._episodes("uid=?", uid), "episode", uid)

    def find_episode(self, uid: str) -> EpisodeRecord | None:
        """Return an episode; None if the index has no such episode, or has forgotten the episode."""
        return next(iter(self._episodes("uid=?", uid)), None)

    def baseline(self, group: int) -> Baseline:
        """Return the baseline of a settled group, from the records of the members."""
        return Baseline.of_group(
            self.group(group), {episode.uid: episode for episode in self.group_members(group)}
        )

    def held_out(self, prefix: str) -> Iterator[tuple[str, bytes]]:
        """Yield the validation episodes whose uid begins with `prefix`, with the results: one at a time, as
        results hold texts."""
        for (uid,) in self.rows("SELECT uid FROM held_out WHERE substr(uid, 1, ?)=?", len(prefix), prefix):
            yield uid, self.held_out_record(uid)

    def count_held_out(self, prefix: str) -> int:
        """Return the number of validation episodes whose uid begins with `prefix`."""
        query = "SELECT count(*) FROM held_out WHERE substr(uid, 1, ?)=?"
        return int(self.rows(query, len(prefix), prefix)[0][0])

    def held_out_record(self, uid: str) -> bytes:
        return self.rows("SELECT record FROM held_out WHERE uid=?", uid)[0][0]

    def groups(self) -> list[GroupRecord]:
        """Return all groups that the index still has, oldest first."""
        return self._records(GroupRecord, "SELECT record FROM groups ORDER BY id")

    def group_members(self, group: int) -> list[EpisodeRecord]:
        return self._episodes("group_id=?", group)

    def group(self, number: int) -> GroupRecord:
        query = "SELECT record FROM groups WHERE id=?"
        return _first_record(self._records(GroupRecord, query, number), "group", number)

    def load_run(self) -> StoredRun:
        """Return everything that a coordinator needs to continue the run."""
        groups = self._records(GroupRecord, "SELECT record FROM groups WHERE over=0")
        newest_groups = self._records(GroupRecord, "SELECT record FROM groups ORDER BY id DESC LIMIT 1")
        batches = self.plans()
        episodes = self._episodes("group_id IN (SELECT id FROM groups WHERE over=0)")
        planned_episodes = [
            self.episode(uid) for uid in sorted({uid for batch in batches for uid in batch.planned})
        ]
        counts = self.counts()
        for episode in episodes:
            counts[episode.state] -= 1
        ((committed_steps,),) = self.rows("SELECT coalesce(max(step), 0) FROM commits")

        return StoredRun(
            groups=groups,
            episodes=episodes,
            pruned_counts=counts,
            next_group=newest_groups[0].id + 1 if newest_groups else 0,
            cursor=newest_groups[0].position + 1 if newest_groups else 0,
            retired={sample for (sample,) in self.rows("SELECT sample FROM retired")},
            batches=batches,
            planned_episodes=planned_episodes,
            baselines={
                group: self.baseline(group) for group in {episode.group for episode in planned_episodes}
            },
            committed_steps=committed_steps,
        )

    def _episodes(self, where: str, *values: object) -> list[EpisodeRecord]:
        decode_record = msgspec.msgpack.Decoder(EpisodeRecord).decode
        episodes = list[EpisodeRecord]()
        for record, state, reason, step in self.rows(EPISODE_QUERY + where, *values):
            episode = decode_record(record)
            episode.state = State(state)
            episode.reason = reason
            episode.step = step
            episodes.append(episode)

        return episodes

    def _records(self, record_type: type[T], query: str, *values: object) -> list[T]:
        decode_record = msgspec.msgpack.Decoder(record_type).decode
        return [decode_record(record) for (record,) in self.rows(query, *values)]

    def rows(self, query: str, *values: object) -> list[Any]:
        try:
            return self._db.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise damage_error(Path(DATABASE), error) from error


def _first_record(records: Sequence[T], record_kind: str, name: object) -> T:
    """Return the only record. StoreError without a record: the coordinator may have forgotten the record in
    the meantime."""
    if records:
        return records[0]
    raise StoreError(
        f"{DATABASE}: {record_kind} {name} is not stored, or is no longer stored; set a larger "
        "store.keep_bytes"
    )


def read_meta(run_dir: Path, key: str) -> str:
    """Return the value of a key of `meta` in the store of a run; '' without a store, or without the key."""
    database = run_dir / DATABASE
    if not database.exists() or not database.stat().st_size:
        return ""
    with closing(RunReader.open(run_dir)) as reader:
        return reader.meta(key)
