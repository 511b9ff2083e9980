"""Everything that can be known to be wrong before a process starts. Each finding is one ConfigError
that says what and how to mend it; cheap checks come first.
"""

from __future__ import annotations

import importlib
import importlib.util
import ipaddress
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError, EngineError, one_line
from asyncrl.tools import Tool, check_sample_tools

# SQLite's write-ahead log needs shared memory between processes, which these do not give.
NETWORK_FILE_SYSTEMS = frozenset(
    {
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs"),
        *("orangefs", "pvfs2", "fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.juicefs", "fuse.glusterfs"),
        *("fuse.ceph-fuse", "fuse.lustre", "fuse.rclone", "fuse.blobfuse2"),
    }
)
ANSWER = 30.0  # seconds for a server that is to be attached to
EXISTING = ("run.db", "config.yaml")
# What a resumed run must keep: its data cursor, its plans and its checkpoints were made with these.
PATHS = ("data.train", "model.path")
KEPT = (
    *PATHS,
    *("data.shuffle", "seed", "buffer.groups_per_batch", "buffer.episodes_per_group"),
    *("algorithm.steps_per_batch", "model.lora_rank", "model.lora_alpha", "critic.backbone"),
)


def run_directory(config: RunConfig) -> Path:
    return Path(config.run_dir) / config.name


def check(config: RunConfig) -> None:
    """Raise the first ConfigError. Nothing is written and nothing started."""
    check_run_directory(config)
    check_resumed(config)
    check_installed(config)
    check_model(config)
    tools = check_names(config)
    check_data(config, tools)
    check_devices(config)
    check_weights_directory(config)
    check_group_address(config)
    check_servers(config)


# -- the run directory -----------------------------------------------------------------------------


def check_run_directory(config: RunConfig, mounts: str | None = None) -> None:
    """Writable, on a local disk, and new or to be resumed as `resume` says."""
    run_dir = run_directory(config)
    if "/" in config.name or config.name in (".", ".."):
        raise ConfigError(f"$.name: {config.name!r} is no directory name; choose one without '/'")
    exists = any((run_dir / name).exists() for name in EXISTING)
    if exists and config.resume == "never":
        raise ConfigError(
            f"{run_dir}: a run of that name exists; continue it with resume=auto, or choose another name=…"
        )
    if not exists and config.resume == "must":
        raise ConfigError(
            f"{run_dir}: resume=must, but there is no run to continue; correct name= or run_dir="
        )
    parent = creatable(run_dir, "run_dir")
    kind = file_system(parent, mounts if mounts is not None else _mounts())
    if kind in NETWORK_FILE_SYSTEMS:
        raise ConfigError(
            f"{run_dir}: is on a network file system ({kind}), where the run store's write-ahead log fails; "
            "set run_dir=… to a local disk"
        )


def creatable(path: Path, key: str) -> Path:
    """The existing directory in which it lies or can be made. Raises ConfigError, which names the key."""
    parent = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{path}: cannot be created, {parent} is not a writable directory; set {key}=…")
    return parent


def check_resumed(config: RunConfig) -> None:
    """A run goes on as it began, in what its store and its checkpoints are made of."""
    path = run_directory(config) / "config.yaml"
    if config.resume == "never" or not path.exists():
        return
    try:
        before = msgspec.yaml.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: not readable ({one_line(error)}); choose another name=…") from None
    now = msgspec.to_builtins(config)
    for key in KEPT:
        old, new = _value(before, key), _value(now, key)
        moved = key in PATHS and old is not None and Path(old).resolve() == Path(new).resolve()
        if old not in (None, new) and not moved:
            raise ConfigError(
                f"$.{key}: {path.parent} was begun with {old!r} and would go on with {new!r}; "
                f"set {key}={old}, or begin a new run with another name=…"
            )
    check_group_size(config, _value(before, "algorithm.advantage"))


def check_group_size(config: RunConfig, before: str | None) -> None:
    """Greedy episodes come and go with the advantage, but not within one run: its groups are of one size."""
    from asyncrl.algorithms.advantages import advantages

    now = config.algorithm.advantage
    began = f"$.algorithm.advantage of {run_directory(config) / 'config.yaml'}"
    if before not in (None, now) and advantages.load(before, began).greedy != advantages.load(now).greedy:
        raise ConfigError(
            f"$.algorithm.advantage: {run_directory(config)} was begun with {before!r} and would go on with "
            f"{now!r}, but only one of them wants a greedy episode in each group; resume with the one it "
            "began with"
        )


def _value(tree: Any, key: str) -> Any:
    """By dotted key; None where an older configuration lacks it."""
    for name in key.split("."):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def file_system(path: Path, mounts: str) -> str:
    """Type of the file system that holds `path`, by /proc/self/mounts; '' if unknown."""
    place, best, kind = str(path.resolve()), -1, ""
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        mount = fields[1].replace("\\040", " ")
        inside = mount == "/" or place == mount or place.startswith(f"{mount}/")
        if inside and len(mount) >= best:  # a later mount on the same point hides the earlier
            best, kind = len(mount), fields[2]
    return kind


def _mounts() -> str:
    path = Path("/proc/self/mounts")
    return path.read_text() if path.exists() else ""


# -- the model -------------------------------------------------------------------------------------


def check_model(config: RunConfig) -> None:
    """config.json, weights, tokenizer and chat template are there; long enough contexts."""
    path = Path(config.model.path)
    if not path.is_dir():
        raise ConfigError(f"$.model.path: {path} is no directory; give a local Hugging Face model directory")
    settings = _json(path / "config.json", "the model's configuration")
    if not any(path.glob("*.safetensors")):
        raise ConfigError(f"{path}: no *.safetensors; save the weights with save_pretrained(...)")
    if not (path / "tokenizer.json").is_file():
        raise ConfigError(
            f"{path}: no tokenizer.json; save a fast tokenizer with tokenizer.save_pretrained(...)"
        )
    if not chat_template(path):
        raise ConfigError(
            f"{path}: no chat template; add chat_template.jinja, or chat_template to tokenizer_config.json"
        )
    longest = settings.get("max_position_embeddings")
    if isinstance(longest, int) and longest < config.rollout.max_tokens:
        raise ConfigError(
            f"$.rollout.max_tokens ({config.rollout.max_tokens}) exceeds the model's context ({longest}); "
            "lower it"
        )


def _json(path: Path, what: str) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path}: missing; a model directory needs {what}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not readable as JSON ({error}); write {what} anew") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: is no JSON object; write {what} anew")
    return value


# -- names, data, machine --------------------------------------------------------------------------


def check_names(config: RunConfig) -> Mapping[str, Tool]:
    """Every name of a plug-in is known, what it names can be loaded, and the algorithm's parts fit. The
    tools."""
    from asyncrl.algorithms.recipe import compose
    from asyncrl.conversation.parsers import parsers
    from asyncrl.environments import load_environment
    from asyncrl.gateway import load_agent
    from asyncrl.rollout.components import ENGINE_MODULES, load_scorer, load_toolbox

    toolbox = load_toolbox(config)
    if config.rollout.environment:
        load_environment(config.rollout.environment)
    if config.rollout.agent:
        load_agent(config.rollout.agent)
    load_scorer(config)
    parsers.load(config.rollout.parser)
    compose(config)
    if (
        not config.engine.remote and config.engine.name not in ENGINE_MODULES
    ):  # those are known without the seconds that their import takes
        check_engine(config.engine.name, ENGINE_MODULES.values())
    return toolbox.tools


def check_engine(name: str, built_in: Iterable[str]) -> None:
    """An engine that is not built in; the error lists those that are."""
    from asyncrl.engines.base import engines

    for module in built_in:
        importlib.import_module(module)
    engines.load(name)


def check_data(config: RunConfig, tools: Mapping[str, Tool]) -> None:
    """The data sets load, hold at least a batch, and ask for tools that there are."""
    from asyncrl.data import load_samples

    with quiet():
        paths = [config.data.train, *([config.data.test] if config.data.test else [])]
        loaded = {path: load_samples(path) for path in paths}
    samples = loaded[config.data.train]
    for path, rows in () if config.rollout.agent else loaded.items():  # an agent's data is its own affair
        if found := check_sample_tools(tools, (row.extra_info for row in rows)):
            raise ConfigError(f"{path}: {'; '.join(found)}; add it to rollout.tools, or correct the data")
    needed = config.buffer.groups_per_batch
    if len(samples) < needed:
        raise ConfigError(
            f"{config.data.train}: {len(samples)} samples are less than one batch; lower "
            f"buffer.groups_per_batch ({needed}) or add samples"
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Libraries that log what they also raise would say everything twice."""
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def check_installed(
    config: RunConfig, find: Callable[[str], object | None] = importlib.util.find_spec
) -> None:
    """Optional packages that the configuration asks for."""
    extras = [*config.observe.trackers, *(["ray"] if config.launch.kind == "ray" else [])]
    for extra in extras:  # each is named like its module
        if find(extra) is None:
            raise ConfigError(f"{extra} is not installed; pip install 'asyncrl[{extra}]', or do without it")


def check_chat(config: RunConfig) -> list[str]:
    """Whether the chat template fits who answers the model; warnings. It takes seconds: the workers look
    themselves, before anything else."""
    from asyncrl.rollout.components import chat_warnings, load_chat

    with quiet():
        return chat_warnings(config, load_chat(config))


def chat_template(path: Path) -> str:
    """The text of a model's chat template, '' if it has none."""
    file, inside = path / "chat_template.jinja", path / "tokenizer_config.json"
    if file.is_file():
        return file.read_text()
    settings = _json(inside, "the tokenizer's configuration") if inside.is_file() else {}
    return str(settings.get("chat_template") or "")


def check_devices(config: RunConfig) -> None:
    """A GPU that is asked for exists. On Ray the processes may sit elsewhere."""
    if config.model.device == "cuda" and config.launch.kind == "local":
        import torch

        if not torch.cuda.is_available():
            raise ConfigError("$.model.device is cuda, and torch sees no GPU here; use auto or cpu")


def check_group_address(config: RunConfig) -> None:
    """Servers on other machines are told to join the trainer at an address of its own: one told to join at a
    loopback address would look for the trainer on its own machine, and hang."""
    far = [url for url in config.engine.urls if not loopback(urlsplit(url).hostname or "")]
    if config.weights.transport == "collective" and loopback(config.launch.host) and far:
        raise ConfigError(
            f"$.launch.host: {config.launch.host} cannot be reached by {far[0]}, which weights.transport="
            "collective needs; set launch.host to this machine's address in the servers' network"
        )


def loopback(host: str) -> bool:
    """True for an address, or a name, that means whatever machine it is used on."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_servers(config: RunConfig) -> None:
    """Servers to attach to answer, take our keys, are of a version we know and serve this model; what starts
    a server is there."""
    engine = config.engine
    for key, variable in (("api_key_env", engine.api_key_env), ("admin_key_env", engine.admin_key_env)):
        if variable and not os.environ.get(variable):
            raise ConfigError(f"$.engine.{key}: {variable} is not set; export it, or clear the key")
    if not engine.remote:
        return
    if engine.urls:
        check_urls(config)
    elif engine.server_command and shutil.which(engine.server_command[0]) is None:
        raise ConfigError(
            f"$.engine.server_command: {engine.server_command[0]} is no program; correct it "
            "(for CPU tests: make sglang-cpu)"
        )
    elif not engine.server_command and importlib.util.find_spec("sglang") is None:
        raise ConfigError(
            "$.engine.name is sglang, which is not installed here; pip install sglang, or attach to servers "
            "with engine.urls=[…], or set engine.server_command"
        )


def check_urls(config: RunConfig) -> None:
    """The keepers' own look at a server, ahead of them. It may be in use."""
    import asyncio

    from asyncrl.engines.sglang.process import keys
    from asyncrl.engines.sglang.server import look

    async def check_url(url: str) -> None:
        async with asyncio.timeout(ANSWER):
            await look(config, url, *keys(config.engine))

    for url in config.engine.urls:
        try:
            asyncio.run(check_url(url))
        except TimeoutError:
            raise ConfigError(f"$.engine.urls: {url} does not answer within {ANSWER:g} s") from None
        except EngineError as error:
            raise ConfigError(f"$.engine.urls: {error}") from None


def check_weights_directory(config: RunConfig) -> None:
    """Versions can be written where the configuration says; room for those that are kept at once, where it
    insists on /dev/shm."""
    from asyncrl.weights.disk import room, weights_directory

    size = sum(file.stat().st_size for file in Path(config.model.path).glob("*.safetensors"))
    needed = room(size, config.weights.full_every > 1, config.engine.keepers)
    where = weights_directory(config.weights.directory, run_directory(config), config.name, needed)
    creatable(where, "weights.directory")


def outside_weights(config: RunConfig) -> list[Path]:
    """Where the run's versions, and caches of them, may lie outside of its directory."""
    from asyncrl.weights.disk import weights_directory

    own = {config.weights.directory} - {"auto", "shm", "run"}
    return [weights_directory(at, run_directory(config), config.name, needed_bytes=0) for at in ("shm", *own)]


def warnings(config: RunConfig) -> list[str]:
    """What is allowed and hardly meant, one line each."""
    from asyncrl.conversation.parsers import detect, parsers

    slots = config.rollout.workers * config.rollout.slots
    live = config.buffer.max_live_groups * config.buffer.episodes_per_group
    rows, budget = config.rollout.rows, config.trainer.micro_batch_tokens
    path, parser = Path(config.model.path), config.rollout.parser
    calls = config.rollout.tools or config.rollout.environment or config.rollout.agent
    fitting = detect(chat_template(path)) if calls else None
    found = {
        f"{slots} slots (rollout.workers * rollout.slots) are more than admission will ever fill: {live} "
        "episodes, (1 + target_staleness) * groups_per_batch * episodes_per_group": slots > live,
        f"an episode of {rows} rows (rollout.max_rows) of rollout.max_tokens is more than "
        f"trainer.micro_batch_tokens ({budget}): it is a micro-batch by itself, and needs the memory": (
            rows > 1 and rows * config.rollout.max_tokens > budget
        ),
        f"rollout.parser is {parser}, but the model's chat template looks like {fitting}: calls would be "
        f"taken for text; set rollout.parser={fitting}": fitting not in (None, parser) and parser in parsers,
    }
    return [message for message, applies in found.items() if applies]
