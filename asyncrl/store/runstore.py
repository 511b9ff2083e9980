"""Writes the run's journal: a SQLite index (flow, plans, commits) over payload segments.

The coordinator is the only writer. The changes of a pass of the coordinator's loop are kept in memory and
written by `commit`, in a single transaction; messages leave afterwards. All reading goes through
`reader.RunReader`.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from asyncrl.buffer.batches import Batch
from asyncrl.buffer.records import MAX_NAME_CHARACTERS, EpisodeRecord, GroupRecord
from asyncrl.errors import UNDECODABLE
from asyncrl.store.copies import Copies
from asyncrl.store.reader import COVERED_TO, IMAGE_KIND, FrameKey, RunReader, image_kind
from asyncrl.store.schema import DATABASE, SupersededError, store_error, take_over
from asyncrl.store.segments import FrameLocation, SegmentReader, SegmentWriter, fsync
from asyncrl.types import NO_STEP, Sample, ToolReply, readable_content
from asyncrl.values import shorten_to_line

EPISODE_TABLES = ("episodes", "answers", "calls", "frames")  # tables with rows by uid
MEMBER_QUERY = "SELECT uid FROM episodes WHERE group_id=?"
MAX_FORGOTTEN = 200  # episodes that a transaction forgets, so that no transaction takes long
log = logging.getLogger("asyncrl.store")

Row = tuple[object, ...]
# Updates in place, without touching the index, because most written episodes exist already.
PUT_EPISODE = """INSERT INTO episodes VALUES(?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?) ON CONFLICT(uid) DO
    UPDATE SET state=excluded.state, reason=excluded.reason, step=excluded.step, "end"=excluded."end",
    score=excluded.score, reward=excluded.reward, components=excluded.components, turns=excluded.turns,
    tokens=excluded.tokens, calls=excluded.calls, failed_calls=excluded.failed_calls,
    failed_tool=excluded.failed_tool, agent=excluded.agent, seconds=excluded.seconds,
    oldest=excluded.oldest, newest=excluded.newest, record=excluded.record"""
MOVE_EPISODE = "UPDATE episodes SET state=?, reason=?, step=? WHERE uid=?"

RAISE_META = """INSERT INTO meta VALUES(?,?) ON CONFLICT(key) DO UPDATE SET
    value=max(CAST(value AS INTEGER), CAST(excluded.value AS INTEGER))"""


class RunStore:
    """Owns `run.db` and `segments/` in a run directory. Rows and payloads become durable at the next
    commit(); `read` sees new payloads at once, new rows after the commit. Opening a store takes over: an
    earlier owner can write nothing any more. `epoch` numbers the owners, from 1. `keep_bytes`: see
    `prune_store`."""

    def __init__(self, run_dir: Path, keep_bytes: int = 0) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._run_dir = run_dir
        self._keep_bytes = keep_bytes
        self._db, self.epoch = take_over(run_dir)
        self._fsync_index()  # after a power cut the epoch must not be assigned again
        self._segments = SegmentWriter(run_dir / "segments")
        self._segment_reader = SegmentReader(run_dir / "segments")
        self._statements: list[tuple[str, list[Row]]] = []  # not committed, in order
        self._frames: dict[FrameKey, bytes] = {}  # payloads that are not committed
        self._frame_episodes: set[str] = set()  # uids of these payloads
        self._released_episodes: set[str] = set()  # uids whose payloads nothing needs any more
        self._frame_places: dict[FrameKey, FrameLocation] = {}  # locations of payloads already in a segment
        self._sync_due = False
        self.pruning = False  # each commit forgets some data, as there may be more to forget
        self.reader = RunReader(self._db, self._segment_reader, self._frames)
        self.copies = Copies(run_dir)

    def put_frame(self, uid: str, turn: int, kind: str, payload: bytes) -> None:
        """Store the payload of a turn (`kind` generated | replied), or of the last turn the `result` of the
        episode; a repetition replaces the earlier payload."""
        self._frames[uid, turn, kind] = payload
        self._frame_episodes.add(uid)
        self._frame_places.pop((uid, turn, kind), None)

    def put_image(self, uid: str, turn: int, digest: str, file: bytes) -> None:
        """Store the file of an image that a turn or its replies brought into the episode. A file that is
        stored in one of the newest two segments, and was not found damaged there, is not written again: older
        segments would be kept for it."""
        key = (uid, turn, image_kind(digest))
        self.put_frame(*key, file)
        location = self.reader.image_location(digest)
        if location is None or location in self.reader.damaged_images:
            return
        if location.segment >= self._segments.current_segment - 1:
            self._frame_places[key] = location

    def put_groups(self, groups: Collection[GroupRecord], live: dict[int, GroupRecord]) -> None:
        self._put_rows("groups", *((g.id, g.id not in live, msgspec.msgpack.encode(g)) for g in groups))
        self._put_rows("retired", *((group.sample,) for group in groups if group.retires))

    def put_episodes(self, episodes: Collection[EpisodeRecord], moved: Iterable[EpisodeRecord] = ()) -> None:
        """Store episodes. `moved`: episodes of which only state, reason and step have changed."""
        self._add_statement(PUT_EPISODE, *(episode_row(e) for e in episodes))
        self._add_statement(
            MOVE_EPISODE, *((e.state.value, e.reason, _trained_step(e), e.uid) for e in moved)
        )

    def put_question(self, group: int, sample: Sample) -> None:
        """Store the texts of a group's sample, for lists; `group`: as in the row of an episode."""
        question = next(
            (readable_content(message) for message in reversed(sample.prompt) if message.role == "user"), ""
        )
        truth = sample.ground_truth_json
        with suppress(*UNDECODABLE):  # most are JSON texts
            truth = msgspec.json.decode(truth, type=str)

        question_row = (
            group,
            sample.row,
            sample.data_source,
            shorten_to_line(question),
            shorten_to_line(truth),
        )
        self._put_rows("questions", question_row)

    def put_answer(self, uid: str, answer: str) -> None:
        if answer:
            self._put_rows("answers", (uid, answer))

    def put_calls(self, uid: str, turn: int, replies: Sequence[ToolReply]) -> None:
        """Store the tool calls of a turn."""
        self._put_rows(
            "calls",
            *(
                (uid, turn, call_number, reply.call.name[:MAX_NAME_CHARACTERS], reply.seconds, reply.failed,
                 reply.refused, shorten_to_line(reply.error or "", MAX_NAME_CHARACTERS))
                for call_number, reply in enumerate(replies)
            ),
        )  # fmt: skip

    def put_batches(self, batches: Iterable[Batch]) -> None:
        self._put_rows("plans", *((batch.step, msgspec.msgpack.encode(batch)) for batch in batches))

    def put_commit(self, step: int, trainer_epoch: int, plan_hash: str) -> None:
        self._put_rows("commits", (step, trainer_epoch, plan_hash))

    def put_checkpoint(self, step: int) -> None:
        self._put_rows("checkpoints", (step,))

    def put_held_out(self, uid: str, record: bytes) -> None:
        """Store the result of an episode of a validation."""
        self._put_rows("held_out", (uid, record))

    def list_held_out(self, episode: EpisodeRecord, step: int, mode: str) -> None:
        """List a finished episode of a validation; `step`: of the validation."""
        self._add_statement(PUT_EPISODE, episode_row(episode, -1 - episode.group, step, "held out", mode))

    def forget_held_out(self, prefix: str) -> None:
        """Delete everything about held-out episodes whose uid begins with `prefix`."""
        for table in ("held_out", *EPISODE_TABLES):
            prefix_end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
            self._add_statement(f"DELETE FROM {table} WHERE uid>=? AND uid<?", (prefix, prefix_end))

    def put_meta(self, key: str, value: str) -> None:
        self._put_rows("meta", (key, value))

    def _put_rows(self, table: str, *rows: Row) -> None:
        if rows:
            marks = ",".join("?" * len(rows[0]))
            self._add_statement(f"INSERT OR REPLACE INTO {table} VALUES({marks})", *rows)

    def _add_statement(self, statement: str, *rows: Row) -> None:
        """Add writes to the next commit; consecutive writes with the same statement are executed together."""
        if not rows:
            return
        if not self._statements or self._statements[-1][0] != statement:
            self._statements.append((statement, []))
        self._statements[-1][1].extend(rows)

    def forget_frames(self, uid: str, turn: int = 0) -> None:
        """Delete the payloads of an episode, from this turn on."""
        if uid in self._frame_episodes:
            for key in [key for key in self._frames if key[0] == uid and key[1] >= turn]:
                del self._frames[key]
        for table in ("frames", "calls"):
            self._add_statement(f"DELETE FROM {table} WHERE uid=? AND turn>=?", (uid, turn))
        self._add_statement("DELETE FROM answers WHERE uid=?", (uid,))

    def release_frames(self, uid: str) -> None:
        """Release the payloads of an episode: from now on these are stored only as far as `keep_bytes`
        allows."""
        self._released_episodes.add(uid)
        self._add_statement("UPDATE frames SET spare=1 WHERE uid=?", (uid,))

    def forget_plans(self, first_step: int, last_step: int, rows: int) -> None:
        """Record steps that trained `rows` trajectories, and of which only the commit is known."""
        self._add_statement("DELETE FROM plans WHERE step BETWEEN ? AND ?", (first_step, last_step))
        self._count_covered(rows)

    def cover_steps(self, step: int, rows: int) -> None:
        """Record that the oldest retained checkpoint covers the steps up to `step`, `rows` trajectories more
        than the previous checkpoint. Covered steps stay covered, also when more checkpoints are retained."""
        self._add_statement(RAISE_META, (COVERED_TO, step))
        self._count_covered(rows)

    def _count_covered(self, rows: int) -> None:
        self._add_statement("INSERT OR IGNORE INTO meta VALUES('covered', '0')", ())
        self._add_statement("UPDATE meta SET value=value+? WHERE key='covered'", (rows,))

    def request_sync(self) -> None:
        """Make the next commit power-loss safe, with all earlier commits. Afterwards, while `pruning`, each
        commit forgets some unneeded data."""
        self._sync_due = True
        self.pruning = True

    # -- writing -----------------------------------------------------------------------------------------

    def commit(self) -> None:
        """Make everything put so far durable, in a single transaction: kill -9 safe, after `sync` power-loss
        safe.

        StorePaused: the disk is full, or another process locks the store; nothing was written and nothing is
        lost: call again. SupersededError: another coordinator has opened the store. StoreError: damaged.
        """
        self._append_frames()
        if self._sync_due:
            self._segments.sync_segment()
        oldest_segment: int | None = None
        if self._frames or self._statements or self._sync_due or self.pruning:
            with self._transaction():
                if (current_epoch := int(self.reader.meta("coordinator_epoch", "0"))) != self.epoch:
                    raise SupersededError(
                        f"{self._run_dir / DATABASE}: another coordinator (epoch {current_epoch}) has taken "
                        f"over from this one (epoch {self.epoch})"
                    )

                for statement, rows in self._statements:
                    self._db.executemany(statement, rows)
                rows = [
                    (*key, *self._frame_places[key], key[0] in self._released_episodes)
                    for key in self._frames
                ]
                self._db.executemany("INSERT OR REPLACE INTO frames VALUES(?,?,?,?,?,?)", rows)
                if self.pruning:
                    oldest_segment = prune_store(
                        self._db,
                        self._segment_reader,
                        self._segments.newest_segment,
                        self._keep_bytes,
                        self.reader.covered_step,
                    )

            self._clear_pending()

        if self._sync_due or oldest_segment is not None:
            self._fsync_index()
            self._shorten_log()
            self._sync_due = False

        if oldest_segment is not None:
            self.pruning = self._segment_reader.remove_before(oldest_segment)

    def _append_frames(self) -> None:
        """Append payloads to the segment: an image that several episodes brought in this pass once."""
        image_locations = {
            kind: location
            for (_, _, kind), location in self._frame_places.items()
            if kind.startswith(IMAGE_KIND)
        }
        for key, payload in self._frames.items():
            if key in self._frame_places:
                continue
            kind = key[2]
            location = image_locations.get(kind) or self._segments.append_record(payload)
            self._frame_places[key] = location
            if kind.startswith(IMAGE_KIND):
                image_locations[kind] = location

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Begin and commit the only transaction; an error undoes the changes."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            yield
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            raise store_error(self._run_dir / DATABASE, error) from error
        finally:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")

    def _fsync_index(self) -> None:
        """Sync committed data to the disk: until SQLite copies committed data, it is only in the write-ahead
        log."""
        fsync(self._run_dir / f"{DATABASE}-wal")
        fsync(self._run_dir)

    def _shorten_log(self) -> None:
        if self.copies.is_copying:  # the copy reads the state at the start of the copy from the log
            if overdue_seconds := self.copies.overdue_seconds:
                log.warning(
                    "%s: a copy has been running for %.0f s while the write-ahead log grows; check the disk",
                    self._run_dir,
                    overdue_seconds,
                )
            return

        try:
            (is_blocked, *_) = self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        except sqlite3.Error as error:
            raise store_error(self._run_dir / DATABASE, error) from error

        if is_blocked:
            log.warning("%s: a reader keeps a transaction open, so the write-ahead log grows", self._run_dir)

    def rollback(self) -> None:
        """Forget everything put since the last commit."""
        self._clear_pending()
        self._sync_due = False

    def _clear_pending(self) -> None:
        self._statements.clear()
        self._frames.clear()
        self._frame_episodes.clear()
        self._released_episodes.clear()
        self._frame_places.clear()

    def close(self) -> None:
        """Close the files. Uncommitted data is lost."""
        self.copies.wait_for_copy()
        self.reader.close()
        self._segments.close()


def episode_row(
    episode: EpisodeRecord,
    group: int | None = None,
    step: int | None = None,
    kind: str = "train",
    mode: str = "",
) -> Row:
    """Return the row of an episode for the table `episodes`."""
    result = episode.result
    stats = episode.stats
    has_landed = stats.turns > 0
    step = _trained_step(episode) if step is None else step
    end_columns = (result.end.value, result.score, result.reward) if has_landed else ("", None, None)
    components = msgspec.json.encode(result.components).decode() if result.components else None
    version_columns = (episode.oldest, episode.newest) if episode.oldest >= 0 else (None, None)

    return (
        episode.uid,
        episode.group if group is None else group,
        episode.member,
        kind,
        mode or ("greedy" if episode.greedy else "sampled"),
        episode.state.value,
        episode.reason,
        step,
        *end_columns,
        components,
        episode.turns,
        result.tokens if has_landed else episode.sampled,
        stats.tool_calls if has_landed else 0,
        stats.failed if has_landed else 0,
        episode.failed_tool,
        episode.agent,
        stats.seconds if has_landed else episode.seconds,
        *version_columns,
        msgspec.msgpack.encode(episode),
    )


def _trained_step(episode: EpisodeRecord) -> int | None:
    return None if episode.step == NO_STEP else episode.step


# -- retention ---------------------------------------------------------------------------------------------
# A resume reads payloads of unfinished episodes, and of batches that the oldest retained checkpoint does not
# cover. The newest `keep_bytes` of all further payloads are kept for `asyncrl replay` and `regrade`. Whole
# segments are deleted, and then all payloads of each episode with a payload in a deleted segment.

# Results of finished groups can be forgotten once the group has no payload and no stored plan needs the
# results as a baseline. The newest group stays, because it is the data cursor.
FORGETTABLE_GROUPS = """
SELECT id FROM groups WHERE over AND id <= ? AND id < (SELECT max(id) FROM groups) AND NOT EXISTS (
    SELECT 1 FROM episodes e WHERE e.group_id = groups.id AND (
        e.step >= (SELECT coalesce(min(step), 1 << 60) FROM plans)
        OR EXISTS (SELECT 1 FROM frames f WHERE f.uid = e.uid)))
"""
# Held-out episodes of this validation and of earlier validations.
FORGETTABLE_HELD_OUT = """
SELECT uid FROM episodes e WHERE group_id < 0 AND step <= ?
    AND NOT EXISTS (SELECT 1 FROM frames f WHERE f.uid = e.uid)
"""
COUNT_PRUNED = """
INSERT INTO pruned SELECT state, count(*) FROM episodes WHERE group_id=? GROUP BY state
ON CONFLICT(state) DO UPDATE SET count = count + excluded.count
"""


def prune_store(
    db: sqlite3.Connection, segments: SegmentReader, newest_segment: int, keep_bytes: int, covered_step: int
) -> int | None:
    """Forget data beyond `keep_bytes`, of at most MAX_FORGOTTEN episodes, within a transaction.

    A checkpoint covers the steps up to `covered_step`; the plans of these steps go with the first forgotten
    payloads. Returns None when there may be more to forget; else the oldest segment that is still
    referred to, or `newest_segment`: once the transaction is durable, earlier segments can be deleted.
    """
    (needed_segment,) = db.execute("SELECT min(segment) FROM frames WHERE spare=0").fetchone()
    oldest_segment = segments.oldest_kept(
        newest_segment if needed_segment is None else needed_segment, keep_bytes
    )

    spare_query = "SELECT DISTINCT uid FROM frames WHERE spare=1 AND segment < ? LIMIT ?"
    pruned_uids = db.execute(spare_query, (oldest_segment, MAX_FORGOTTEN)).fetchall()
    if not pruned_uids:
        return oldest_segment

    step_query = "SELECT group_id, coalesce(step, 0) FROM episodes WHERE uid=?"
    episode_rows = [row for uid in pruned_uids if (row := db.execute(step_query, uid).fetchone())]
    covered_plans = [step for group, step in episode_rows if group >= 0 and step <= covered_step]
    db.execute("DELETE FROM plans WHERE step <= ?", (max(covered_plans, default=0),))
    db.executemany("DELETE FROM frames WHERE uid=?", pruned_uids)

    newest_group = max((group for group, _ in episode_rows), default=-1)  # newer groups have newer payloads
    forgotten_groups = db.execute(FORGETTABLE_GROUPS, (newest_group,)).fetchall()
    db.executemany(COUNT_PRUNED, forgotten_groups)
    uids = [uid for group in forgotten_groups for uid in db.execute(MEMBER_QUERY, group)]

    if validation_steps := [step for group, step in episode_rows if group < 0]:
        uids += db.execute(FORGETTABLE_HELD_OUT, (max(validation_steps),)).fetchall()

    for table in EPISODE_TABLES:
        db.executemany(f"DELETE FROM {table} WHERE uid=?", uids)
    db.executemany("DELETE FROM questions WHERE group_id=?", forgotten_groups)
    db.executemany("DELETE FROM groups WHERE id=?", forgotten_groups)

    return oldest_segment if len(pruned_uids) < MAX_FORGOTTEN else None
