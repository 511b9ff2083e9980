"""`asyncrl replay RUN --step N`: a step of a run once more, from the newest checkpoint before it.

It only reads the run, which may be under way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from asyncrl.commands import command_parser, find_run
from asyncrl.config import RunConfig
from asyncrl.config.composition import recompose
from asyncrl.observe.files import read_rows
from asyncrl.store.launches import at, described, launches_of, tree

LOSS = "actor/pg_loss"
NORM = "actor/grad_norm"
TITLES = ("loss: recorded", "replayed", "gradient norm: recorded", "replayed")
SHOWN = ("actor/", "critic/", "rollout_corr/", "staleness/", "trainer/")  # metrics that recorded data decide

HELP = """\
Train a recorded step again, apart from the run, and print what was recorded beside what comes out:

  asyncrl replay demo --step 57                                       from the newest checkpoint before it
  asyncrl replay demo --step 57 algorithm.loss=ppo algorithm.prox=mu  what another loss makes of the same data
  asyncrl replay demo --step 57 trainer.lr=1e-5 model.device=cpu

OVERRIDES are keys, as of `asyncrl train`, on top of the configuration of the run, from the checkpoint
on. Without any, on one CPU rank and the same machine, loss and gradient norm are the same to the last bit."""


def main(argv: list[str]) -> int:
    parser = command_parser("replay", HELP)
    parser.add_argument("run", help="name of a run, or its directory")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDES", help="key=value")
    parser.add_argument("--step", type=int, required=True, help="the step to repeat, from 1")
    options = parser.parse_intermixed_args(argv)
    run_dir = find_run(options.run_dir, options.run)
    launches = launches_of(run_dir)

    with TemporaryDirectory() as place:  # as that step was trained, not as the run goes on now
        Path(place, "config.yaml").write_bytes(msgspec.yaml.encode(at(launches, options.step).config))
        config = recompose(Path(place), options.overrides)

    rows = {int(row["training/step"]): row for row in read_rows(run_dir) if "timing_s/step" in row}
    before = dict[str, float]()
    now = dict[str, float]()
    steps = list[int]()
    had = at(launches, options.step).config["trainer"]["micro_batch_tokens"]
    budget = config.trainer.micro_batch_tokens

    for step, now in _replayed(config, run_dir, options.step, 0 if budget == had else budget):
        if not before:
            print(f"{'step':>6} " + " ".join(f"{title:>24}" for title in TITLES))
        before = rows.get(step, {})
        cells = [f"{row.get(name, '–')!s:>24}" for name in (LOSS, NORM) for row in (before, now)]
        print(f"{step:>6}", *cells, flush=True)
        steps.append(step)

    both = [name for name in now if name in before and name.startswith(SHOWN)]  # of the last step
    differing = [name for name in both if before[name] != now[name]]
    print(f"{len(both) - len(differing)} of {len(both)} metrics of the last step are as recorded")
    for name in differing:
        print(f"  {name}: {before[name]:.6g} recorded, {now[name]:.6g} replayed")
    for first, given in {at(launches, step).step: at(launches, step).config for step in steps}.items():
        if changed := described(given, tree(config)):
            print(f"steps after {first} were trained with other keys: {changed}")
    return 0


def _replayed(
    config: RunConfig, run_dir: Path, step: int, budget: int
) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield (step, metrics) of the steps up to this one."""
    from asyncrl.launch.models import resolve_models
    from asyncrl.store.checkpoints import checkpoints_of
    from asyncrl.store.reader import RunReader
    from asyncrl.trainer.retrain import retrain

    trainer = msgspec.structs.replace(config.trainer, ranks=1, replicas=1, sequence_parallel=1)
    with closing(RunReader.open(run_dir)) as reader:
        alone = resolve_models(msgspec.structs.replace(config, trainer=trainer))
        yield from retrain(alone, reader, checkpoints_of(config, run_dir), step, budget)
