"""Gives every answer that the page asks for, from the files of runs, which may still go on. Nothing is
written; tokenizers are kept in memory, and of some runs the metrics and the spans of the timelines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import msgspec

from asyncrl.config import RunConfig, parse
from asyncrl.data.run_images import RunImages, open_data_images
from asyncrl.data.storage import StoredImages
from asyncrl.errors import AsyncrlError, ConfigError
from asyncrl.observe.columns import MetricColumns
from asyncrl.observe.files import metrics_size, read_status
from asyncrl.observe.metrics import known_charts
from asyncrl.store import listing
from asyncrl.store.launches import Tree, differences, launch_at, launches_of
from asyncrl.store.listing import Listing
from asyncrl.store.reader import RunReader
from asyncrl.viewer.compare import compare
from asyncrl.viewer.episodes import image_url, load_decoder, masked_fraction, search, transcript
from asyncrl.viewer.lanes import LaneReader
from asyncrl.viewer.overview import overview
from asyncrl.viewer.series import curve_series, run_marks

Query = Mapping[str, str]
RunIdentity = tuple[Path, bytes]  # a run directory, and the content of the file `started`
Step = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
MAX_LANE_READERS = 2  # runs whose timelines are in memory: 100 MB for a million spans
# Size of the metrics files whose content is cached, a fifth of it in memory; further files are read again.
KEPT_METRIC_BYTES = 128 << 20


class Views:
    """Answers questions about several runs, which a query names by number: `run=0`. `outcome_of` says how a
    run ended, '' while the run goes on. Each of `names` is for a single thread at a time."""

    def __init__(self, runs: Sequence[Path], outcome_of: Callable[[Path], str]) -> None:
        self._runs = list(dict.fromkeys(runs))
        self._outcome_of = outcome_of
        names = [path.absolute().name for path in self._runs]
        self._run_names = names if len({*names}) == len(names) else [*map(str, self._runs)]
        self._load_decoder = lru_cache(load_decoder)
        self._lane_readers = dict[RunIdentity, LaneReader]()
        self._metric_columns = dict[RunIdentity, MetricColumns]()
        self._data_images: tuple[RunIdentity, list[StoredImages]] | None = None  # of the run shown last
        self._views: dict[str, Callable[[Query], Any]] = {
            "runs": self._list_runs,
            "rows": self._rows,
            "episodes": self._episodes,
            "episode": self._episode,
            "image": self._image,
            "tools": self._tools,
            "lanes": self._lanes,
            "compare": self._compare,
            "overview": lambda query: overview(path := self._run_path(query), self._outcome_of(path)),
        }
        self.names = tuple(self._views)

    def answer(self, name: str, query: Query) -> Any:
        """Return an answer as JSON. AsyncrlError says why there is none."""
        with ConfigError.instead_of(OSError, text=f"{name} cannot be read"):
            return self._views[name](query)

    def _list_runs(self, query: Query) -> dict[str, Any]:
        """Return the state of each run, and the differences between configurations."""
        configs = [_newest_config(path) for path in self._runs]
        key_differences = differences([config for config in configs if config])
        for deleted_run in (run_index for run_index, config in enumerate(configs) if not config):
            for values in key_differences.values():
                values.insert(deleted_run, None)

        runs = []
        for path, name in zip(self._runs, self._run_names, strict=True):
            status = read_status(path)
            outcome = self._outcome_of(path)
            step, total_steps, seconds = (status.get(key, 0) for key in ("step", "total_steps", "seconds"))
            runs.append(
                {
                    "name": name,
                    "path": str(path),
                    "ended": outcome,
                    "phase": status.get("phase", "starting"),
                    "step": step,
                    "total_steps": total_steps,
                    "seconds": seconds,
                    "eta": (total_steps - step) * seconds / step if step and not outcome else None,
                    "rows": metrics_size(path),
                }
            )
        return {"runs": runs, "differences": key_differences}

    def _rows(self, query: Query) -> dict[str, Any]:
        """Return the curves of a run; of a stretch, by step, seconds or tokens."""
        path = self._run_path(query)
        since = _query_number(query, "from")
        until = _query_number(query, "to")
        run_identity = _run_identity(path)
        columns = self._metric_columns.pop(run_identity, None) or MetricColumns(path / "metrics.jsonl")
        while sum(measured.bytes_read for measured in self._metric_columns.values()) > KEPT_METRIC_BYTES:
            del self._metric_columns[next(iter(self._metric_columns))]
        columns.update()
        self._metric_columns[run_identity] = columns  # last in order: the first is dropped first
        chart_groups = list(known_charts(*columns.metric_names()))
        curves = curve_series(columns, query.get("by", ""), since, until)

        return curves | {"charts": chart_groups, "marks": run_marks(path, columns)}

    def _compare(self, query: Query) -> dict[str, Any]:
        run_paths = [self._run_path({"run": query.get(key, "0")}) for key in ("a", "b")]
        return compare(run_paths, [_query_number(query, key, Step) for key in ("from", "to")])

    def _episodes(self, query: Query) -> dict[str, Any]:
        listed = Listing.of(*(query.get(key, "") for key in ("where", "order", "start", "search")))
        found_uids = list[str]()
        search_report = None
        decode = None
        path = self._run_path(query)
        if listed.order == listing.NEWEST_FIRST and self._outcome_of(path):
            listed = msgspec.structs.replace(listed, order=listing.FINISHED_FIRST)
        with closing(RunReader.open(path)) as reader:
            if listed.search:
                with suppress(AsyncrlError):  # without a decoder only the texts of tools are searched
                    decode = self._load_decoder(_run_config(path).model.path)
                matching_episodes = listing.matching_episodes(reader, listed)
                found_uids, read_count = search(reader, matching_episodes, listed.search, decode)
                search_report = {"transcripts": read_count, "of": len(matching_episodes)}

            episode_count, facets = listing.count_facets(reader, listed, found_uids)
            shown_episodes = listing.episode_page(reader, listed, found_uids)
            for episode in (episode for episode in shown_episodes if episode["stale"] == "some"):
                episode["masked"] = masked_fraction(reader, episode, _run_config(path).buffer.max_staleness)

        answer = {"episodes": shown_episodes, "total": episode_count, "start": listed.start}
        return answer | {"searched": search_report, "facets": facets}

    def _tools(self, query: Query) -> list[dict[str, Any]]:
        """Return statistics of the tools, in the matching episodes."""
        with closing(RunReader.open(self._run_path(query))) as reader:
            return listing.tool_statistics(reader, Listing.of(query.get("where", ""), "", "", ""))

    def _episode(self, query: Query) -> dict[str, Any]:
        path = self._run_path(query)
        uid = query.get("uid", "")
        with closing(RunReader.open(path)) as reader:
            config = _run_config(path, reader.episode(uid).step)
            uid_condition = msgspec.json.encode([("uid", "=", uid)]).decode()
            if not (episode_rows := listing.episode_page(reader, Listing.of(uid_condition, "", "", ""))):
                raise ConfigError(f"episode {uid}: not listed until the validation has finished")
            decode = self._load_decoder(config.model.path)
            return {"run": query.get("run", "0"), **transcript(path, config, reader, episode_rows[0], decode)}

    def _image(self, query: Query) -> dict[str, str]:
        """Return an image of the run's data or episodes, by digest."""
        path = self._run_path(query)
        run_identity = _run_identity(path)
        # A page asks for one image after another of the same run, whose data may have many.
        if self._data_images is None or self._data_images[0] != run_identity:
            self._data_images = run_identity, open_data_images(path)

        with closing(RunReader.open(path)) as reader:
            return {"url": image_url(RunImages(self._data_images[1], reader), query.get("digest", ""))}

    def _lanes(self, query: Query) -> dict[str, Any]:
        """Return the lanes of a window, in seconds since the start of the run, or around a step."""
        path = self._run_path(query)
        since = _query_number(query, "from")
        until = _query_number(query, "to")
        run_identity = _run_identity(path)
        lane_reader = self._lane_readers.pop(run_identity, None) or LaneReader(path)
        self._lane_readers[run_identity] = lane_reader
        for oldest_identity in list(self._lane_readers)[:-MAX_LANE_READERS]:
            del self._lane_readers[oldest_identity]

        return lane_reader.window(since, until, _query_number(query, "step", Step))

    def _run_path(self, query: Query) -> Path:
        path_by_number = {str(number): run for number, run in enumerate(self._runs)}
        if (number := query.get("run", "0")) not in path_by_number:
            raise ConfigError(f"run={number[:9]}: use a number from 0 to {len(path_by_number) - 1}")
        return path_by_number[number]


def _newest_config(run_dir: Path) -> Tree:
    """Return the newest configuration; {} for a run that was deleted, or is of another version."""
    with suppress(AsyncrlError):
        return launch_at(launches_of(run_dir), 0).config
    return {}


def _run_config(run_dir: Path, step: int = 0) -> RunConfig:
    """Return the configuration of the launch that trained a step; the newest configuration without a step."""
    return parse(launch_at(launches_of(run_dir), step).config)


def _query_number(query: Query, key: str, kind: Any = float) -> Any:
    """Return a number of a query, or None."""
    with ConfigError.instead_of(msgspec.DecodeError, text=f"{key}={query.get(key)}: expected a number"):
        return msgspec.json.decode(query[key], type=kind) if key in query else None


def _run_identity(run_dir: Path) -> RunIdentity:
    start_file = run_dir / "started"
    return run_dir, start_file.read_bytes() if start_file.exists() else b""
