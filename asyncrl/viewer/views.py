"""Gives every answer that the page asks for, from the files of runs, which may be under way. Nothing is
written; kept in memory are tokenizers, and of some runs their metrics and the spans of their timelines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import msgspec

from asyncrl.config import RunConfig, parse
from asyncrl.errors import AsyncrlError, ConfigError
from asyncrl.observe.columns import Measured
from asyncrl.observe.files import read_status, size_of_rows
from asyncrl.observe.metrics import charts
from asyncrl.store import listing
from asyncrl.store.launches import Tree, at, differences, launches_of
from asyncrl.store.listing import Listing
from asyncrl.store.reader import RunReader
from asyncrl.viewer.compare import compare
from asyncrl.viewer.episodes import decoder, masked_share, search, transcript
from asyncrl.viewer.lanes import LaneReader
from asyncrl.viewer.overview import overview
from asyncrl.viewer.series import marks, series

Query = Mapping[str, str]
Begun = tuple[Path, bytes]  # a run directory, and which run was begun there
Step = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
MOST_LANES = 2  # runs whose timelines are in memory: 100 MB for a million spans
KEPT = 128 << 20  # bytes of files of metrics of other runs, a fifth of it in memory; more are read again


class Views:
    """Answers questions about several runs, which a query names by number: `run=0`. `ended` says how a run
    ended, '' while it goes on. Each of `names` is for one thread at a time."""

    def __init__(self, runs: Sequence[Path], ended: Callable[[Path], str]) -> None:
        self._runs = list(dict.fromkeys(runs))
        self._ended = ended
        names = [path.absolute().name for path in self._runs]
        self._names = names if len({*names}) == len(names) else [*map(str, self._runs)]
        self._decoder = lru_cache(decoder)
        self._lanes_of = dict[Begun, LaneReader]()
        self._columns = dict[Begun, Measured]()
        self._views: dict[str, Callable[[Query], Any]] = {
            "runs": self._list,
            "rows": self._rows,
            "episodes": self._episodes,
            "episode": self._episode,
            "tools": self._tools,
            "lanes": self._lanes,
            "compare": self._compare,
            "overview": lambda query: overview(path := self._path(query), self._ended(path)),
        }
        self.names = tuple(self._views)

    def answer(self, name: str, query: Query) -> Any:
        """Return an answer as JSON. AsyncrlError says why there is none."""
        with ConfigError.instead_of(OSError, text=f"{name} cannot be read"):
            return self._views[name](query)

    def _list(self, query: Query) -> dict[str, Any]:
        """Say what the runs are doing, and how their configurations differ."""
        trees = [*map(_tree, self._runs)]
        found = differences([tree for tree in trees if tree])
        for number in (place for place, tree in enumerate(trees) if not tree):
            for values in found.values():
                values.insert(number, None)
        return {"runs": [*map(self._run, self._runs, self._names)], "differences": found}

    def _run(self, path: Path, name: str) -> dict[str, Any]:
        status = read_status(path)
        ended = self._ended(path)
        done, total, seconds = (status.get(key, 0) for key in ("step", "total_steps", "seconds"))
        return {
            "name": name,
            "path": str(path),
            "ended": ended,
            "phase": status.get("phase", "starting"),
            "step": done,
            "total_steps": total,
            "seconds": seconds,
            "eta": (total - done) * seconds / done if done and not ended else None,
            "rows": size_of_rows(path),
        }

    def _rows(self, query: Query) -> dict[str, Any]:
        """Return the curves of a run; of a stretch, by step, seconds or tokens."""
        path = self._path(query)
        since = _given(query, "from")
        until = _given(query, "to")
        begun = _begun(path)
        columns = self._columns.pop(begun, None) or Measured(path / "metrics.jsonl")
        while sum(one.read for one in self._columns.values()) > KEPT:
            del self._columns[next(iter(self._columns))]
        columns.update()
        self._columns[begun] = columns  # the newest one
        drawn = list(charts(*columns.known()))
        found = series(columns, query.get("by", ""), since, until)
        return found | {"charts": drawn, "marks": marks(path, columns)}

    def _compare(self, query: Query) -> dict[str, Any]:
        sides = self._path({"run": query.get("a", "0")}), self._path({"run": query.get("b", "0")})
        return compare(sides, [_given(query, key, Step) for key in ("from", "to")])

    def _episodes(self, query: Query) -> dict[str, Any]:
        wanted = Listing.of(*(query.get(key, "") for key in ("where", "order", "start", "search")))
        found = list[str]()
        searched = None
        decode = None
        path = self._path(query)
        if wanted.order == listing.NEWEST and self._ended(path):
            wanted = msgspec.structs.replace(wanted, order=listing.NEWEST_OVER)
        with closing(RunReader.open(path)) as reader:
            if wanted.search:
                with suppress(AsyncrlError):  # else what the tools said is searched
                    decode = self._decoder(_config(path).model.path)
                fit = listing.uids(reader, wanted)
                found, looked = search(reader, fit, wanted.search, decode)
                searched = {"transcripts": looked, "of": len(fit)}
            total, facets = listing.facets(reader, wanted, found)
            shown = listing.page(reader, wanted, found)
            for one in (one for one in shown if one["stale"] == "some"):
                one["masked"] = masked_share(reader, one, _config(path).buffer.max_staleness)
        answer = {"episodes": shown, "total": total, "start": wanted.start}
        return answer | {"searched": searched, "facets": facets}

    def _tools(self, query: Query) -> list[dict[str, Any]]:
        """Say what the tools did, in the episodes that fit."""
        with closing(RunReader.open(self._path(query))) as reader:
            return listing.tools(reader, Listing.of(query.get("where", ""), "", "", ""))

    def _episode(self, query: Query) -> dict[str, Any]:
        path = self._path(query)
        uid = query.get("uid", "")
        with closing(RunReader.open(path)) as reader:
            config = _config(path, reader.episode(uid).step + 1)
            which = msgspec.json.encode([("uid", "=", uid)]).decode()
            if not (listed := listing.page(reader, Listing.of(which, "", "", ""))):
                raise ConfigError(f"episode {uid}: its validation is under way; it is listed once it is over")
            return transcript(path, config, reader, listed[0], self._decoder(config.model.path))

    def _lanes(self, query: Query) -> dict[str, Any]:
        """Return the lanes of a window, in seconds since the start of the run, or around a step."""
        path = self._path(query)
        since = _given(query, "from")
        until = _given(query, "to")
        begun = _begun(path)
        lanes = self._lanes_of.pop(begun, None) or LaneReader(path)
        self._lanes_of[begun] = lanes
        for other in list(self._lanes_of)[:-MOST_LANES]:
            del self._lanes_of[other]
        return lanes.window(since, until, _given(query, "step", Step))

    def _path(self, query: Query) -> Path:
        known = {str(number): run for number, run in enumerate(self._runs)}
        if (number := query.get("run", "0")) not in known:
            raise ConfigError(f"run={number[:9]}: there are {len(known)} runs, counted from 0")
        return known[number]


def _tree(run_dir: Path) -> Tree:
    """Return the newest configuration; {} of a run that was deleted, or is of another version."""
    with suppress(AsyncrlError):
        return at(launches_of(run_dir), 0).config
    return {}


def _config(run_dir: Path, step: int = 0) -> RunConfig:
    """Return the configuration of the launch that trained a step; the newest one without a step."""
    return parse(at(launches_of(run_dir), step).config)


def _given(query: Query, key: str, kind: Any = float) -> Any:
    """Return a number of a query, or None."""
    with ConfigError.instead_of(msgspec.DecodeError, text=f"{key}={query.get(key)}: give a number"):
        return msgspec.json.decode(query[key], type=kind) if key in query else None


def _begun(run_dir: Path) -> Begun:
    began = run_dir / "started"
    return run_dir, began.read_bytes() if began.exists() else b""
