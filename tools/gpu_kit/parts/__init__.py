"""The parts of `check.py`. Each module asks one question, and has a docstring, `SECONDS` (its deadline on
a GPU), `GOAL`, and `run(context)`, which yields findings; `OPTIONAL = True` where other parts go first,
and `SMALL_SECONDS` for a deadline on a CPU that is not 120. No part imports another; what several of them
use is in modules without `run`."""
