"""Reads and writes the result files of a run: metrics as JSON lines, the summary, the status and logs."""

from __future__ import annotations

import datetime
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.errors import UNDECODABLE, ConfigError, one_line

MAX_LOG_BYTES = 64 << 20  # a longer log is cut
LOG_EDGE_BYTES = 1 << 20  # bytes kept of the beginning and of the end of a cut log
VALIDATION_KEY = b'"val-'  # begins a key in rows of validations
MAX_LINE_BYTES = 4 << 20  # longest line of JSON, in bytes
MAX_ADDED_BYTES = 8 << 20  # most bytes of metrics.jsonl that are read at once
MAX_TAIL_BYTES = 64 << 10  # most bytes read from the end of a log
MAX_TAIL_LINES = 2000  # most lines read from the end of a log

# What a log is made of: events (launch/role.py), tracebacks, those of a group indented by a margin, and the
# last words of the interpreter and of C++.
_RECORD = re.compile(r"[\d:.]+ (?P<level>[A-Z]+) \S+: (?P<message>.*)")
_MARGIN = re.compile(r"^(?:\s+[|+](?:-+)? ?)*")
_TRACEBACK = ("Traceback (most recent", "Exception Group Traceback")
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(: .*)?$")
_ERROR_LEVELS = ("ERROR", "CRITICAL")
# Exceptions that end no process. Python writes those of exit handlers after the crash itself.
_NONFATAL = ("Exception ignored in", "Exception in thread")
_START_LINE = re.compile(r"(?:^|\n).* starts, pid ")
_CRASH = re.compile(r"[\d:.]+ ERROR asyncrl\.launch: \S+ crashed$")  # launch/role.py
_WATCHDOG = re.compile(r"Watchdog caught collective operation timeout: .*")  # of NCCL, in torch
_CHAINED = ("During handling of the above", "The above exception was")
_FATAL = ("Fatal Python error: ", "terminate called ")
ID_BYTES = 10  # as hex digits: an id that wandb and swanlab take


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Read the objects of a JSON-lines file, none without a file; lines cut by a crash are skipped."""
    with suppress(FileNotFoundError), path.open(errors="replace", newline="\n") as file:
        for line in file:
            with suppress(json.JSONDecodeError):
                if isinstance(row := json.loads(line), dict):
                    yield row


def read_rows(run_dir: Path) -> list[dict[str, float]]:
    """Read the metrics rows of a run so far."""
    return list(read_lines(run_dir / "metrics.jsonl"))


def read_added_rows(run_dir: Path, start: int) -> tuple[list[dict[str, float]], int]:
    """Read whole metrics rows from byte `start` on, of at most MAX_ADDED_BYTES, and return them with the byte
    behind the last one. No rows of a file that is missing or cannot be read; lines cut by a crash are
    skipped."""
    try:
        with (run_dir / "metrics.jsonl").open("rb") as file:
            file.seek(start)
            content = file.read(MAX_ADDED_BYTES)
    except OSError:
        return [], start

    content = content[: content.rfind(b"\n") + 1]
    rows: list[dict[str, float]] = []
    for line in content.splitlines():
        with suppress(ValueError):
            if isinstance(row := json.loads(line), dict):
                rows.append(row)
    return rows, start + len(content)


def read_some_rows(run_dir: Path, edge: int, max_rows: int) -> list[dict[str, float]]:
    """Read the first and the last `edge` steps, all validations, and evenly chosen further steps: in a long
    run about `max_rows`, since 50,000 steps are 150 MB or more."""
    rows = list[dict[str, float]]()
    step = 0

    with suppress(FileNotFoundError), (run_dir / "metrics.jsonl").open("rb") as file:
        steps = sum(VALIDATION_KEY not in line for line in file)
        file.seek(0)

        for line in file:
            is_validation = VALIDATION_KEY in line
            step += not is_validation
            if is_validation or step <= edge or step > steps - edge or step % (steps // max_rows or 1) == 0:
                with suppress(ValueError):
                    rows.append(json.loads(line))

    return rows


class LineFile:
    """Appends whole JSON lines to a file. The rest of a line that a crash cut is removed when the file is
    opened, the rest of a line that a full disk cut at once."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a+b", buffering=0)
        if ends_in_a_line(path):
            return

        size = self._file.seek(0, os.SEEK_END)
        self._file.seek(max(0, size - MAX_LINE_BYTES))
        last_line = self._file.read().rpartition(b"\n")[2]
        with suppress(ValueError):
            if isinstance(json.loads(last_line), dict):
                self.append(b"\n")  # only the line's end is missing
                return
        self._file.truncate(size - len(last_line))

    def append(self, lines: bytes) -> None:
        """Append all of these lines, or raise OSError and append none."""
        size = self._file.seek(0, os.SEEK_END)
        try:
            while lines:
                lines = lines[self._file.write(lines) :]
        except OSError:
            with suppress(OSError):
                self._file.truncate(size)

            raise

    def close(self) -> None:
        self._file.close()


def ends_in_a_line(path: Path) -> bool:
    """Return False if the last line of a file was cut off by a crash."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
    return True  # there is no file, or no line


def metrics_size(run_dir: Path) -> int:
    """Return the size of the metrics so far in bytes, which grows with each row."""
    path = run_dir / "metrics.jsonl"
    return path.stat().st_size if path.exists() else 0


def log_tail(path: Path, lines: int = 12) -> str:
    """Return the end of a log, for an error message; '' if there is no log."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - MAX_TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.rstrip().splitlines()[-lines:])


def cause_of_death(log: Path, incarnation: str, *, crashed: bool) -> str:
    """Return the line of a process's log that tells why the process ended: the last logged error, or the
    exception below the last traceback, whatever exit handlers wrote afterwards. Without either, the last
    line, unless that is an event of a run, which explains nothing. A `crashed` process has an error; any
    other process may have been killed long after an error, so events that follow show that the process lived
    on. A traceback below a warning is no cause."""
    text = log_tail(log, MAX_TAIL_LINES)
    _, marker, text_after_marker = text.rpartition(f"incarnation {incarnation}")

    # A process that ended before it wrote its marker is the newest one.
    own_text = _START_LINE.split(text_after_marker)[0] if marker else _START_LINE.split(text)[-1]
    if timeout := _WATCHDOG.search(own_text):  # a watchdog ends the process, with many more lines
        return f"a collective operation among the trainer ranks timed out: {timeout[0]}"

    lines = own_text.rstrip().splitlines()
    cause = ""
    cause_was_logged = False  # True: the cause belongs to a logged error
    crash_logged = False  # by launch/role.py: lines after the crash and its traceback are of exit handlers
    level = last_level = ""  # levels of the records that this traceback and the one before belong to
    in_traceback = is_of_warning = False

    for line in lines:
        message = _MARGIN.sub("", line)
        record = _RECORD.match(line)
        is_nonfatal = message.startswith(_NONFATAL)
        if crash_logged and (record or is_nonfatal):
            if marker:
                break

            crash_logged = False  # the crash was of the process before

        if record:
            level = record["level"]
            message = record["message"]
            in_traceback = is_of_warning = False
            crash_logged = _CRASH.match(line) is not None
            if level in _ERROR_LEVELS:
                cause = message
                cause_was_logged = True
            elif not crashed and (level == "INFO" or not cause_was_logged):
                cause = ""

        if is_nonfatal:
            level = "WARNING"
        elif message.startswith(_CHAINED):
            level = last_level
        elif message.startswith(_TRACEBACK):
            in_traceback = True
            is_of_warning = level == "WARNING"
        elif in_traceback and _EXCEPTION.match(message):
            in_traceback = False
            if not is_of_warning:
                cause = message
                cause_was_logged = level in _ERROR_LEVELS

            last_level = level
            level = ""  # a further traceback does not belong to this record
        elif line.startswith(_FATAL):
            cause = line

    if cause or not lines:
        return cause
    if is_of_warning and not crashed:
        return ""

    return "" if _RECORD.match(lines[-1]) else lines[-1]


def read_summary(run_dir: Path) -> dict[str, Any]:
    """Read the summary of a run, {} if there is none yet. ConfigError for an unreadable file."""
    return _read_object(run_dir / "summary.json")


def write_summary(run_dir: Path, summary: Mapping[str, Any]) -> None:
    """Replace the summary, whole or not at all."""
    replace_file(
        run_dir / "summary.json", msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n"
    )


def read_status(run_dir: Path) -> dict[str, Any]:
    """Read the coordinator's last status, with the `time` of writing; {} if there is none yet. After the
    launcher's end, `code` and `error` tell how the run ended. ConfigError for an unreadable file."""
    return _read_object(run_dir / "status.json")


def write_status(run_dir: Path, status: Mapping[str, Any]) -> None:
    """Replace the status. On a full disk only the status is lost."""
    with suppress(OSError):
        replace_file(run_dir / "status.json", msgspec.json.encode(status))


def _read_object(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return {}
    except (OSError, *UNDECODABLE) as error:
        raise ConfigError(f"{path}: cannot be read ({one_line(error)})") from None


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file, whole or not at all."""
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(content)
    temporary.replace(path)


def first_day(run_dir: Path) -> datetime.date:
    """Return the day on which a run began, as written by `mark_start`; today for an unmarked run."""
    try:
        return datetime.date.fromisoformat(read_start(run_dir).split()[0])
    except (ValueError, IndexError):
        return datetime.date.today()


def read_start(run_dir: Path) -> str:
    """Read the file of `mark_start`; '' if there is none."""
    try:
        return (run_dir / "started").read_text()
    except OSError:
        return ""


def run_id(run_dir: Path) -> str:
    """Return the id that `mark_start` gave a run; runs of the same name have different ids."""
    return (run_dir / "started").read_text().split()[1]


def mark_start(run_dir: Path) -> None:
    """Record the day and an id, unless an earlier start of the run did."""
    path = run_dir / "started"
    if not path.exists():
        replace_file(path, f"{datetime.date.today().isoformat()} {secrets.token_hex(ID_BYTES)}".encode())


def bound_log(path: Path) -> None:
    """Shorten a log of more than MAX_LOG_BYTES to the beginning and the end: a reward may print without end.
    The writer must open the log for appending, so that the next line goes to the new end."""
    with suppress(OSError), path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        if size <= MAX_LOG_BYTES:
            return

        file.seek(-LOG_EDGE_BYTES, os.SEEK_END)
        end = file.read(LOG_EDGE_BYTES)
        os.truncate(path, LOG_EDGE_BYTES)

        with path.open("ab") as log:
            log.write(b"\n[asyncrl: %d bytes were cut here]\n" % (size - 2 * LOG_EDGE_BYTES) + end)
