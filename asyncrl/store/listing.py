"""Lists episodes of a run that fit some conditions, in an order, and counts them by kind.

A condition is `[column, operator, value]`, with the operators = >= <=. Conditions "=" on the same column are
alternatives. A value [low, high] is a range without its end, open where it has null; null alone means not
known. Columns are those of COLUMNS, `components.NAME`, and `tool`: one that was called.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import msgspec

from asyncrl.errors import UNDECODABLE, ConfigError, one_line
from asyncrl.store.reader import RunReader

PAGE = 100  # episodes
DISTINCT = 8  # values of a number that facets show one by one; of more they show ranges
# of a facet; facets; of a search
MOST_VALUES = 20
MOST_COMPONENTS = 6
MOST_WORDS = 10
LOOKED_AT = 200  # episodes, for the names of their components
TEXTS = ("question", "answer", "truth")
COMPONENT = "components."
CALLED = "tool"
BOUND = "(SELECT value ->> '$[#-1].config.buffer.max_staleness' FROM meta WHERE key = 'launches')"

COLUMNS = {
    **{name: f"e.{name}" for name in ("uid", "kind", "step", "state", "reason", "member", "mode", "score")},
    **{name: f"e.{name}" for name in ("reward", "turns", "tokens", "calls", "failed_calls", "failed_tool")},
    **{name: f"e.{name}" for name in ("agent", "seconds", "oldest", "newest")},
    "end": 'e."end"',
    "group": "CASE WHEN e.group_id >= 0 THEN e.group_id END",
    **{name: f"q.{name}" for name in ("sample", "source")},
    **{name: f"coalesce({table}.{name}, '')" for name, table in zip(TEXTS, "qaq", strict=True)},
    "lag": "CASE e.kind WHEN 'train' THEN max(abs(e.step - 1 - e.oldest), abs(e.step - 1 - e.newest)) END",
    # Tokens beyond the bound of the newest launch: none, some, all.
    "stale": f"""CASE e.kind WHEN 'train' THEN CASE WHEN e.step - 1 - e.newest > {BOUND} THEN 'all'
        WHEN e.step - 1 - e.oldest > {BOUND} THEN 'some' WHEN e.step - 1 - e.oldest <= {BOUND} THEN 'none'
        END END""",
}
FACETS = {
    "kind": "kind",
    "state": "state",
    "reason": "reason",
    "end": "end",
    "score": "score",
    "failed_tool": "tool that failed",
    "agent": "agent",
    "mode": "mode",
    "source": "source",
    "stale": "tokens masked as too old",
}
NEWEST = "e.group_id DESC, e.step DESC, e.member, e.uid"  # held-out ones last
# Of a run that is over: episodes that were under way come last, for there is nothing to read of them.
NEWEST_OVER = f"e.state IN ('pending', 'running'), {NEWEST}"
FROM = """FROM episodes e LEFT JOIN questions q ON q.group_id = e.group_id
    LEFT JOIN answers a ON a.uid = e.uid"""
TOOLS = """WITH called AS (
    SELECT tool, seconds, failed, refused, row_number() OVER (PARTITION BY tool ORDER BY seconds) AS place,
        count(*) OVER (PARTITION BY tool) AS n
    FROM calls WHERE {where})
SELECT tool, n, sum(failed), sum(refused), max(CASE WHEN place = (n + 1) / 2 THEN seconds END),
    max(CASE WHEN place = (19 * n + 19) / 20 THEN seconds END)
FROM called GROUP BY tool ORDER BY n DESC, tool"""

Value = str | int | float | None
Operator = Literal["=", ">=", "<="]
_conditions = msgspec.json.Decoder(list[tuple[str, Operator, Value | tuple[Value, Value]]])


class Clause(msgspec.Struct, frozen=True):
    """Holds a part of a statement, and its values. `column`: what "=" compares, if it has a facet."""

    text: str
    values: tuple[Value, ...] = ()
    column: str = ""


class Listing(msgspec.Struct, frozen=True):
    """Says which episodes are wanted. `search`: words of question, answer or truth, or of a transcript."""

    clauses: tuple[Clause, ...] = ()
    order: str = NEWEST
    start: int = 0
    search: tuple[str, ...] = ()

    @classmethod
    def of(cls, where: str, order: str, start: str, search: str) -> Listing:
        """Read it from the parameters of an address; '' where one is not given. ConfigError."""
        try:
            conditions = _conditions.decode(where or "[]")
        except UNDECODABLE as error:
            raise ConfigError(
                f"episodes: where: {one_line(error)}; give a list of [column, operator, value]"
            ) from None
        if start and not (start.isdecimal() and len(start) < 10):
            raise ConfigError(f"episodes: start={start}: give a number from 0 on")
        down = " DESC" * order.startswith("-")
        by = order.removeprefix("-")
        sort = f"{column(by)}{down} NULLS LAST, {NEWEST}" if by else NEWEST
        words = tuple(search.split())[:MOST_WORDS]
        return cls(tuple(_clauses(conditions)), sort, int(start or 0), words)

    def where(self, found: Sequence[str] = (), facets: bool = True) -> Clause:
        """Return all conditions as one, or those without `facets`. `found`: episodes in whose transcripts the
        words of `search` are."""
        parts = [one for one in self.clauses if facets or not one.column]
        words = " AND ".join(
            f"({' OR '.join(f'{COLUMNS[name]} LIKE ? ESCAPE ?' for name in TEXTS)})" for _ in self.search
        )
        if words:
            like = [part for word in self.search for part in (_pattern(word), "\\") * len(TEXTS)]
            listed = f" OR e.uid IN ({','.join('?' * len(found))})" if found else ""
            parts.append(Clause(f"({words}{listed})", (*like, *found)))
        return Clause(
            " AND ".join(one.text for one in parts) or "1",
            tuple(value for one in parts for value in one.values),
        )


def column(name: str) -> str:
    """Return the expression of a column. ConfigError where there is none."""
    if name.startswith(COMPONENT) and '"' not in name:
        return "e.components ->> '$.\"{}\"'".format(name.removeprefix(COMPONENT).replace("'", "''"))
    if name not in COLUMNS:
        raise ConfigError(f"episodes: no column {name!r}; there are {', '.join(COLUMNS)}, {COMPONENT}NAME")
    return COLUMNS[name]


def _clauses(conditions: Sequence[tuple[str, Operator, Any]]) -> list[Clause]:
    """Make one for each column with "=", and one for each other condition. ConfigError."""
    equal = defaultdict[str, list[Clause]](list)
    found = list[Clause]()
    for name, operator, value in conditions:
        what = "" if name == CALLED else column(name)
        if name == CALLED:
            equal[name].append(Clause("e.uid IN (SELECT uid FROM calls WHERE tool IS ?)", (_bounded(value),)))
        elif operator != "=":
            found.append(Clause(f"{what} {operator} ?", (_bounded(value),)))
        elif isinstance(value, tuple):
            ends = [(end, sign) for end, sign in zip(value, (">=", "<"), strict=True) if end is not None]
            text = " AND ".join(f"{what} {sign} ?" for _, sign in ends) or f"{what} IS NOT NULL"
            equal[name].append(Clause(f"({text})", tuple(_bounded(end) for end, _ in ends)))
        else:
            equal[name].append(Clause(f"{what} IS ?", (_bounded(value),)))
    for name, some in equal.items():
        text = " OR ".join(one.text for one in some)
        values = [v for one in some for v in one.values]
        has_facet = name in FACETS or name.startswith(COMPONENT)
        found.append(Clause(f"({text})", tuple(values), name if has_facet else ""))
    return found


def _bounded(value: Any) -> Value:
    if isinstance(value, tuple) or (isinstance(value, int) and abs(value) >= 1 << 63):
        raise ConfigError(f"episodes: where: nothing compares with {value}; give a smaller number or a text")
    found: Value = value
    return found


def _pattern(word: str) -> str:
    return "%" + "".join(f"\\{one}" if one in "\\%_" else one for one in word) + "%"


def page(reader: RunReader, wanted: Listing, found: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return the PAGE episodes from `start` on."""
    where = wanted.where(found)
    names = [*COLUMNS, "components"]
    columns = ", ".join([*COLUMNS.values(), "e.components"])
    # Their texts are not read to sort all.
    shown = f"SELECT e.uid {FROM} WHERE {where.text} ORDER BY {wanted.order} LIMIT {PAGE} OFFSET ?"
    query = f"SELECT {columns} {FROM} WHERE e.uid IN ({shown}) ORDER BY {wanted.order}"
    rows = reader.rows(query, *where.values, wanted.start)
    episodes = [dict(zip(names, row, strict=True)) for row in rows]
    return [
        one | {"components": msgspec.json.decode(one["components"]) if one["components"] else {}}
        for one in episodes
    ]


def uids(reader: RunReader, wanted: Listing) -> list[tuple[str, int]]:
    """Return all episodes that fit, `search` left out, in order, with their numbers of turns."""
    where = msgspec.structs.replace(wanted, search=()).where()
    return reader.rows(
        f"SELECT e.uid, e.turns {FROM} WHERE {where.text} ORDER BY {wanted.order}", *where.values
    )


class Facet(msgspec.Struct):
    """`places`: of each number that `expression` gives, the value in a condition and its label; None: the
    expression gives the value itself."""

    column: str
    label: str
    expression: str
    places: list[tuple[Any, str]] | None = None


def facets(reader: RunReader, wanted: Listing, found: Sequence[str] = ()) -> tuple[int, list[dict[str, Any]]]:
    """Return how many episodes fit, and of each facet the values with their counts: of the episodes that fit
    all conditions but its own."""
    shown = [_facet(reader, name, label) for name, label in FACETS.items()]
    shown += [_facet(reader, f"{COMPONENT}{name}", name) for name in _components(reader)]
    own = [one for one in wanted.clauses if one.column]
    where = wanted.where(found, facets=False)
    columns = ", ".join([*(one.expression for one in shown), *(one.text for one in own)])
    values = [value for one in own for value in one.values]
    places = ",".join(str(at + 2) for at in range(len(shown) + len(own)))
    query = f"SELECT count(*), {columns} {FROM} WHERE {where.text} GROUP BY {places}"
    total = 0
    counts = [Counter[Any]() for _ in shown]
    for count, *row in reader.rows(query, *values, *where.values):
        fits = row[len(shown) :]
        missed = {one.column for one, fit in zip(own, fits, strict=True) if not fit}
        total += 0 if missed else count
        for facet, counter, value in zip(shown, counts, row, strict=False):
            if missed <= {facet.column}:
                counter[value] += count
    answers: list[dict[str, Any]] = [
        {"column": facet.column, "label": facet.label, "values": _values(facet, counter)}
        for facet, counter in zip(shown, counts, strict=True)
    ]
    return total, [one for one in answers if any(value["value"] not in ("", None) for value in one["values"])]


def _values(facet: Facet, counts: Counter[Any]) -> list[dict[str, Any]]:
    if facet.places is not None:
        known = [(*facet.places[at], counts[at]) for at in sorted(at for at in counts if at is not None)]
        return [{"value": value, "label": label, "count": count} for value, label, count in known]
    found = counts.most_common(MOST_VALUES)
    labels = {"": "none", None: "not known", "landed": "ended"}
    return [{"value": value, "label": labels.get(value, value), "count": n} for value, n in found]


def _facet(reader: RunReader, name: str, label: str) -> Facet:
    """Make a facet: numbers of few values are shown by value, others in ranges."""
    what = column(name)
    if name != "score" and name in FACETS:
        return Facet(name, label, what)
    some = reader.rows(
        f"SELECT DISTINCT {what} FROM episodes e WHERE {what} IS NOT NULL LIMIT {DISTINCT + 1}"
    )
    known = sorted(value for (value,) in some if isinstance(value, int | float))
    if len(known) <= DISTINCT:
        cases = " ".join(f"WHEN {value!r} THEN {at}" for at, value in enumerate(known))
        values: list[tuple[Any, str]] = [(value, f"{value:g}") for value in known]
        return Facet(name, label, f"CASE {what} {cases or 'WHEN NULL THEN 0'} END", values)
    ((low, high),) = reader.rows(f"SELECT min({what}), max({what}) FROM episodes e")
    edges = _edges(low, high)
    cases = " ".join(f"WHEN {what} < {edge!r} THEN {at}" for at, edge in enumerate(edges))
    ends = [None, *edges, None]
    ranges: list[tuple[Any, str]] = [
        ([a, b], f"under {b:g}" if a is None else f"{a:g} and more" if b is None else f"{a:g} to {b:g}")
        for a, b in pairwise(ends)
    ]
    return Facet(name, label, f"CASE WHEN {what} IS NULL THEN NULL {cases} ELSE {len(edges)} END", ranges)


def _edges(low: float, high: float) -> list[float]:
    """Return about four round numbers between the two."""
    raw = (high - low) / 5
    unit = 10 ** math.floor(math.log10(raw))
    width = next(unit * times for times in (1, 2, 5, 10) if unit * times >= raw)
    first = math.floor(low / width) + 1
    return [at * width for at in range(first, first + 6) if at * width < high]


def _components(reader: RunReader) -> list[str]:
    """Return the names of components that the newest episodes have."""
    query = """SELECT DISTINCT key FROM (
        SELECT components FROM episodes WHERE components IS NOT NULL ORDER BY group_id DESC LIMIT ?) AS e,
        json_each(e.components) WHERE instr(key, '"') = 0 LIMIT ?"""
    return [name for (name,) in reader.rows(query, LOOKED_AT, MOST_COMPONENTS)]


def tools(reader: RunReader, wanted: Listing) -> list[dict[str, Any]]:
    """Return what the tools did in the episodes that fit."""
    where = wanted.where()
    all_of_them = not (wanted.clauses or wanted.search)
    chosen = "1" if all_of_them else f"uid IN (SELECT e.uid {FROM} WHERE {where.text})"
    names = ("tool", "calls", "failed", "refused", "p50", "p95")
    found = [
        dict(zip(names, row, strict=True)) for row in reader.rows(TOOLS.format(where=chosen), *where.values)
    ]
    query = f"""SELECT tool, error, count(*) AS n FROM calls WHERE error <> '' AND {chosen}
        GROUP BY tool, error ORDER BY n"""
    errors = {tool: (error, count) for tool, error, count in reader.rows(query, *where.values)}
    for one in found:
        one["error"], one["errors"] = errors.get(one["tool"], ("", 0))
    return found
