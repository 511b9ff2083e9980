"""Runs the command line: `python -m asyncrl train …`."""

import sys

from asyncrl.cli import main

if __name__ == "__main__":
    sys.exit(main())
