"""Checks before any process starts. Each problem is one ConfigError: what is wrong, and how to correct it."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from asyncrl.config import CheckpointConfig, RunConfig, texts
from asyncrl.data.tasks import task_of
from asyncrl.errors import ConfigError, recorded
from asyncrl.gateway import Command
from asyncrl.isolation.sandbox.detection import check_image
from asyncrl.launch import estimates, memory, placement
from asyncrl.launch.data import IMAGES, Inputs, Note, check, ok, warning
from asyncrl.launch.estimates import count_gpus, on_gpu, sees_gpu, sized
from asyncrl.launch.models import chat_template, check_model
from asyncrl.launch.run_directory import check_resumed, check_run_directory, creatable, run_directory
from asyncrl.launch.servers import check_servers
from asyncrl.observe.trackers import check_trackers
from asyncrl.remote import SCORER
from asyncrl.store.schema import DATABASE, check_schema
from asyncrl.trainer.footprint import own_critic
from asyncrl.types import Message, Sample, ToolCall
from asyncrl.weights.checkpoint_match import AutoClass, check_checkpoint
from asyncrl.weights.model_files import published_bytes
from asyncrl.wire.addresses import EVERY_ADDRESS, own_address

if TYPE_CHECKING:
    from asyncrl.episodes.parts import EpisodeParts

PLACES = "places"  # in the run directory: names of its directories elsewhere, and where it was then
OWN_NAME = re.compile(r"[^/\t]+-[0-9a-f]{8}\t")  # nothing else is removed
SHOWN = 80  # characters of a reply


@check("run directory")
def check_directory(inputs: Inputs) -> Iterator[Note]:
    check_run_directory(inputs.config)
    check_schema(run_directory(inputs.config))
    yield ok(str(run_directory(inputs.config)))


@check("model", needs=("libraries",))
def check_models(inputs: Inputs) -> Iterator[Note]:
    """The models are found, and those of the hub fetched. Later checks read the resolved configuration."""
    check_resumed(inputs.resolved)
    check_model(inputs.resolved)
    yield ok(f"{inputs.config.model.path}: weights, tokenizer and chat template are there")


@check("tensors", needs=("model", "plug-ins"))
def check_tensors(inputs: Inputs) -> Iterator[Note]:
    """The files of each model hold the tensors that its config.json describes: what is missing would be
    initialised at random."""
    checkpoints = list(_checkpoints(inputs))
    with _quiet():
        warnings = [
            check_checkpoint(path, f"{key} {path}", auto_class) for key, path, auto_class in checkpoints
        ]

    yield from map(warning, dict.fromkeys(filter(None, warnings)))
    yield ok(f"the files of {len(checkpoints)} model{'s' * (len(checkpoints) > 1)} fit their config.json")


def _checkpoints(inputs: Inputs) -> Iterator[tuple[str, str, AutoClass]]:
    """Yield the models that this run reads: the key that names each, its directory, and how it is read."""
    config = inputs.config
    yield "model.path", config.model.path, "AutoModelForCausalLM"
    if config.kl.reference:
        yield "kl.reference", config.kl.reference, "AutoModelForCausalLM"
    if own_critic(config):
        key, path = (
            ("critic.path", config.critic.path) if config.critic.path else ("model.path", config.model.path)
        )
        yield key, path, "AutoModel"

    for name, scorer in config.scorers.items():
        is_started_by_run = scorer.path and not scorer.urls
        if is_started_by_run and name != "reward":  # a reward model may be of a class that only SGLang has
            yield f"scorers.{name}.path", scorer.path, "AutoModelForCausalLM"

    for reward in inputs.parts.reward.rewards:
        if reward.source.spec == "classifier":
            path = os.path.expanduser(str(reward.source.options["path"]))
            yield "rollout.reward.classifier.path", path, "AutoModelForSequenceClassification"


@check("launch")
def check_launch(inputs: Inputs) -> Iterator[Note]:
    """Ray and trackers are installed, where they are asked for."""
    config = inputs.config
    if config.launch.kind != "ray" and (config.launch.pools or config.launch.gpus):
        raise ConfigError("launch.pools and launch.gpus are for Ray; set launch=ray, or leave them out")

    for role, gpus in config.launch.gpus.items():
        if (gpus > 1 and gpus % 1) or gpus != round(gpus, 4):
            raise ConfigError(
                f"launch.gpus: Ray reserves no {gpus} GPUs for a process ({role}); give a whole number, or "
                "less than 1 with at most 4 decimals"
            )

    if config.launch.kind == "ray" and importlib.util.find_spec("ray") is None:
        raise ConfigError("launch.kind is ray, which is not installed; pip install 'asyncrl[ray]'")
    check_trackers(config)

    count = config.engine.keepers * config.engine.tp if config.engine.remote else config.rollout.workers
    if config.shifts and (idle := config.trainer.ranks - count):
        yield warning(f"engine.colocated: {idle} of the trainer's devices are idle while engines sample")
    yield ok(f"{len(placement.processes_of(config))} processes")


@check("data", needs=("model", "plug-ins"))
def load_data(inputs: Inputs) -> Iterator[Note]:
    with _quiet():
        data = inputs.samples

    config = inputs.config
    of_some = config.scored_reference and not config.reader("")  # each teacher has sources of its own
    sources = {sample.data_source for sample in data.train} if of_some else set()
    if untaught := sorted(source for source in sources if not config.reader(source)):
        raise ConfigError(
            f"scorers: no teacher has the data source {untaught[0]} among its sources, and its turns would "
            "not be trained; name it there, or add a teacher without sources"
        )

    held_out = f", {len(data.test)} held out" if data.test is not None else ""
    yield ok(f"{len(data.train)} samples{held_out}")
    yield from map(warning, data.warnings)


@check("ground truths", needs=("data",))
def show_truths(inputs: Inputs) -> Iterator[Note]:
    """Say how the first ground truths look to the rewards."""
    yield from map(ok, inputs.samples.truths)


@check("tasks", needs=("data",))
def check_tasks(inputs: Inputs) -> Iterator[Note]:
    """Start a sandbox in the images of some tasks."""
    for task in (tried := inputs.tasks[:IMAGES]):
        with ConfigError.instead_of(ConfigError, text=f"task {task.name}"):
            check_image(task.image, task.user)
    if tried:
        yield ok(f"sandboxes start in {len(tried)} of {len(inputs.tasks)} images; all images are there")


@check("plug-ins", needs=("libraries",))
def check_plugins(inputs: Inputs) -> Iterator[Note]:
    """Every name of a plug-in is known, what it names can be loaded, and the algorithm's parts fit."""
    from asyncrl.algorithms.recipe import compose
    from asyncrl.engines.base import engines

    config = inputs.config
    parts = inputs.parts
    compose(config)  # first: its files may register a shaping
    for part in ("toolbox", "environment", "agent", "reward", "parser"):
        getattr(parts, part)

    if not config.engine.remote and config.engine.name not in engines:
        factory = engines.load(config.engine.name)
        if config.shifts and isinstance(factory, type) and not hasattr(factory, "sleep"):
            raise ConfigError(
                f"engine.name: {config.engine.name} has no sleep, as engine.colocated needs; add sleep and "
                "asleep, or set engine.colocated=0"
            )

    yield ok(f"tools: {', '.join(parts.toolbox.tools) or 'none'}; parser {config.rollout.parser}")


@check("template", needs=("data",))
def check_template(inputs: Inputs) -> Iterator[Note]:
    """The tokenizer is what its file says, and the chat template writes these tools, the first prompt, and
    what answers a turn; or the conversations that are to be learned."""
    from asyncrl.algorithms.recipe import imitates
    from asyncrl.engines.sglang.server import vocabulary_of
    from asyncrl.episodes.parts import check_chat, check_demonstrations, check_token_ids

    parts = inputs.parts
    data = inputs.samples
    with _quiet():
        rows = vocabulary_of(inputs.config.model.path)
        check_token_ids(parts, "data.train", data.train, rows)
        if data.test is not None:
            check_token_ids(parts, "data.test", data.test, rows)

        if not imitates(inputs.config):
            yield from map(warning, check_chat(parts, data.train[0].prompt))
            return

        check_demonstrations(parts, "data.train", data.train)
        if data.test:
            check_demonstrations(parts, "data.test", data.test)


@check("chat", needs=("template",))
def describe_chat(inputs: Inputs) -> Iterator[Note]:
    """Show how turns end, and the first prompt exactly as the model reads it."""
    with _quiet():
        rules = inputs.parts.rules

    ends = rules.chat.stop_ids
    stops = ", ".join(f"{rules.chat.decode([end, end])} ({end})" for end in ends)
    yield ok(f"the tokenizer reads and writes as tokenizer.json does; a turn ends with {stops or 'no token'}")

    if ids := inputs.prompt:
        count = f"the first prompt has {len(ids)} tokens of {inputs.config.rollout.max_tokens}"
        yield ok(f"{count}:\n{rules.chat.decode(ids)}")


@check("sample", needs=("template",))
def check_sample(inputs: Inputs) -> Iterator[Note]:
    sample = inputs.samples.train[0]
    if not (inputs.config.rollout.agent or sample.demonstration):
        yield from asyncio.run(try_sample(inputs.parts, sample))


async def try_sample(parts: EpisodeParts, sample: Sample) -> list[Note]:
    """Tries a call of each tool, with arguments made from its schema, and the rewards of two answers to a
    sample: its ground truth, and nothing."""
    from asyncrl.rewards import RewardInput
    from asyncrl.tools.toolbox import call_tool

    found = list[Note]()

    for name, tool in parts.toolbox.tools.items():
        call = ToolCall(name, msgspec.json.encode(_arguments(tool.schema["function"])).decode())
        reply = await call_tool(tool, call, parts.toolbox.timeout, sample)
        line = f"{name}({call.arguments}) replies {reply.content[:SHOWN]!r}"
        found.append(warning(f"{line}; perhaps its made-up arguments are why") if reply.error else ok(line))

    truth = json.loads(sample.ground_truth)
    reward = parts.reward
    right = ("its ground truth", truth if isinstance(truth, str) else sample.ground_truth)
    answers = [right] * (truth is not None) + [("no text", "")]

    if task_of(sample):  # what changed is judged, and no answer
        answers = []
        found.append(ok("the tests of tasks are tried by asyncrl tasks check"))
    elif any(text.startswith(SCORER) for text in texts(parts.config.rollout.reward)):
        answers = []
        found.append(ok("rewards are not tried: their scorer is not up"))

    try:
        for what, answer in answers:
            said = (*sample.prompt, Message("assistant", answer))
            with recorded() as failure:
                score = (
                    f"{(await reward.score(RewardInput(sample, answer, said, transcript=answer))).score:g}"
                )
                score += " (it may look for a format around it)" * (score == "0" and bool(answer))

            why = f"rollout.reward fails for {what} as the answer to the first sample: {failure.line}"
            found.append(warning(why) if failure else ok(f"{what} as the answer scores {score}"))
    finally:
        await parts.close()
    return found


def _arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    """Make arguments that a tool's schema takes: first choices, or 1."""
    schema = function.get("parameters", {})
    kinds = {"string": "1", "boolean": True, "array": [], "object": {}}
    known = schema.get("properties") or {}
    needed = {key: known.get(key, {}) for key in schema.get("required", ())}
    return {
        key: [*part.get("enum", ()), kinds.get(str(part.get("type")), 1)][0] for key, part in needed.items()
    }


@check("device", needs=("libraries",))
def check_device(inputs: Inputs) -> Iterator[Note]:
    """Check that there is a GPU if one is asked for, and one for each rank, and that servers share theirs."""
    config = inputs.config
    count = count_gpus(inputs.config)
    if config.model.device == "cuda" and sees_gpu(config) is False:
        raise ConfigError("model.device is cuda, and torch sees no GPU here; use auto or cpu")

    used = placement.dealt(config, count) if count else {}
    ranks = sum(name.startswith(placement.TRAINER) for name in used)
    if ranks > count:
        raise ConfigError(
            f"trainer.ranks={ranks}: each needs a GPU of its own, and torch sees {count}; lower it"
        )

    roles = placement.ENGINE, placement.SCORER
    servers = Counter(gpu for name in used if name.startswith(roles) for gpu in used[name])
    shared = sorted(gpu for gpu in servers if servers[gpu] > 1 or gpu < ranks)

    if shared and not config.shifts and "mem-fraction-static" not in config.engine.server_args:
        yield warning(
            f"servers share GPUs {', '.join(map(str, shared))} with others, and each would take 0.85 of the "
            "memory; set engine.server_args={mem-fraction-static: 0.4} or less, or start fewer"
        )

    yield ok(f"model.device={inputs.config.model.device}, {inputs.config.model.dtype}")


@check("memory", needs=("model",))
def check_room(inputs: Inputs) -> Iterator[Note]:
    if inputs.config.total_steps:
        memory.check_memory(inputs.config, sees_gpu(inputs.config))
        yield ok("has room for weights, gradients and optimizer state")


@check("weights", needs=("model",))
def check_weights_directory(inputs: Inputs) -> Iterator[Note]:
    """Versions can be written where the configuration says; where it insists on /dev/shm, there is room for
    as many as are kept."""
    from asyncrl.weights.disk import space_needed, weights_directory

    config = inputs.config
    needed = space_needed(config, published_bytes(config))
    where = weights_directory(config.weights.directory, run_directory(config), config.name, needed)
    creatable(where, "weights.directory")
    yield ok(f"versions go to {where}, at most {sized(needed)} at once")


@check("checkpoints")
def check_checkpoint_directory(inputs: Inputs) -> Iterator[Note]:
    """Checkpoints can be written to a directory; what is elsewhere the trainer finds out. Those that a resume
    needs are there; it may do without."""
    from asyncrl.store.checkpoints import checkpoints_of
    from asyncrl.store.reader import RunReader

    config = inputs.config
    run_dir = run_directory(inputs.config)
    place = checkpoints_of(config, run_dir)
    database = run_dir / DATABASE

    if place.local and config.checkpoint.directory:
        creatable(Path(place.root), "checkpoint.directory")

    if database.exists() and database.stat().st_size:
        with closing(RunReader.open(run_dir)) as reader:
            known = reader.checkpoints()
            first = reader.covered

        if known and max(place.steps(), default=-1) < first:
            gone = f"{place.root}: the run's checkpoints, up to step {known[-1]}, are gone"
            if first:
                raise ConfigError(f"{gone}; put them back, or begin a new run with another name=…")
            yield warning(f"{gone}: all steps are repeated from their plans")
    elif config.checkpoint.directory and place.steps():
        raise ConfigError(
            f"checkpoint.directory: {place.root} holds checkpoints of a run of this name, of which there is "
            f"nothing in {run_dir}; choose another name=…, or restore that directory"
        )

    yield ok(config.checkpoint.directory or "in the run directory")


@check("servers")
def check_remote(inputs: Inputs) -> Iterator[Note]:
    check_servers(inputs.config)
    used = inputs.config.engine.remote or inputs.config.scorers
    yield ok("keys, addresses and commands" if used else "none")


def outside_weights(config: RunConfig) -> list[Path]:
    """Directories outside the run directory in which its versions, and caches of them, may lie: of this
    launch, and of those that `record_place` recorded. Where such a place is still another directory, this one
    was copied from it: its versions are not ours."""
    from asyncrl.weights.disk import SHARED_MEMORY, own_name

    run_dir = run_directory(config)
    own = {config.weights.directory} - {"auto", "shm", "run"}

    record = run_dir / PLACES
    lines = filter(OWN_NAME.match, record.read_text().splitlines() if record.exists() else ())
    earlier = [line.split("\t", 1) for line in lines]
    gone = (name for name, at in earlier if not os.path.exists(at) or os.path.samefile(at, run_dir))

    parents = (f"{SHARED_MEMORY}/asyncrl-", *(f"{at}/" for at in own))
    return [Path(at + name) for name in (own_name(run_dir, config.name), *gone) for at in parents]


def record_place(config: RunConfig) -> None:
    """Record the name of this launch's directories in `outside_weights`, and where its run directory is: the
    next one may run under another host name, or find the run directory moved."""
    from asyncrl.weights.disk import own_name

    run_dir = run_directory(config)
    with (run_dir / PLACES).open("a") as file:
        file.write(f"{own_name(run_dir, config.name)}\t{run_dir.resolve()}\n")


@check("settings", needs=("model",))
def check_settings(inputs: Inputs) -> Iterator[Note]:
    """Warn of what is valid, but probably a mistake."""
    from asyncrl.conversation.parsers import detect, parsers
    from asyncrl.episodes.parts import shown_calls

    config = inputs.config
    gpu = sees_gpu(inputs.config)
    trains = inputs.config.total_steps > 0
    rollout = config.rollout
    engine = config.engine
    parser = config.rollout.parser
    slots = rollout.workers * rollout.slots
    live = config.buffer.max_live_groups * config.buffer.episodes_per_group

    if trains and slots > live:
        ahead = config.buffer.max_live_groups / config.buffer.groups_per_batch - 1
        yield warning(
            f"at most {live} episodes run at once, (1 + {ahead:g}, by target_staleness) * groups_per_batch * "
            f"episodes_per_group: {slots - live} of {slots} slots (rollout.workers * rollout.slots) stay "
            "empty"
        )

    longest = rollout.rows * rollout.max_tokens
    budget = config.trainer.micro_batch_tokens
    if trains and longest > budget:
        yield warning(
            f"an episode may have {longest} tokens (rollout.max_tokens, times max_rows), more than "
            f"trainer.micro_batch_tokens ({budget}): it is a micro-batch by itself, and needs the memory"
        )

    if gpu is False and engine.remote and not (engine.urls or engine.server_command):
        yield warning(
            "engine=sglang starts servers on GPUs, and torch sees none here; on a CPU, make sglang-cpu, "
            "then engine=sglang_cpu"
        )

    if trains and not config.checkpoint.every and config.total_steps > CheckpointConfig().every:
        yield warning(
            "checkpoint.every=0: until the checkpoint at the end, or at a 1,000th step, all turns stay on "
            "the disk, what is known of them in memory, and a crash costs all steps since"
        )

    if gpu is False and config.trainer.offload_optimizer:
        yield warning("trainer.offload_optimizer has no effect on a CPU, where all is in main memory")

    calls = (rollout.tools or rollout.environment or rollout.agent) and parser in parsers
    fitting = detect(chat_template(config)) if calls else None
    if fitting not in (None, parser):
        yield warning(
            f"rollout.parser is {parser}, but the model's chat template looks like {fitting}: calls would be "
            f"taken for text; set rollout.parser={fitting}"
        )

    unsure = calls and rollout.tools and not fitting and inputs.loaded  # or its check has failed
    if unsure and not shown_calls(inputs.parts, inputs.samples.train[0].prompt):
        yield warning(
            f"rollout.parser is {parser}, and the chat template does not show how the model writes calls: in "
            f"another format they would be taken for text; others are {', '.join(parsers.names())}, or your "
            "own (docs/parsers.md)"
        )

    if trains:
        yield from map(warning, estimates.cost_warnings(config, gpu))


@check("cluster", needs=("launch",))
def describe_cluster(inputs: Inputs) -> Iterator[Note]:
    """Say which processes would go where on the Ray cluster, a line for each machine; none without one.
    Raises ConfigError where it cannot have them all."""
    launch = inputs.config.launch
    if launch.kind == "ray" and launch.ray_address:
        from asyncrl.launch.ray import planned

        with _quiet():
            here = own_address() if launch.host == EVERY_ADDRESS else launch.host
            yield from map(ok, planned(inputs.config, here))


@check("estimate", needs=("data", "memory"))
def estimate(inputs: Inputs) -> Iterator[Note]:
    if inputs.config.total_steps:
        config = inputs.config
        gpu = sees_gpu(inputs.config)
        prompt = len(inputs.prompt)
        train = len(inputs.samples.train)
        test = len(inputs.samples.test or ())

        yield from map(ok, estimates.describe_work(config, train, test, prompt))
        yield from map(ok, _describe_side_requests(inputs))
        yield from map(ok, estimates.describe_costs(config, gpu))
        yield from memory.describe_memory(config, gpu)
        if on_gpu(config, gpu) is False and not inputs.samples.train[0].demonstration:
            yield from map(ok, estimates.describe_time(config, test, prompt))


def _describe_side_requests(inputs: Inputs) -> Iterator[str]:
    """Say that all requests of an agent are trained where none is told to be a side request. How many it will
    make nobody knows before it has run."""
    rollout = inputs.config.rollout
    agent = inputs.parts.agent
    is_tested = isinstance(agent, Command) and agent.harness.tested
    if rollout.agent and not rollout.untrained_agents and not is_tested:
        yield (
            "agent: all of its requests are trained with the episode's reward, side requests (titles, commit "
            "messages) included, unless rollout.untrained_agents names them; rollout/rows/mean above 1 means "
            "that there is more than one conversation per episode"
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the logs of libraries, which raise the same errors."""
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
