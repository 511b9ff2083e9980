"""Print a token with which one more worker or server can join an active run.

Run this command on the machine of the run's launcher, as the same user. The token is a secret; it works
only once and expires after 10 minutes:

    asyncrl invite my-run | ssh other-machine 'cd /shared/work && asyncrl worker --join -'
    asyncrl invite my-run --role engine | ssh other-machine 'cd /shared/work && asyncrl worker --join -'
"""

from __future__ import annotations

import sys
from urllib.parse import urlsplit

from asyncrl.commands import command_parser, find_run
from asyncrl.commands.status import launcher_lives
from asyncrl.config import read_config
from asyncrl.errors import ConfigError
from asyncrl.launch.nodes import is_loopback
from asyncrl.launch.placement import ENGINE, ROLLOUT


def main(argv: list[str]) -> int:
    from asyncrl.launch.session import ask_for_token  # imports zmq
    from asyncrl.wire.enrolment import read_token

    parser = command_parser("invite", __doc__)
    parser.add_argument("run", nargs="?", default="", help="name or directory of a run (default: the newest)")
    parser.add_argument(
        "--role",
        choices=(ROLLOUT, ENGINE),
        default=ROLLOUT,
        help="what may join: a worker (rollout) or a server (engine) (default: %(default)s)",
    )
    options = parser.parse_intermixed_args(argv)

    run_dir = find_run(options.run_dir, options.run)
    if not launcher_lives(run_dir):
        raise ConfigError(
            f"{run_dir}: the run is not active; workers and servers can only join an active run"
        )
    if options.role == ENGINE and not read_config(run_dir).engine.remote:
        raise ConfigError(
            f"{run_dir}: engine.name is not sglang, so only workers can join; use --role rollout"
        )
    token = ask_for_token(run_dir, options.role)

    if is_loopback(urlsplit(read_token(token).control).hostname or ""):
        text = (
            "asyncrl: the run accepts connections only from this machine (launch.host), so only local "
            "processes can join"
        )
        print(text, file=sys.stderr)
    print(token)
    return 0
