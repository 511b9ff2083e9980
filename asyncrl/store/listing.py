"""Lists episodes of a run that meet some conditions, in an order, and counts them by kind.

A condition is `[column, operator, value]`, with the operators = >= <= and `begins`, which compares the
beginning of a text, ignoring the case of ASCII letters. Conditions "=" or `begins` on the same column are
alternatives. A value [low, high] is a range without the end, open where a bound is null; null alone means not
known. Columns are the keys of COLUMNS, `components.NAME`, and `tool`: the name of a called tool.
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

PAGE_SIZE = 100  # episodes
MAX_DISTINCT = 8  # different numbers of a column that facets show one by one; more numbers become ranges
MAX_FACET_VALUES = 20
MAX_COMPONENT_FACETS = 6
MAX_SEARCH_WORDS = 10
SCANNED_EPISODES = 200  # newest episodes whose component names become facets
TEXTS = ("question", "answer", "truth")
LIKE_ESCAPES = str.maketrans({"\\": "\\\\", "%": "\\%", "_": "\\_"})  # of LIKE … ESCAPE '\'
COMPONENT_PREFIX = "components."
CALLED_TOOL = "tool"
START_VERSION = "(e.step - 1)"  # see types.start_version
MAX_STALENESS = "(SELECT value ->> '$[#-1].config.buffer.max_staleness' FROM meta WHERE key = 'launches')"

COLUMNS = {
    **{name: f"e.{name}" for name in ("uid", "kind", "step", "state", "reason", "member", "mode", "score")},
    **{name: f"e.{name}" for name in ("reward", "turns", "tokens", "calls", "failed_calls", "failed_tool")},
    **{name: f"e.{name}" for name in ("agent", "seconds", "oldest", "newest")},
    "end": 'e."end"',
    "group": "CASE WHEN e.group_id >= 0 THEN e.group_id END",
    **{name: f"q.{name}" for name in ("sample", "source")},
    **{name: f"coalesce({table}.{name}, '')" for name, table in zip(TEXTS, "qaq", strict=True)},
    "lag": f"""CASE e.kind WHEN 'train'
        THEN max(abs({START_VERSION} - e.oldest), abs({START_VERSION} - e.newest)) END""",
    # Tokens beyond the bound of the newest launch: none, some, all.
    "stale": f"""CASE e.kind WHEN 'train' THEN CASE
        WHEN {START_VERSION} - e.newest > {MAX_STALENESS} THEN 'all'
        WHEN {START_VERSION} - e.oldest > {MAX_STALENESS} THEN 'some'
        WHEN {START_VERSION} - e.oldest <= {MAX_STALENESS} THEN 'none' END END""",
}
FACETS = {
    "kind": "kind",
    "state": "state",
    "reason": "reason",
    "end": "end",
    "score": "score",
    "failed_tool": "first failed tool",
    "agent": "agent",
    "mode": "mode",
    "source": "source",
    "stale": "tokens masked because of age",
}
NEWEST_FIRST = "e.group_id DESC, e.step DESC, e.member, e.uid"  # held-out episodes last
# The order for a finished run: unfinished episodes come last, because they hold nothing to read.
FINISHED_FIRST = f"e.state IN ('pending', 'running'), {NEWEST_FIRST}"
FROM_TABLES = """FROM episodes e LEFT JOIN questions q ON q.group_id = e.group_id
    LEFT JOIN answers a ON a.uid = e.uid"""
# Names of the reward components of the newest episodes.
COMPONENT_NAMES = """SELECT DISTINCT key FROM (
    SELECT components FROM episodes WHERE components IS NOT NULL ORDER BY group_id DESC LIMIT ?) AS e,
    json_each(e.components) WHERE instr(key, '"') = 0 LIMIT ?"""
TOOL_STATISTICS = """WITH called AS (
    SELECT tool, seconds, failed, refused, row_number() OVER (PARTITION BY tool ORDER BY seconds) AS place,
        count(*) OVER (PARTITION BY tool) AS n
    FROM calls WHERE {where})
SELECT tool, n, sum(failed), sum(refused), max(CASE WHEN place = (n + 1) / 2 THEN seconds END),
    max(CASE WHEN place = (19 * n + 19) / 20 THEN seconds END)
FROM called GROUP BY tool ORDER BY n DESC, tool"""

Value = str | int | float | None
Operator = Literal["=", ">=", "<=", "begins"]
_conditions = msgspec.json.Decoder(list[tuple[str, Operator, Value | tuple[Value, Value]]])


class Clause(msgspec.Struct, frozen=True):
    """A part of a statement, with values. `column`: the column that "=" compares, if there is a facet for the
    column."""

    text: str
    values: tuple[Value, ...] = ()
    column: str = ""


class Listing(msgspec.Struct, frozen=True):
    """The wanted episodes. `search`: words of question, answer or truth, or of a transcript."""

    clauses: tuple[Clause, ...] = ()
    order: str = NEWEST_FIRST
    start: int = 0
    search: tuple[str, ...] = ()

    @classmethod
    def of(cls, where: str, order: str, start: str, search: str) -> Listing:
        """Parse the parameters of an address; '' where a parameter is missing. ConfigError."""
        try:
            conditions = _conditions.decode(where or "[]")
        except UNDECODABLE as error:
            raise ConfigError(
                f"episodes: where: {one_line(error)}; write a list of [column, operator, value]"
            ) from None

        if start and not (start.isdecimal() and len(start) < 10):
            raise ConfigError(f"episodes: start={start}: use a non-negative integer")

        sort = NEWEST_FIRST
        if sort_column := order.removeprefix("-"):
            direction = " DESC" if order.startswith("-") else ""
            sort = f"{column_expression(sort_column)}{direction} NULLS LAST, {NEWEST_FIRST}"

        search_words = tuple(search.split())[:MAX_SEARCH_WORDS]
        return cls(tuple(_clauses(conditions)), sort, int(start or 0), search_words)

    def where(self, found_uids: Sequence[str] = (), facets: bool = True) -> Clause:
        """Return all conditions as a single clause, or only the conditions without a facet. `found_uids`:
        episodes whose transcripts contain the words of `search`."""
        clauses = [clause for clause in self.clauses if facets or not clause.column]
        word_conditions = " AND ".join(
            f"({' OR '.join(f'{COLUMNS[name]} LIKE ? ESCAPE ?' for name in TEXTS)})" for _ in self.search
        )
        if word_conditions:
            like_values = [
                like_value
                for word in self.search
                for like_value in (f"%{word.translate(LIKE_ESCAPES)}%", "\\") * len(TEXTS)
            ]
            uid_condition = f" OR e.uid IN ({','.join('?' * len(found_uids))})" if found_uids else ""
            clauses.append(Clause(f"({word_conditions}{uid_condition})", (*like_values, *found_uids)))

        return Clause(
            " AND ".join(clause.text for clause in clauses) or "1",
            tuple(value for clause in clauses for value in clause.values),
        )


def column_expression(name: str) -> str:
    """Return the SQL expression of a column. ConfigError for an unknown column."""
    if name.startswith(COMPONENT_PREFIX) and '"' not in name:
        return "e.components ->> '$.\"{}\"'".format(name.removeprefix(COMPONENT_PREFIX).replace("'", "''"))
    if name not in COLUMNS:
        raise ConfigError(
            f"episodes: unknown column {name!r}; the columns are {', '.join(COLUMNS)}, {COMPONENT_PREFIX}NAME"
        )
    return COLUMNS[name]


def _clauses(conditions: Sequence[tuple[str, Operator, Any]]) -> list[Clause]:
    """Return a clause for each column with "=" or `begins`, and a clause for each further condition.
    ConfigError."""
    equal_clauses = defaultdict[str, list[Clause]](list)
    clauses = list[Clause]()
    for name, operator, value in conditions:
        expression = "" if name == CALLED_TOOL else column_expression(name)
        if name == CALLED_TOOL:
            text = "e.uid IN (SELECT uid FROM calls WHERE tool IS ?)"
            equal_clauses[name].append(Clause(text, (_comparable_value(value),)))
        elif operator == "begins":
            beginning = str(_comparable_value(value)).translate(LIKE_ESCAPES)
            equal_clauses[name].append(Clause(f"{expression} LIKE ? ESCAPE '\\'", (f"{beginning}%",)))
        elif operator != "=":
            clauses.append(Clause(f"{expression} {operator} ?", (_comparable_value(value),)))
        elif isinstance(value, tuple):
            range_ends = [
                (end, sign) for end, sign in zip(value, (">=", "<"), strict=True) if end is not None
            ]
            text = (
                " AND ".join(f"{expression} {sign} ?" for _, sign in range_ends)
                or f"{expression} IS NOT NULL"
            )
            equal_clauses[name].append(
                Clause(f"({text})", tuple(_comparable_value(end) for end, _ in range_ends))
            )
        else:
            equal_clauses[name].append(Clause(f"{expression} IS ?", (_comparable_value(value),)))

    for name, alternatives in equal_clauses.items():
        text = " OR ".join(clause.text for clause in alternatives)
        values = [clause_value for clause in alternatives for clause_value in clause.values]
        has_facet = name in FACETS or name.startswith(COMPONENT_PREFIX)
        clauses.append(Clause(f"({text})", tuple(values), name if has_facet else ""))

    return clauses


def _comparable_value(value: Any) -> Value:
    if isinstance(value, tuple) or (isinstance(value, int) and abs(value) >= 1 << 63):
        raise ConfigError(f"episodes: where: cannot compare with {value}; use a smaller number or a string")
    comparable: Value = value
    return comparable


def episode_page(reader: RunReader, listing: Listing, found_uids: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return the PAGE_SIZE episodes from `start` on."""
    where = listing.where(found_uids)
    columns = ", ".join([*COLUMNS.values(), "e.components"])
    # Two queries in one: sorting all episodes must not read the long texts.
    page_uids = (
        f"SELECT e.uid {FROM_TABLES} WHERE {where.text} ORDER BY {listing.order} LIMIT {PAGE_SIZE} OFFSET ?"
    )
    query = f"SELECT {columns} {FROM_TABLES} WHERE e.uid IN ({page_uids}) ORDER BY {listing.order}"

    return [
        dict(zip(COLUMNS, values, strict=True))
        | {"components": msgspec.json.decode(components) if components else {}}
        for *values, components in reader.rows(query, *where.values, listing.start)
    ]


def matching_episodes(reader: RunReader, listing: Listing) -> list[tuple[str, int]]:
    """Return all matching episodes, `search` left out, in order, with the numbers of turns."""
    where = msgspec.structs.replace(listing, search=()).where()
    return reader.rows(
        f"SELECT e.uid, e.turns {FROM_TABLES} WHERE {where.text} ORDER BY {listing.order}", *where.values
    )


class Facet(msgspec.Struct):
    """A column whose values are counted. `value_labels`: for each number that `expression` returns, the value
    in a condition and the label; None: the expression returns the value itself."""

    column: str
    label: str
    expression: str
    value_labels: list[tuple[Any, str]] | None = None


def count_facets(
    reader: RunReader, listing: Listing, found_uids: Sequence[str] = ()
) -> tuple[int, list[dict[str, Any]]]:
    """Return the number of matching episodes, and for each facet the values with counts: of the episodes that
    meet all conditions except the conditions on the facet."""
    facets = [_facet(reader, name, label) for name, label in FACETS.items()]
    component_rows = reader.rows(COMPONENT_NAMES, SCANNED_EPISODES, MAX_COMPONENT_FACETS)
    facets += [_facet(reader, f"{COMPONENT_PREFIX}{name}", name) for (name,) in component_rows]
    facet_clauses = [clause for clause in listing.clauses if clause.column]
    where = listing.where(found_uids, facets=False)
    columns = ", ".join([*(facet.expression for facet in facets), *(clause.text for clause in facet_clauses)])
    values = [value for clause in facet_clauses for value in clause.values]
    group_columns = ",".join(
        str(column_index + 2) for column_index in range(len(facets) + len(facet_clauses))
    )
    query = f"SELECT count(*), {columns} {FROM_TABLES} WHERE {where.text} GROUP BY {group_columns}"

    # An episode counts for a facet if at most the facet's own condition is missed.
    total = 0
    value_counts = [Counter[Any]() for _ in facets]
    for count, *row_values in reader.rows(query, *values, *where.values):
        missed_columns = {
            clause.column
            for clause, fits in zip(facet_clauses, row_values[len(facets) :], strict=True)
            if not fits
        }
        total += 0 if missed_columns else count
        for facet, counter, value in zip(facets, value_counts, row_values, strict=False):
            if missed_columns <= {facet.column}:
                counter[value] += count

    # Facets without any known value are left out.
    answers: list[dict[str, Any]] = []
    for facet, counter in zip(facets, value_counts, strict=True):
        facet_values = _facet_values(facet, counter)
        if any(value["value"] not in ("", None) for value in facet_values):
            answers.append({"column": facet.column, "label": facet.label, "values": facet_values})
    return total, answers


def _facet_values(facet: Facet, value_counts: Counter[Any]) -> list[dict[str, Any]]:
    if facet.value_labels is not None:
        labelled_counts = [
            (*facet.value_labels[position], value_counts[position])
            for position in sorted(position for position in value_counts if position is not None)
        ]
        return [{"value": value, "label": label, "count": count} for value, label, count in labelled_counts]

    common_values = value_counts.most_common(MAX_FACET_VALUES)
    labels = {"": "none", None: "unknown", "landed": "ended"}
    return [{"value": value, "label": labels.get(value, value), "count": n} for value, n in common_values]


def _facet(reader: RunReader, name: str, label: str) -> Facet:
    """Make a facet: numbers with few values are counted by value, all further numbers in ranges."""
    expression = column_expression(name)
    if name != "score" and name in FACETS:
        return Facet(name, label, expression)

    distinct_rows = reader.rows(
        f"SELECT DISTINCT {expression} FROM episodes e WHERE {expression} IS NOT NULL "
        f"LIMIT {MAX_DISTINCT + 1}"
    )
    distinct_values = sorted(value for (value,) in distinct_rows if isinstance(value, int | float))
    if len(distinct_values) <= MAX_DISTINCT:
        cases = " ".join(f"WHEN {value!r} THEN {position}" for position, value in enumerate(distinct_values))
        values: list[tuple[Any, str]] = [(value, f"{value:g}") for value in distinct_values]
        return Facet(name, label, f"CASE {expression} {cases or 'WHEN NULL THEN 0'} END", values)

    ((low, high),) = reader.rows(f"SELECT min({expression}), max({expression}) FROM episodes e")
    edges = _range_edges(low, high)
    cases = " ".join(f"WHEN {expression} < {edge!r} THEN {position}" for position, edge in enumerate(edges))
    ranges: list[tuple[Any, str]] = [
        ([start, end], _range_label(start, end)) for start, end in pairwise([None, *edges, None])
    ]
    range_expression = f"CASE WHEN {expression} IS NULL THEN NULL {cases} ELSE {len(edges)} END"
    return Facet(name, label, range_expression, ranges)


def _range_label(start: float | None, end: float | None) -> str:
    if start is None:
        return f"under {end:g}"
    if end is None:
        return f"{start:g} or more"
    return f"{start:g} to {end:g}"


def _range_edges(low: float, high: float) -> list[float]:
    """Return about four round numbers between `low` and `high`."""
    raw_width = (high - low) / 5
    unit = 10 ** math.floor(math.log10(raw_width))
    width = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= raw_width)
    first_multiple = math.floor(low / width) + 1
    return [
        multiple * width for multiple in range(first_multiple, first_multiple + 6) if multiple * width < high
    ]


def tool_statistics(reader: RunReader, listing: Listing) -> list[dict[str, Any]]:
    """Return statistics of the tool calls in the matching episodes."""
    where = listing.where()
    is_unfiltered = not (listing.clauses or listing.search)
    call_condition = "1" if is_unfiltered else f"uid IN (SELECT e.uid {FROM_TABLES} WHERE {where.text})"
    names = ("tool", "calls", "failed", "refused", "p50", "p95")
    statistics = [
        dict(zip(names, row, strict=True))
        for row in reader.rows(TOOL_STATISTICS.format(where=call_condition), *where.values)
    ]
    query = f"""SELECT tool, error, count(*) AS n FROM calls WHERE error <> '' AND {call_condition}
        GROUP BY tool, error ORDER BY n"""
    errors = {tool: (error, count) for tool, error, count in reader.rows(query, *where.values)}
    for tool_row in statistics:
        tool_row["error"], tool_row["errors"] = errors.get(tool_row["tool"], ("", 0))

    return statistics
