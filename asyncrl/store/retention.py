"""Decides what a run forgets: payloads that nothing needs, the oldest first, and what the index says of them.

Needed are those of episodes that are not over, and of batches that the oldest retained checkpoint does not
cover: a resume reads them. The newest `keep_bytes` of the others are kept for `asyncrl replay` and `regrade`.
Whole segments go, and with them all payloads of each episode that has one there. Each transaction forgets
some of many episodes, so that none takes long.
"""

from __future__ import annotations

import sqlite3

from asyncrl.store.segments import SegmentReader

MOST = 200  # episodes that one transaction forgets

# The results of groups that are over go, once no payload is left of them and no kept plan compares with them.
# The newest group stays: it is the data cursor.
_FORGOTTEN = """
SELECT id FROM groups WHERE over AND id <= ? AND id < (SELECT max(id) FROM groups) AND NOT EXISTS (
    SELECT 1 FROM episodes e WHERE e.group_id = groups.id AND (
        e.step >= (SELECT coalesce(min(step), 1 << 60) FROM plans)
        OR EXISTS (SELECT 1 FROM frames f WHERE f.uid = e.uid)))
"""
_COUNTED = """
INSERT INTO pruned SELECT state, count(*) FROM episodes WHERE group_id=? GROUP BY state
ON CONFLICT(state) DO UPDATE SET count = count + excluded.count
"""


def prune(
    db: sqlite3.Connection, segments: SegmentReader, newest: int, keep_bytes: int, covered: int
) -> int | None:
    """In a transaction: forget what is beyond `keep_bytes`, of MOST episodes. A checkpoint covers the batches
    before `covered`, whose plans go with the first of their payloads. Returns None when there may be more to
    forget; else the oldest segment that is still referred to, `newest` if none is: once the transaction is
    durable, those before it can be deleted."""
    (needed,) = db.execute("SELECT min(segment) FROM frames WHERE spare=0").fetchone()
    oldest = segments.oldest_kept(newest if needed is None else needed, keep_bytes)
    old = "SELECT DISTINCT uid FROM frames WHERE spare=1 AND segment < ? LIMIT ?"
    gone = db.execute(old, (oldest, MOST)).fetchall()
    if not gone:
        return oldest
    found = [db.execute("SELECT group_id, step FROM episodes WHERE uid=?", uid).fetchone() for uid in gone]
    groups, steps = zip(*filter(None, found), strict=True) if any(found) else ((-1,), (-1,))
    last = max((step for step in steps if step < covered), default=-1)
    db.execute("DELETE FROM plans WHERE step <= ?", (last,))
    db.executemany("DELETE FROM frames WHERE uid=?", gone)
    forgotten = db.execute(_FORGOTTEN, (max(groups),)).fetchall()  # newer groups have newer payloads
    db.executemany(_COUNTED, forgotten)
    db.executemany("DELETE FROM episodes WHERE group_id=?", forgotten)
    db.executemany("DELETE FROM groups WHERE id=?", forgotten)
    return oldest if len(gone) < MOST else None
