"""`asyncrl invite [RUN]`: prints a token with which one more worker or server may join a run under way.

Run it where the run's launcher is, as the same user. The token is a secret, of use once, within 10 minutes:

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
    parser.add_argument("run", nargs="?", default="", help="name of a run, or its directory; else the newest")
    parser.add_argument(
        "--role", choices=(ROLLOUT, ENGINE), default=ROLLOUT, help="engine: a server; default: %(default)s"
    )
    options = parser.parse_intermixed_args(argv)

    run_dir = find_run(options.run_dir, options.run)
    if not launcher_lives(run_dir):
        raise ConfigError(f"{run_dir}: the run is not up; workers and servers can join only while it is")
    if options.role == ENGINE and not read_config(run_dir).engine.remote:
        raise ConfigError(f"{run_dir}: engine.name is not sglang: only workers join, --role rollout")
    token = ask_for_token(run_dir, options.role)

    if is_loopback(urlsplit(read_token(token).control).hostname or ""):
        text = "asyncrl: the run listens on this machine alone (launch.host): only processes here can join it"
        print(text, file=sys.stderr)
    print(token)
    return 0
