"""Starts a launcher as a child process, and is the main program of that process.

The child has a session of its own, so that a Ctrl-C of the terminal reaches the caller alone. It reads one
request; the end of the pipe tells the child to stop, as SIGTERM does, so that a killed caller, a closed
notebook and `stop` end a run alike: with a checkpoint. A second SIGTERM kills the run's processes at once.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import signal
import site
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Literal

import msgspec

import asyncrl
from asyncrl.api.live_view import LineView, RunView, Show
from asyncrl.errors import AsyncrlError, ConfigError, one_line
from asyncrl.isolation.child import describe_exit, private_pipes, read_frame, write_frame
from asyncrl.registry import INSIDE_RUN, search_working_directory

POLL_SECONDS = 0.1  # Seconds between two looks at the child's output.
SIGNAL_SECONDS = 0.5  # Seconds between two signals to a launcher that is to be killed.
READ_SECONDS = 2.0  # Seconds for the last message of a launcher that has ended.
KILL_SECONDS = 10.0  # Seconds for a launcher to kill its processes; then it is killed itself.
# Seconds after `launch.stop_timeout` for a launcher to end; trackers have 60 s at the end of a run.
STOP_MARGIN_SECONDS = 90.0
TAIL_BYTES = 4096  # Bytes of a crashed launcher's output in the error.
DRY_RUN_REFUSED = "the dry run found the errors above"

PACKAGE_ROOT = os.path.realpath(Path(asyncrl.__file__).parents[1])


class LauncherRequest(msgspec.Struct, frozen=True):
    """What the child does. `values`: keys of the configuration by section, see `compose`. `saved_files`: the
    content's file, by the path within the run's directory. `model`, `runs`: of an evaluation, the model and
    the parent of run directories. `caller_draws`: the caller draws the live view, if `observe.console` lets
    it. `dry_run`: check everything and start nothing; files stay where they are."""

    command: Literal["train", "sft", "eval"]
    overrides: list[str] = []
    values: dict[str, Any] = {}
    saved_files: dict[str, str] = {}
    config_dir: str = ""
    model: str = ""
    runs: str = ""
    caller_draws: bool = False
    dry_run: bool = False


class LaunchStarted(msgspec.Struct, frozen=True, tag=True):
    """No check has refused the run; its processes start. `stop_timeout`: that of its launch, in seconds."""

    run_dir: str
    stop_timeout: float


class LaunchEnded(msgspec.Struct, frozen=True, tag=True):
    """The last message. `code`: as the exit code of the commands."""

    code: int
    error: str = ""
    run_dir: str = ""


# Made at the import, as msgspec crashes where two threads use a type for the first time.
MESSAGE_DECODER = msgspec.json.Decoder(LaunchStarted | LaunchEnded)


class RunError(AsyncrlError):
    """A run or an evaluation has failed after its start."""


class LauncherProcess:
    """A child process with a launcher, from the caller's side. Methods may be called in any thread."""

    def __init__(self, request: LauncherRequest) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 -- read until this object is gone
        self._shown_bytes = 0
        self._lock = threading.RLock()  # a handler of signals may call `stop`
        self._started: LaunchStarted | None = None
        self._ending_message: LaunchEnded | None = None
        self._owner_pid = os.getpid()
        self._stopped_at: float | None = None  # monotonic time of the first `stop`
        self._overdue_text = ""  # of a launcher that was killed, as it did not stop

        cannot_start = "the launcher process could not be started"
        advice = "make sure that this process may start programs and that the machine has enough free memory"
        with RunError.instead_of(OSError, text=cannot_start, advice=advice):
            self._process = subprocess.Popen(
                [sys.executable, "-m", "asyncrl.api.launcher"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._output,
                env={
                    # Lines go to `show`, which may be no terminal, and the view shows no codes of colors.
                    **{name: value for name, value in os.environ.items() if name != "FORCE_COLOR"},
                    INSIDE_RUN: "1",
                    "PYTHONPATH": os.pathsep.join(_added_paths()),
                    "PYTHONSAFEPATH": "1",  # no file of the working directory hides a module of Python
                },
                start_new_session=True,
            )
        assert self._process.stdin and self._process.stdout
        self._requests: IO[bytes] = self._process.stdin
        self._reader = threading.Thread(
            target=self._read_messages, args=(self._process.stdout,), name="asyncrl-launcher", daemon=True
        )
        self._reader.start()
        with suppress(BrokenPipeError):  # the child has ended: `wait` tells why
            write_frame(self._requests, msgspec.msgpack.encode(request))

    def wait_for_start(self, show: Show) -> Path:
        """Return the run's directory once the run's processes start. Raises as `wait` does if they never
        do."""
        view = LineView(show)
        while self._started is None:
            if self._await_end(POLL_SECONDS, view):
                return Path(self._ending().run_dir)
        return Path(self._started.run_dir)

    def wait(self, view: RunView, seconds: float = math.inf) -> LaunchEnded:
        """Return how the launcher ended. `view` shows the lines that it prints. Ctrl-C stops the run with a
        checkpoint, a second Ctrl-C kills it, and KeyboardInterrupt is raised once it has ended. A launcher
        that does not end after a stop is killed STOP_MARGIN_SECONDS after `launch.stop_timeout`. Raises
        ConfigError for bad input, RunError for a run that failed, TimeoutError if the launcher has not ended
        within `seconds`."""
        self._check_owner()
        deadline = time.monotonic() + seconds
        try:
            while not self._await_end(POLL_SECONDS, view):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the run did not finish within {seconds:g} s")
        except KeyboardInterrupt:
            self.stop()
            try:
                while not self._await_end(POLL_SECONDS, view):
                    pass
            except KeyboardInterrupt:
                self.kill()
            if self._overdue_text:
                view.print_line(self._overdue_text)
            raise
        except TimeoutError:
            raise
        except BaseException:  # of the caller's `show`: nobody would wait for the run any more
            self.stop()
            raise
        return self._ending()

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        """Ask for the end of the run, with a checkpoint, and return at once. The second call kills the run's
        processes."""
        self._check_owner()
        with self._lock:
            self._stopped_at = self._stopped_at or time.monotonic()
            if self._requests.closed:
                if self.is_running:
                    self._process.send_signal(signal.SIGTERM)
                return

            with suppress(BrokenPipeError):  # it has ended
                # A byte, as a process that the caller has forked may hold the pipe open.
                self._requests.write(b"\0")
                self._requests.flush()
            with suppress(BrokenPipeError):
                self._requests.close()

    def kill(self) -> None:
        """End the launcher and with it every process of the run, without a checkpoint."""
        self._check_owner()
        deadline = time.monotonic() + KILL_SECONDS
        while self.is_running and time.monotonic() < deadline:
            self.stop()  # the second signal kills; two at once may arrive as one
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(SIGNAL_SECONDS)
        if self.is_running:
            self._process.kill()
            self._process.wait()

    def _read_messages(self, messages: IO[bytes]) -> None:
        with messages:
            while (frame := read_frame(messages)) is not None:
                message = MESSAGE_DECODER.decode(frame)
                if isinstance(message, LaunchStarted):
                    self._started = message
                else:
                    self._ending_message = message

    def _check_owner(self) -> None:
        if os.getpid() != self._owner_pid:
            raise ConfigError(
                f"process {self._owner_pid} started the run, and only that process can wait for or stop the "
                "run; use asyncrl.open_run(…) here"
            )

    def _await_end(self, seconds: float, view: RunView) -> bool:
        """Wait for at most `seconds`, and show what was printed in the meantime. Return whether the launcher
        has ended, and everything is read. A launcher that stops for too long is killed."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            has_ended = self._kill_overdue()
        else:
            has_ended = True
        if has_ended:
            self._reader.join(READ_SECONDS)  # a process of users' code may hold the pipe open

        with self._lock:
            fd = self._output.fileno()
            size = os.fstat(fd).st_size
            printed_text = os.pread(fd, size - self._shown_bytes, self._shown_bytes)
            line_end = max(printed_text.rfind(b"\n"), printed_text.rfind(b"\r")) + 1
            whole_lines = printed_text if has_ended else printed_text[:line_end]
            self._shown_bytes += len(whole_lines)
        for line in whole_lines.decode(errors="replace").splitlines():
            view.print_line(line)
        view.update()
        return has_ended

    def _kill_overdue(self) -> bool:
        """Kill a launcher that has not ended in time after a stop. Return whether it was killed."""
        if self._stopped_at is None:
            return False
        stop_timeout = self._started.stop_timeout if self._started else 0.0
        stop_seconds = time.monotonic() - self._stopped_at
        if stop_seconds <= stop_timeout + STOP_MARGIN_SECONDS:
            return False

        self._overdue_text = (  # before the kill, whose end another waiting thread may see first
            f"the launcher did not exit within {stop_seconds:.0f} s of the stop (launch.stop_timeout is "
            f"{stop_timeout:g} s) and was killed, with all processes of the run; resume=auto continues from "
            "the last checkpoint"
        )
        self.kill()
        return True

    def _ending(self) -> LaunchEnded:
        """Return how the launcher ended, once it has. Raises ConfigError and RunError."""
        if self._overdue_text:
            raise RunError(self._overdue_text)
        if self._ending_message is None:
            if self._requests.closed and -self._process.returncode in (signal.SIGTERM, signal.SIGKILL):
                return LaunchEnded(130)  # stopped before it could catch signals
            output_end = os.pread(self._output.fileno(), TAIL_BYTES, max(0, self._shown_bytes - TAIL_BYTES))
            last_line = output_end.decode(errors="replace").rstrip().rpartition("\n")[2]
            raise RunError(f"the launcher {describe_exit(self._process.returncode)}: {last_line}")

        if self._ending_message.code == 2:
            raise ConfigError(self._ending_message.error)
        if self._ending_message.code not in (0, 130):
            raise RunError(
                self._ending_message.error or f"the run failed; see {self._ending_message.run_dir}/logs"
            )
        return self._ending_message


def _added_paths() -> list[str]:
    """Return the caller's import path without what each interpreter has: Python's modules, installed
    packages, and the working directory, which `search_working_directory` adds behind them."""
    library = sysconfig.get_path("stdlib")
    common_paths = {library, f"{library}/lib-dynload", *site.getsitepackages(), site.getusersitepackages()}
    common_paths = {os.path.realpath(path) for path in (*common_paths, os.getcwd())}
    common_paths.discard(PACKAGE_ROOT)  # a checkout that is not installed
    paths = [os.path.abspath(path) for path in sys.path]
    return [path for path in paths if os.path.exists(path) and os.path.realpath(path) not in common_paths]


# -- in the child ------------------------------------------------------------------------------------


def main() -> int:
    """Read a request, do it, report how it ended. What is printed goes to standard error."""
    request_pipe, message_pipe = private_pipes()
    frame = read_frame(request_pipe)
    if frame is None:
        return 0  # the caller has ended already
    os.environ.pop("PYTHONSAFEPATH", None)  # for this process alone
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a stop unwinds what the checks have opened
    threading.Thread(target=_stop_at_end, args=(request_pipe,), daemon=True).start()

    ending = LaunchEnded(130)
    try:
        ending = _run_request(msgspec.msgpack.decode(frame, type=LauncherRequest), message_pipe)
    except ConfigError as error:
        ending = LaunchEnded(2, str(error))
    except (AsyncrlError, OSError) as error:
        ending = LaunchEnded(1, one_line(error))
    except KeyboardInterrupt:
        pass

    sys.stdout.flush()
    with suppress(BrokenPipeError):  # the caller has ended
        write_frame(message_pipe, msgspec.json.encode(ending))
    return ending.code


def _stop_at_end(request_pipe: IO[bytes]) -> None:
    request_pipe.read(1)
    os.kill(os.getpid(), signal.SIGINT)


def _run_request(request: LauncherRequest, message_pipe: IO[bytes]) -> LaunchEnded:
    from asyncrl.commands import eval as eval_command
    from asyncrl.commands import sft
    from asyncrl.config import read_config
    from asyncrl.config.composition import compose
    from asyncrl.launch.run_directory import check_run_directory, run_directory
    from asyncrl.launch.start import train
    from asyncrl.observe.files import read_status

    search_working_directory()
    values = request.values
    config_dir = Path(request.config_dir) if request.config_dir else None

    def report_start(run_dir: Path) -> None:
        started = LaunchStarted(str(run_dir), read_config(run_dir).launch.stop_timeout)
        write_frame(message_pipe, msgspec.json.encode(started))

    if request.command == "eval":
        options = argparse.Namespace(
            overrides=request.overrides,
            config_dir=config_dir,
            run_dir=Path(request.runs),
            dry_run=False,
            values=values,
        )
        target = eval_command.resolve_target(request.model, options.run_dir)
        code, evaluation_dir = eval_command.evaluate(target, options, report_start)
        assert evaluation_dir is not None
        if not code:
            eval_command.write_result(eval_command.Result.read(evaluation_dir))
        return LaunchEnded(code, read_status(evaluation_dir).get("error", ""), run_dir=str(evaluation_dir))

    compose_run = sft.compose_sft if request.command == "sft" else compose
    config = compose_run(request.overrides, config_dir, values)

    given_data = values.get("data", {})
    names_test = any(text.startswith("data.test=") for text in request.overrides) or "test" in given_data
    if "train" in given_data and config.data.test and not names_test:
        print(
            "ignoring the experiment's data.test, because its rows may not match yours; pass test=… for "
            "your own"
        )
        config = msgspec.structs.replace(config, data=msgspec.structs.replace(config.data, test=""))

    if request.dry_run:
        code = train(config, dry_run=True)
        return LaunchEnded(code, DRY_RUN_REFUSED if code else "")

    check_run_directory(config)
    run_dir = run_directory(config)
    for name, source in request.saved_files.items():
        saved_path = run_dir / name
        if not saved_path.exists():
            saved_path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, saved_path.with_suffix(".tmp"))
            saved_path.with_suffix(".tmp").replace(saved_path)

    code = train(config, on_start=report_start, caller_draws=request.caller_draws)
    return LaunchEnded(code, str(read_status(run_dir).get("error", "")), run_dir=str(run_dir))


if __name__ == "__main__":
    sys.exit(main())
