"""Join an active run as one more rollout worker, or as the supervisor of one more server, on this or another
machine, until stopped.

`asyncrl invite` prints the token. With `--join -`, the token is read from standard input, because other users
of a machine can see arguments. The model and plug-ins must be at the same paths as for the other workers, and
so must the weights if `weights.directory` is a path. After SIGTERM or Ctrl-C the worker leaves, and other
workers continue its episodes from the last turn of each episode. The exit code is 0 when the worker has left
or the run has ended.

With a token from `asyncrl invite --role engine`, this command starts a server, or attaches the server at
--url.
"""

from __future__ import annotations

import signal
import sys

import msgspec
from msgspec.structs import replace

import asyncrl
from asyncrl.commands import command_parser
from asyncrl.config import RunConfig
from asyncrl.errors import UNDECODABLE, ConfigError
from asyncrl.launch.placement import ENGINE, ROLE_TARGETS, PlannedProcess
from asyncrl.launch.servers import check_servers
from asyncrl.runtime.process import END_SIGNALS
from asyncrl.wire.messages.shared import Enrolled


def main(argv: list[str]) -> int:
    """Enrol, then run the role as its parent process."""
    from asyncrl.launch.joined import JoinedProcess, Ticket  # imports zmq
    from asyncrl.launch.process import ProcessSpec
    from asyncrl.wire.enrolment import enrol

    parser = command_parser("worker", __doc__, "directory in which to create this worker's directory")
    parser.add_argument(
        "--join",
        required=True,
        metavar="TOKEN",
        help="token printed by asyncrl invite; - reads the token from standard input",
    )
    parser.add_argument(
        "--url", default="", help="URL at which the workers reach a server that is already running"
    )
    options = parser.parse_args(argv)

    token = sys.stdin.readline() if options.join == "-" else options.join
    endpoints, enrolled = enrol(token)
    config = replace(run_configuration(enrolled), run_dir=str(options.run_dir))
    if enrolled.role == ENGINE:
        config = with_server(config, options.url)
    elif options.url:
        raise ConfigError(
            "--url: this token is for a worker; get a token for an engine with asyncrl invite --role engine"
        )

    planned = PlannedProcess(
        role=enrolled.role,
        index=enrolled.index,
        threads=config.launch.threads,
        target=ROLE_TARGETS[enrolled.role],
    )
    ticket = Ticket(
        process_spec=ProcessSpec(planned, enrolled.incarnation),
        config=config,
        endpoints=endpoints,
        start_file_text=enrolled.started,
    )

    joined_process = JoinedProcess(ticket)
    for number in END_SIGNALS:
        signal.signal(number, lambda number, _: joined_process.role_process.send_signal(number))

    exit_code, kept_at = joined_process.wait_for_exit(show_log=True)
    if kept_at:
        print(
            f"asyncrl: the run did not receive everything that {planned.name} wrote; see {kept_at}",
            file=sys.stderr,
        )
    return exit_code


def run_configuration(enrolled: Enrolled) -> RunConfig:
    """Return the run's configuration. Raises ConfigError if this version of asyncrl cannot read the
    configuration."""
    if enrolled.version != asyncrl.__version__:
        raise ConfigError(
            f"the run uses asyncrl {enrolled.version}, but this machine has {asyncrl.__version__}; "
            "install the run's version here"
        )
    try:
        return msgspec.json.decode(enrolled.config, type=RunConfig)
    except UNDECODABLE as error:
        raise ConfigError(
            f"the run's configuration cannot be read here ({error}); install the version of asyncrl that the "
            "run uses"
        ) from None


def with_server(config: RunConfig, url: str) -> RunConfig:
    """Configure only one server: at `url`, or to be started. Raises ConfigError if the server cannot be
    used."""
    if url.rstrip("/") in [engine_url.rstrip("/") for engine_url in config.engine.urls]:
        raise ConfigError(
            f"--url: the run already uses the server {url}, which engine.urls lists; pass another URL"
        )
    config = replace(config, engine=replace(config.engine, urls=[url] if url else []))
    check_servers(replace(config, scorers={}))  # Scorers and their models are on other machines.
    return config
