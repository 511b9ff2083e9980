"""`asyncrl invite [RUN]`: print a token with which one more rollout worker may join a run under way.

Run it where the run's launcher is, as the same user. The token is a secret, of use once, within 10 minutes:

    asyncrl invite my-run | ssh other-machine 'cd /shared/work && asyncrl worker --join -'
"""

from __future__ import annotations

import sys
from urllib.parse import urlsplit

from asyncrl.commands.arguments import command_parser, find_run
from asyncrl.commands.status import lives
from asyncrl.errors import ConfigError
from asyncrl.launch.nodes import is_loopback


def main(argv: list[str]) -> int:
    """Ask the launcher, and print what it gives."""
    from asyncrl.launch.admission import ask_for_token  # imports zmq
    from asyncrl.wire.enrolment import read_token

    parser = command_parser("invite", __doc__)
    parser.add_argument("run", nargs="?", default="", help="name of a run, or its directory; else the newest")
    options = parser.parse_intermixed_args(argv)
    run_dir = find_run(options.run_dir, options.run)
    if not lives(run_dir):
        raise ConfigError(f"{run_dir}: the run is not up; a worker can join only while it is")
    token = ask_for_token(run_dir)
    if is_loopback(urlsplit(read_token(token).control).hostname or ""):
        text = "asyncrl: the run listens on this machine alone (launch.host): only a worker here can join it"
        print(text, file=sys.stderr)
    print(token)
    return 0
