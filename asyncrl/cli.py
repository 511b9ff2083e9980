"""`asyncrl train | runs | tools`. The only importer of Hydra. What is slow to import comes after parsing.

Exit codes: 0 completed, 1 failed, 2 bad input (one line on standard error), 130 interrupted.
"""

from __future__ import annotations

import argparse
import difflib
import os
import site
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

import asyncrl
from asyncrl.config import RunConfig, parse
from asyncrl.errors import AsyncrlError, ConfigError

MISSING = "???"  # OmegaConf's mark of a mandatory value
ROOT = "${asyncrl_root:}"
OPEN_KEYS = (  # mappings with keys of the user's choice
    "rollout.tool_args",
    "rollout.environment",
    "rollout.agent",
    "rollout.reward",
    "algorithm.advantage_args",
    "algorithm.loss_args",
    "algorithm.correction",
    "algorithm.shaping",
)

SPEC = "SPEC: a name, module:attribute, file.py:attribute or folder, as in rollout.tools."

HELP = """\
  asyncrl train                     train the calculator demo on a CPU; the last line says where the run is
  asyncrl train --dry-run           check everything, print the configuration and the process plan
  asyncrl train --help              flags, examples, and the keys most often wanted
  asyncrl runs list | show [NAME]   what is in runs/
  asyncrl tools list [SPEC...]      the tools that there are, or those of a module, file or folder
  asyncrl tools call NAME '{"a": 1}'   try one
"""

TRAIN_HELP = """\
Train a run. OVERRIDES are Hydra's: key=value, or group=choice for a file in configs/.

  asyncrl train                                      the calculator demo, on a CPU
  asyncrl train --dry-run                            check everything; print the resolved plan
  asyncrl train total_steps=20 name=first            a short run in runs/first
  asyncrl train name=first total_steps=40 resume=auto        go on with it
  asyncrl train buffer.max_staleness=0               synchronous
  asyncrl train algorithm=rloo rollout.workers=2 trainer.ranks=2
  asyncrl train launch=ray launch.ray_address=auto   roles as Ray actors
  asyncrl train --config-dir mine experiment=maze    mine/experiment/maze.yaml on top of the shipped files
  asyncrl train experiment=none name=x model.path=m data.train=train.parquet

Often wanted keys (all of them, with bounds and meaning: docs/configuration.md):
  name, run_dir, resume        where the run lives; resume=auto goes on from its last checkpoint
  total_steps, seed            optimizer batches; seed of data order and sampling
  model.path, data.train       a Hugging Face model directory; parquet with verl's columns
  rollout.tools, rollout.reward        names, module:function or file.py:function
  buffer.max_staleness         bound on the lag of every trained token; 0 is synchronous
  trainer.lr, trainer.ranks, rollout.workers, rollout.slots
"""


def main(argv: list[str] | None = None) -> int:
    """The command line. Errors raised on purpose are one line."""
    try:
        return _dispatch(sys.argv[1:] if argv is None else argv)
    except ConfigError as error:
        print(f"asyncrl: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except AsyncrlError as error:
        print(f"asyncrl: {error}", file=sys.stderr)
        return 1


def _dispatch(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="asyncrl",
        description=asyncrl.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=HELP,
    )
    parser.add_argument("--version", action="version", version=f"asyncrl {asyncrl.__version__}")
    parser.add_argument("command", choices=("train", "runs", "tools"), help="see below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the command")
    options = parser.parse_args(argv)
    return {"train": _train, "runs": _runs, "tools": _tools}[options.command](options.arguments)


def _train(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="asyncrl train", description=TRAIN_HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDES", help="key=value or group=choice")
    parser.add_argument(
        "--dry-run", action="store_true", help="check everything and print the plan; start nothing"
    )
    parser.add_argument("--config-dir", type=Path, help="directory with configuration groups of your own")
    options = parser.parse_intermixed_args(argv)
    config = compose(options.overrides, options.config_dir)
    if note := demo_note(options.overrides):
        print(f"asyncrl: {note}", file=sys.stderr)
    sys.path.insert(0, os.getcwd())  # plug-ins named module:function may lie here, as for the children
    from asyncrl.launch.start import train

    return train(config, dry_run=options.dry_run)


def demo_note(overrides: list[str]) -> str:
    """What to say to somebody whose own model or data goes into the demo's settings, by oversight or not."""
    keys = {override.partition("=")[0] for override in overrides}
    own = sorted(keys & {"model.path", "data.train"})
    if not own or "experiment" in keys:
        return ""
    return (
        f"{' and '.join(own)} with the calculator demo's settings (tools, learning rate, token limits, test "
        "data); for defaults instead, add experiment=none name=…"
    )


def _runs(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="asyncrl runs", description="List runs, or show one's summary.")
    parser.add_argument("action", choices=("list", "show"))
    parser.add_argument("name", nargs="?", default="", help="run to show; the newest one by default")
    parser.add_argument("--run-dir", type=Path, default=Path("runs"), help="parent of run directories")
    options = parser.parse_intermixed_args(argv)
    from asyncrl.observe import runs

    return (
        runs.list_runs(options.run_dir)
        if options.action == "list"
        else runs.show(options.run_dir, options.name)
    )


def _tools(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="asyncrl tools",
        description="list [SPEC...]: name, parameters, description and options of tools. call SPEC [JSON]: "
        "open a tool, call it once with these arguments, print the reply. " + SPEC,
    )
    parser.add_argument("action", choices=("list", "call"))
    parser.add_argument("given", nargs="*", metavar="SPEC", help="list: all there are by default")
    parser.add_argument("--name", default="", help="call: the tool, where SPEC gives several")
    parser.add_argument("--sample", type=Path, help="call: JSON file of a data row the tool is opened with")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="for the factory")
    options = parser.parse_intermixed_args(argv)
    sys.path.insert(0, os.getcwd())
    from asyncrl.commands import tools as command

    made = command.options_of(options.option)
    if options.action == "list":
        return command.list_tools(options.given, made)
    if len(options.given) not in (1, 2):
        parser.error("call takes a SPEC and, as one word, a JSON object")
    spec, text = (*options.given, "{}")[:2]
    return command.call(spec, text, made, options.name, options.sample)


# -- composition -----------------------------------------------------------------------------------


def compose(overrides: list[str], config_dir: Path | None = None) -> RunConfig:
    """Hydra's composition, validated. After this no OmegaConf object exists."""
    import hydra
    from hydra.core.config_store import ConfigStore
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    base = config_root() / "configs"
    OmegaConf.register_new_resolver("asyncrl_root", lambda: str(base.parent), replace=True)
    ConfigStore.instance().store(name="schema", node=defaults(RunConfig))
    try:
        with hydra.initialize_config_dir(str(base), version_base="1.3", job_name="asyncrl"):
            composed = hydra.compose("config", [*_search_path(base, config_dir), *map(_open, overrides)])
            found = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
            return parse(_with_root(found, str(base.parent)))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"configuration: {_explain(error)}") from None


def config_root() -> Path:
    """Where `configs/` is: the checkout, or what an installation put beside the packages."""
    installed = [Path(base) / "share" / "asyncrl" for base in (sys.prefix, site.getuserbase())]
    for root in (Path(asyncrl.__file__).resolve().parents[1], *installed):
        if (root / "configs" / "config.yaml").is_file():
            return root
    raise ConfigError(
        "no configs/config.yaml beside the package; install asyncrl again, or work in a checkout"
    )


def defaults(section: type[msgspec.Struct]) -> dict[str, Any]:
    """Every key with its default; what has none is marked as mandatory."""
    tree: dict[str, Any] = {}
    for field in msgspec.structs.fields(section):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            tree[field.name] = defaults(field.type)
        elif field.required:
            tree[field.name] = MISSING
        else:
            default = field.default_factory() if field.default is msgspec.NODEFAULT else field.default  # type: ignore[operator]
            tree[field.name] = msgspec.to_builtins(default)
    return tree


def _search_path(base: Path, config_dir: Path | None) -> list[str]:
    """Groups of the user's own: --config-dir, or ./configs."""
    if config_dir is not None and not config_dir.is_dir():
        raise ConfigError(f"--config-dir {config_dir}: no such directory")
    own = config_dir or Path("configs")
    if not own.is_dir() or own.resolve() == base:
        return []
    return [f"hydra.searchpath=[file://{own.resolve()}]"]


def _with_root(tree: Any, root: str) -> Any:
    """Keys that name a file, resolved: OmegaConf resolves values only."""
    if not isinstance(tree, dict):
        return tree
    return {key.replace(ROOT, root): _with_root(value, root) for key, value in tree.items()}


def _open(override: str) -> str:
    """Keys of the user's choice may be set without Hydra's plus sign."""
    key = override.partition("=")[0]
    return (
        f"++{override}"
        if key.startswith(tuple(f"{name}." for name in OPEN_KEYS)) or key in OPEN_KEYS
        else override
    )


def _explain(error: Exception) -> str:
    """Hydra's complaint on one line; for an unknown key or choice, with the nearest known ones."""
    text = " ".join(str(error).split()).partition(" See https://")[0]
    if override := getattr(error, "override", None):
        return f"cannot read the override {override!r}: {text}; quote it for the shell, and close brackets"
    key = getattr(error, "full_key", None) or getattr(error.__cause__, "full_key", None)
    known = list(_keys(defaults(RunConfig)))
    if text.startswith("Could not override") and key and key not in known:
        near = difflib.get_close_matches(key, known, n=3, cutoff=0.5)
        return f"unknown key {key}; " + (
            f"did you mean {', '.join(near)}?" if near else "see docs/configuration.md"
        )
    if text.startswith("Missing mandatory value"):
        return f"{key} has no value; give {key}=…"
    return text


def _keys(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in tree.items():
        yield prefix + name
        if isinstance(value, dict):
            yield from _keys(value, f"{prefix}{name}.")


if __name__ == "__main__":
    sys.exit(main())
