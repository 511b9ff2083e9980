"""`asyncrl replay RUN --step N`: trains a step of a run once more, from the newest checkpoint before it.

The command only reads the run, which may be under way.
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
from asyncrl.store.launches import config_tree, describe_differences, launch_at, launches_of

LOSS = "actor/pg_loss"
GRADIENT_NORM = "actor/grad_norm"
TITLES = ("loss: recorded", "replayed", "gradient norm: recorded", "replayed")
# Prefixes of metrics that the recorded data determine.
COMPARED_PREFIXES = (
    "actor/",
    "critic/",
    "rollout_corr/",
    "staleness/",
    "trainer/",
)

HELP = """\
Repeat a recorded training step outside the run, and print recorded and new values side by side:

  asyncrl replay demo --step 57                                       start at the checkpoint before step 57
  asyncrl replay demo --step 57 algorithm.loss=ppo algorithm.prox=mu  the same data with another loss
  asyncrl replay demo --step 57 trainer.lr=1e-5 model.device=cpu

OVERRIDES change keys of the run's configuration from the checkpoint onward, as in `asyncrl train`. Without
overrides, on one CPU rank and the same machine, the loss and the gradient norm are bit-identical."""


def main(argv: list[str]) -> int:
    parser = command_parser("replay", HELP)
    parser.add_argument("run", help="name or directory of a run")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDES", help="key=value")
    parser.add_argument("--step", type=int, required=True, help="the step to repeat (numbered from 1)")
    options = parser.parse_intermixed_args(argv)
    run_dir = find_run(options.run_dir, options.run)
    launches = launches_of(run_dir)

    # The step is trained with the configuration of its launch, not of the newest launch.
    with TemporaryDirectory() as config_directory:
        Path(config_directory, "config.yaml").write_bytes(
            msgspec.yaml.encode(launch_at(launches, options.step).config)
        )
        config = recompose(Path(config_directory), options.overrides)

    rows = {int(row["training/step"]): row for row in read_rows(run_dir) if "timing_s/step" in row}
    recorded_row = dict[str, float]()
    replayed_row = dict[str, float]()
    steps = list[int]()
    recorded_budget = launch_at(launches, options.step).config["trainer"]["micro_batch_tokens"]
    budget = config.trainer.micro_batch_tokens

    for step, replayed_row in _replay_steps(
        config, run_dir, options.step, 0 if budget == recorded_budget else budget
    ):
        if not recorded_row:
            print(f"{'step':>6} " + " ".join(f"{title:>24}" for title in TITLES))
        recorded_row = rows.get(step, {})
        cells = [
            f"{row.get(name, '–')!s:>24}"
            for name in (LOSS, GRADIENT_NORM)
            for row in (recorded_row, replayed_row)
        ]
        print(f"{step:>6}", *cells, flush=True)
        steps.append(step)

    shared_names = [
        name for name in replayed_row if name in recorded_row and name.startswith(COMPARED_PREFIXES)
    ]
    differing_names = [name for name in shared_names if recorded_row[name] != replayed_row[name]]
    print(
        f"{len(shared_names) - len(differing_names)} of {len(shared_names)} metrics from the last step "
        "match the record"
    )
    for name in differing_names:
        print(f"  {name}: {recorded_row[name]:.6g} recorded, {replayed_row[name]:.6g} replayed")
    for first_step, launch_config in {
        launch_at(launches, step).step: launch_at(launches, step).config for step in steps
    }.items():
        if changed_keys := describe_differences(launch_config, config_tree(config)):
            print(f"steps after {first_step} were trained with different settings: {changed_keys}")
    return 0


def _replay_steps(
    config: RunConfig, run_dir: Path, step: int, budget: int
) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield (step, metrics) of the steps up to `step`."""
    from asyncrl.data.run_images import RunImages
    from asyncrl.launch.models import resolve_models
    from asyncrl.store.checkpoints import checkpoints_of
    from asyncrl.store.reader import RunReader
    from asyncrl.trainer.retrain import retrain

    trainer = msgspec.structs.replace(config.trainer, ranks=1, replicas=1, sequence_parallel=1)
    with closing(RunReader.open(run_dir)) as reader:
        single_config = resolve_models(msgspec.structs.replace(config, trainer=trainer))
        images = RunImages.open(run_dir, reader)
        yield from retrain(single_config, reader, images, checkpoints_of(config, run_dir), step, budget)
