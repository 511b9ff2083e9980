"""Every answer that the page asks for, from the files of runs, which may be under way. Nothing is written;
kept in memory are tokenizers, and the spans of timelines."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config import parse
from asyncrl.errors import AsyncrlError, ConfigError, one_line
from asyncrl.observe.files import read_status, size_of_rows
from asyncrl.observe.metrics import OF_STEP, charts, figures
from asyncrl.observe.summary import flow_line
from asyncrl.store import listing
from asyncrl.store.launches import at, differences, launches_of
from asyncrl.store.listing import Listing
from asyncrl.store.reader import RunReader
from asyncrl.viewer.compare import compare, step_of
from asyncrl.viewer.episodes import Decode, decoder, search, transcript
from asyncrl.viewer.lanes import LaneReader
from asyncrl.viewer.overview import overview
from asyncrl.viewer.series import Measured, marks, series

Query = Mapping[str, str]
MOST_LANES = 2  # runs whose timelines are in memory
KEPT = 256 << 20  # bytes of files of metrics, a fifth of it in memory; those of other runs are read again


class Views:
    """Answers about several runs, which a query names by number: `run=0`. `ended` says how a run ended, ''
    while it goes on. Methods may be called from several threads."""

    def __init__(self, runs: Sequence[Path], ended: Callable[[Path], str]) -> None:
        self._runs, self._ended = list(dict.fromkeys(runs)), ended
        names = [path.resolve().name for path in self._runs]
        known = names if len({*names}) == len(names) else map(str, self._runs)
        self._names = dict(zip(self._runs, known, strict=True))
        self._decoders: dict[str, Decode] = {}
        self._found: tuple[Path, tuple[str, ...], list[str], dict[str, int]] | None = None  # by a search
        self._lanes_of: dict[Path, tuple[bytes, LaneReader]] = {}
        self._columns: dict[tuple[Path, bytes], Measured] = {}
        self._loading, self._reading, self._measuring = (threading.Lock() for _ in range(3))
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

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._views)

    def answer(self, name: str, query: Query) -> Any:
        """Return an answer as JSON. AsyncrlError says why there is none."""
        try:
            return self._views[name](query)
        except OSError as error:
            raise ConfigError(f"{name}: {one_line(error)}") from None

    def warm_up(self) -> None:
        """Read beforehand what takes seconds: a timeline of a million spans."""
        with suppress(AsyncrlError):
            self.answer("lanes", {})

    def _list(self, query: Query) -> dict[str, Any]:
        """Say what the runs are doing, and how their configurations differ."""
        return {
            "runs": [self._run(path) for path in self._runs],
            "differences": differences([at(launches_of(path), 0).config for path in self._runs]),
        }

    def _run(self, path: Path) -> dict[str, Any]:
        status, ended = read_status(path), self._ended(path)
        gauges = status.get("gauges", {})
        done, total, seconds = (status.get(key, 0) for key in ("step", "total_steps", "seconds"))
        return {
            "name": self._names[path],
            "path": str(path),
            "ended": ended,
            "phase": status.get("phase", "starting"),
            "step": done,
            "total_steps": total,
            "seconds": seconds,
            "eta": (total - done) * seconds / done if done and not ended else None,
            "flow": flow_line(gauges),
            "rows": size_of_rows(path),
            "waits": status.get("waits", []) if not ended else [],
            "failed": status.get("failed", ""),
            "alert": next((f"{one['name']}: {one['what']}" for one in status.get("alerts", [])), ""),
            "numbers": ", ".join(figures(OF_STEP, gauges | status.get("metrics", {}))),
        }

    def _rows(self, query: Query) -> dict[str, Any]:
        """Return the curves of a run; of a stretch, by step, seconds or tokens."""
        path = self._path(query)
        since, until = (_number("rows", query, key) for key in ("from", "to"))
        with self._measuring:
            key = path, _began(path)
            columns = self._columns.pop(key, None) or Measured(path / "metrics.jsonl")
            columns.update()
            self._columns[key] = columns  # the newest one, which stays
            while sum(one.read for one in self._columns.values()) > KEPT and len(self._columns) > 1:
                del self._columns[next(iter(self._columns))]
            drawn = msgspec.to_builtins(list(charts(*columns.known())))
            found = series(columns, query.get("by", ""), since, until)
            return found | {"charts": drawn, "marks": marks(path, columns)}

    def _compare(self, query: Query) -> dict[str, Any]:
        sides = self._path({"run": query.get("a", "0")}), self._path({"run": query.get("b", "0")})
        return compare(sides, [step_of(query.get(key, "")) for key in ("from", "to")])

    def _episodes(self, query: Query) -> dict[str, Any]:
        wanted = Listing.of(*(query.get(key, "") for key in ("where", "order", "start", "search")))
        with closing(RunReader.open(path := self._path(query))) as reader:
            found, searched = self._searched(path, reader, wanted)
            total, facets = listing.facets(reader, wanted, found)
            return {
                "episodes": listing.page(reader, wanted, found),
                "total": total,
                "start": wanted.start,
                "searched": searched,
                "facets": facets,
            }

    def _searched(
        self, path: Path, reader: RunReader, wanted: Listing
    ) -> tuple[list[str], dict[str, int] | None]:
        """The episodes in whose transcripts the words are, and how many were looked at."""
        if not wanted.search:
            return [], None
        if self._found is None or not wanted.start or self._found[:2] != (path, wanted.search):
            fit, decode = listing.uids(reader, wanted), None
            with suppress(AsyncrlError):  # else what the tools said is searched
                decode = self._decoder(parse(at(launches_of(path), 0).config).model.path)
            found, looked = search(reader, fit, wanted.search, decode)
            self._found = path, wanted.search, found, {"transcripts": looked, "of": len(fit)}
        return self._found[2:]

    def _tools(self, query: Query) -> list[dict[str, Any]]:
        """Say what the tools did, in the episodes that fit."""
        with closing(RunReader.open(self._path(query))) as reader:
            return listing.tools(reader, Listing.of(query.get("where", ""), "", "", ""))

    def _episode(self, query: Query) -> dict[str, Any]:
        path, uid = self._path(query), query.get("uid", "")
        with closing(RunReader.open(path)) as reader:
            step = reader.episode(uid).step + 1
            config = parse(at(launches_of(path), step).config)  # of the launch that trained it
            which = msgspec.json.encode([("uid", "=", uid)]).decode()
            if not (listed := listing.page(reader, Listing.of(which, "", "", ""))):
                raise ConfigError(f"episode {uid}: its validation is under way; it is listed once it is over")
            found = transcript(path, config, reader, uid, self._decoder(config.model.path))
            return found | {"listed": listed[0]}

    def _lanes(self, query: Query) -> dict[str, Any]:
        """Return the lanes of a window, in seconds since the start of the run."""
        path = self._path(query)
        since, until, step = (_number("lanes", query, key) for key in ("from", "to", "step"))
        with self._reading:
            began = _began(path)
            if path not in self._lanes_of or self._lanes_of[path][0] != began:
                self._lanes_of[path] = began, LaneReader(path)
            for other in list(self._lanes_of)[:-MOST_LANES]:
                del self._lanes_of[other]  # 100 MB for a million spans
            return self._lanes_of[path][1].window(since, until, None if step is None else int(step))

    def _decoder(self, model: str) -> Decode:
        with self._loading:
            if model not in self._decoders:
                self._decoders[model] = decoder(model)
            return self._decoders[model]

    def _path(self, query: Query) -> Path:
        number = query.get("run", "0")
        if not number.isdecimal() or int(number) >= len(self._runs):
            raise ConfigError(f"run={number}: there are {len(self._runs)} runs, counted from 0")
        return self._runs[int(number)]


def _number(view: str, query: Query, key: str) -> float | None:
    with suppress(ValueError):
        if key not in query or math.isfinite(float(query[key])):
            return float(query[key]) if key in query else None
    raise ConfigError(f"{view}: {key}={query[key]}: give a number")


def _began(run_dir: Path) -> bytes:
    """Return another mark once another run was begun in this directory."""
    path = run_dir / "started"
    return path.read_bytes() if path.exists() else b""
