"""The decoders of `tools/fuzz.py`, with inputs that are bred for the lines of asyncrl that they reach.

    pip install atheris && python tools/fuzz_coverage.py -runs=1000000 -max_len=512 -seed=1

Arguments are libFuzzer's. Ends at the first error that a decoder does not document, and writes its input.
"""

from __future__ import annotations

import random
import sys
from contextlib import suppress
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import atheris

with atheris.instrument_imports(include=["asyncrl"]):
    from fuzz import inputs, targets

TARGETS = targets()
EXAMPLES = 20  # first inputs of each target


def test_one_input(data: bytes) -> None:
    """The first byte chooses the decoder."""
    if data:
        target = TARGETS[data[0] % len(TARGETS)]
        with suppress(target.error):
            target.read(data[1:])


def main() -> None:
    with TemporaryDirectory() as corpus:
        for number, target in enumerate(TARGETS):
            generated = inputs(target.kind, target.encode, random.Random(number))
            for example, data in enumerate(islice(generated, EXAMPLES)):
                (Path(corpus) / f"{number}-{example}").write_bytes(bytes([number]) + data)
        atheris.Setup([*sys.argv, corpus], test_one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
