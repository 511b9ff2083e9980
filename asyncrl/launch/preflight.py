"""Checks the run before any process starts. Each fault is one ConfigError with its cause and its cure."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from asyncrl.config import CheckpointConfig, RunConfig, texts
from asyncrl.data.tasks import task_of
from asyncrl.engines.sglang.arguments import draft_warning
from asyncrl.episodes.image_checks import refused_images
from asyncrl.errors import AsyncrlError, ConfigError, recorded
from asyncrl.gateway import Command
from asyncrl.isolation.sandbox.detection import check_image
from asyncrl.launch import estimates, memory, placement
from asyncrl.launch.architecture import architecture_name
from asyncrl.launch.estimates import count_gpus, format_bytes, sees_gpu, uses_gpu
from asyncrl.launch.inputs import MAX_TRIED_IMAGES, Inputs
from asyncrl.launch.models import chat_template, check_model, check_not_quantized
from asyncrl.launch.notes import Note, ok, preflight_check, warning
from asyncrl.launch.run_directory import check_creatable, check_resumed, check_run_directory, run_directory
from asyncrl.launch.servers import check_servers
from asyncrl.observe.trackers import check_trackers
from asyncrl.remote import SCORER_PREFIX
from asyncrl.store.schema import DATABASE, check_schema
from asyncrl.trainer.footprint import needs_critic
from asyncrl.types import Message, Sample, ToolCall
from asyncrl.vision.layout import is_vision_model
from asyncrl.weights.checkpoint_match import check_checkpoint
from asyncrl.weights.trained_tensors import published_bytes
from asyncrl.wire.addresses import EVERY_ADDRESS, own_address

if TYPE_CHECKING:
    from asyncrl.episodes.parts import EpisodeParts
    from asyncrl.model_class import ModelRole
    from asyncrl.tools.toolbox import Toolbox

# File in the run directory: names of the run's directories elsewhere, and the run directory's path then.
PLACES_FILE = "places"
OWN_NAME_LINE = re.compile(r"[^/\t]+-[0-9a-f]{8}\t")  # Directories with other names are never removed.
SHOWN_CHARACTERS = 80  # Characters of a reply in a note.
MAX_ERROR_CHARACTERS = 300  # Characters of an error reply, whose end may name the cause.


@preflight_check("run directory")
def check_directory(inputs: Inputs) -> Iterator[Note]:
    check_run_directory(inputs.config)
    check_schema(run_directory(inputs.config))
    yield ok(str(run_directory(inputs.config)))


@preflight_check("model", requires=("libraries",))
def check_models(inputs: Inputs) -> Iterator[Note]:
    """Check that the models exist, and fetch models of the hub. Later checks read the resolved
    configuration."""
    check_resumed(inputs.resolved_config)
    check_not_quantized(inputs.resolved_config)
    check_model(inputs.resolved_config)
    yield ok(f"{inputs.config.model.path}: weights, tokenizer and chat template are present")


@preflight_check("tensors", requires=("model", "plug-ins"))
def check_tensors(inputs: Inputs) -> Iterator[Note]:
    """Check that the files of each model hold the tensors that its config.json describes: missing tensors
    would be initialised at random."""
    checkpoints = list(_read_checkpoints(inputs))
    with _silenced_libraries():
        warnings = [check_checkpoint(path, f"{key} {path}", role) for key, path, role in checkpoints]

    yield from map(warning, dict.fromkeys(filter(None, warnings)))
    yield ok(f"the files of {len(checkpoints)} model{'s' * (len(checkpoints) > 1)} match their config.json")


def _read_checkpoints(inputs: Inputs) -> Iterator[tuple[str, str, ModelRole]]:
    """Yield the models that this run reads: the key that names a model, its directory, and what the
    model is read for."""
    config = inputs.config
    yield "model.path", config.model.path, "language model"
    if config.kl.reference:
        yield "kl.reference", config.kl.reference, "language model"
    if needs_critic(config):
        if config.critic.path:
            yield "critic.path", config.critic.path, "backbone"
        else:
            yield "model.path", config.model.path, "backbone"

    for name, scorer in config.scorers.items():
        is_started_by_run = scorer.path and not scorer.urls
        if is_started_by_run and name != "reward":  # A reward model may have a class that only SGLang knows.
            yield f"scorers.{name}.path", scorer.path, "language model"

    for reward in inputs.parts.reward.rewards:
        if reward.source.spec == "classifier":
            path = os.path.expanduser(str(reward.source.options["path"]))
            yield "rollout.reward.classifier.path", path, "classifier"


@preflight_check("launch")
def check_launch(inputs: Inputs) -> Iterator[Note]:
    """Check that keys for Ray are used with Ray, and that Ray and trackers are installed if the configuration
    asks for them. Warn about devices of the trainer that are idle while engines sample."""
    config = inputs.config
    if config.launch.kind != "ray" and (config.launch.pools or config.launch.gpus):
        raise ConfigError("launch.pools and launch.gpus require Ray; set launch=ray, or remove these keys")

    for role, gpus in config.launch.gpus.items():
        if (gpus > 1 and gpus % 1) or gpus != round(gpus, 4):
            raise ConfigError(
                f"launch.gpus: Ray cannot reserve {gpus} GPUs for a process ({role}); use a whole number, or "
                "a fraction below 1 with at most 4 decimal places"
            )

    if config.launch.kind == "ray" and importlib.util.find_spec("ray") is None:
        raise ConfigError("launch.kind=ray: Ray is not installed; run pip install 'asyncrl[ray]'")
    check_trackers(config)

    engine_count = (
        config.engine.server_count * config.engine.tp if config.engine.remote else config.rollout.workers
    )
    if config.shifts and (idle_devices := config.trainer.ranks - engine_count):
        yield warning(
            f"engine.colocated leaves {idle_devices} of the trainer's devices idle while engines sample"
        )
    yield ok(f"{len(placement.plan_units(config))} processes")


@preflight_check("data", requires=("model", "plug-ins"))
def load_data(inputs: Inputs) -> Iterator[Note]:
    with _silenced_libraries():
        run_data = inputs.run_data

    config = inputs.config
    # Each teacher has its own data sources.
    sources_matter = config.scored_reference and not config.reader("")
    data_sources = {sample.data_source for sample in run_data.train} if sources_matter else set()
    if untaught_sources := sorted(source for source in data_sources if not config.reader(source)):
        raise ConfigError(
            f"scorers: no teacher lists the data source {untaught_sources[0]} in its sources, so turns from "
            "this source would not be trained on; add the source to a teacher, or add a teacher without "
            "sources"
        )

    held_out_text = f", {len(run_data.test)} held out" if run_data.test is not None else ""
    yield ok(f"{len(run_data.train)} samples{held_out_text}")
    yield from map(warning, run_data.warnings)


@preflight_check("ground truths", requires=("data",))
def show_truths(inputs: Inputs) -> Iterator[Note]:
    """Describe how the rewards read the first ground truths."""
    yield from map(ok, inputs.run_data.truth_lines)


@preflight_check("data's images", requires=("data",))
def show_images(inputs: Inputs) -> Iterator[Note]:
    """Describe how many images the data have, how they were changed, and how many tokens they have, or why
    other images become notes."""
    yield from map(ok, inputs.run_data.image_lines)
    rollout = inputs.config.rollout
    model = inputs.config.model
    shows_notes = is_vision_model(model.path) and not model.read_images
    if shows_notes and (rollout.tools or rollout.environment or rollout.agent):
        reason = refused_images(inputs.config) or "model.read_images=false"
        yield warning(f"images of tools, environments and agents become notes: {reason}")


@preflight_check("tasks", requires=("data",))
def check_tasks(inputs: Inputs) -> Iterator[Note]:
    """Start a sandbox in the images of some tasks."""
    for task in (tried_tasks := inputs.image_tasks[:MAX_TRIED_IMAGES]):
        with ConfigError.instead_of(ConfigError, text=f"task {task.name}"):
            check_image(task.image, task.user)
    if tried_tasks:
        yield ok(
            f"sandboxes start from the tested images ({len(tried_tasks)} of {len(inputs.image_tasks)}); all "
            "images are present"
        )


@preflight_check("plug-ins", requires=("libraries",))
def check_plugins(inputs: Inputs) -> Iterator[Note]:
    """Check that every plug-in has a known name and can be loaded, and that the algorithm's parts fit
    together."""
    from asyncrl.algorithms.recipe import compose
    from asyncrl.engines.base import engines

    config = inputs.config
    parts = inputs.parts
    compose(config)  # First, as files of the recipe may register a shaping.
    for part_name in ("toolbox", "environment", "agent", "reward", "parser"):
        getattr(parts, part_name)

    if not config.engine.remote and config.engine.name not in engines:
        engine_factory = engines.load(config.engine.name)
        if config.shifts and isinstance(engine_factory, type) and not hasattr(engine_factory, "sleep"):
            raise ConfigError(
                f"engine.name: {config.engine.name} does not support sleep, which engine.colocated requires; "
                "implement the methods sleep and asleep, or set engine.colocated=0"
            )

    yield ok(f"tools: {', '.join(parts.toolbox.tools) or 'none'}; parser {config.rollout.parser}")


@preflight_check("reset of tools", requires=("data", "plug-ins"))
def check_reset(inputs: Inputs) -> Iterator[Note]:
    """Check that the first sample has the columns that the `reset` of classes of tools needs."""
    from asyncrl.tools.toolbox import check_reset_columns

    sample = inputs.run_data.train[0]
    if not sample.demonstration:
        try:
            check_reset_columns(inputs.parts.toolbox.tools, sample)
        except TypeError as error:
            raise ConfigError(f"rollout.tools: {error}") from error
        yield ok("the first sample has the columns that tools need")


@preflight_check("template", requires=("data",))
def check_template(inputs: Inputs) -> Iterator[Note]:
    """Check that the tokenizer is the one that its file describes, and that the chat template writes the
    tools, the first prompt and the replies to a turn; or the conversations to be learned."""
    from asyncrl.algorithms.recipe import imitates
    from asyncrl.engines.sglang.server import vocabulary_size_of
    from asyncrl.episodes.parts import (
        check_chat,
        check_demonstrations,
        check_images_written,
        check_token_ids,
    )

    parts = inputs.parts
    run_data = inputs.run_data
    with _silenced_libraries():
        vocabulary_rows = vocabulary_size_of(inputs.config.model.path)
        check_token_ids(parts, "data.train", run_data.train, vocabulary_rows)
        if run_data.test is not None:
            check_token_ids(parts, "data.test", run_data.test, vocabulary_rows)

        if run_data.train_images is not None:
            check_images_written(parts, "data.train", run_data.train)
        if run_data.test is not None and run_data.test_images is not None:
            check_images_written(parts, "data.test", run_data.test)

        if not imitates(inputs.config):
            yield from map(warning, check_chat(parts, run_data.train[0].prompt))
            return

        check_demonstrations(parts, "data.train", run_data.train)
        if run_data.test:
            check_demonstrations(parts, "data.test", run_data.test)


@preflight_check("chat", requires=("template",))
def describe_chat(inputs: Inputs) -> Iterator[Note]:
    """Show how turns end, and the first prompt exactly as the model reads it."""
    with _silenced_libraries():
        rules = inputs.parts.rules

    stop_ids = rules.chat.stop_ids
    stops_text = ", ".join(f"{rules.chat.decode([stop_id, stop_id])} ({stop_id})" for stop_id in stop_ids)
    yield ok(
        "the tokenizer encodes and decodes as tokenizer.json does; a turn ends with "
        f"{stops_text or 'no token'}"
    )

    if prompt_ids := inputs.first_prompt:
        count_text = (
            f"the first prompt has {len(prompt_ids)} tokens (maximum: {inputs.config.rollout.max_tokens})"
        )
        yield ok(f"{count_text}:\n{rules.chat.decode(prompt_ids)}")


@preflight_check("sample", requires=("template",))
def check_sample(inputs: Inputs) -> Iterator[Note]:
    sample = inputs.run_data.train[0]
    if not (inputs.config.rollout.agent or sample.demonstration):
        yield from asyncio.run(try_sample(inputs.parts, sample))


async def try_sample(parts: EpisodeParts, sample: Sample) -> list[Note]:
    """Call each tool once, with arguments made from its schema, and score two answers to a sample: its ground
    truth and an empty answer."""
    from asyncrl.rewards import RewardInput
    from asyncrl.tools.toolbox import call_tool

    notes = list[Note]()

    for name, tool in parts.toolbox.tools.items():
        call = ToolCall(name, msgspec.json.encode(_placeholder_arguments(tool.schema["function"])).decode())
        reply = await call_tool(tool, call, parts.toolbox.timeout, sample)
        shown_length = MAX_ERROR_CHARACTERS if reply.error else SHOWN_CHARACTERS
        line = f"{name}({call.arguments}) returns {reply.content[:shown_length]!r}"
        notes.append(
            warning(f"{line}; the placeholder arguments may be the cause") if reply.error else ok(line)
        )

    truth = sample.ground_truth
    answers = [("an empty text", "")]
    if truth is not None:
        answers.insert(0, ("the ground truth", truth if isinstance(truth, str) else sample.ground_truth_json))

    if task_of(sample):  # Rewards of tasks judge changed files, not answers
        answers = []
        notes.append(ok("the reward is not tested here; asyncrl tasks check runs the tasks' tests"))
    elif any(text.startswith(SCORER_PREFIX) for text in texts(parts.config.rollout.reward)):
        answers = []
        notes.append(ok("rewards are not tested, because their scorer is not running"))

    try:
        tools_result = None
        if answers:
            with recorded() as failure:
                tools_result = await _result_without_calls(parts.toolbox, sample)
            if failure:
                notes.append(warning(f"the tools fail to return a result for the reward: {failure.line}"))

        for answer_name, answer in answers:
            messages = (*sample.prompt, Message("assistant", answer))
            with recorded() as failure:
                reward_input = RewardInput(sample, answer, messages, transcript=answer, result=tools_result)
                result = await parts.reward.score_episode(reward_input)
                score_text = f"{result.score:g}"
                if score_text == "0" and answer:
                    score_text += " (the reward may expect a format around the answer)"

            failure_text = (
                f"rollout.reward fails if the answer to the first sample is {answer_name}: {failure.line}"
            )
            notes.append(
                warning(failure_text) if failure else ok(f"as an answer, {answer_name} scores {score_text}")
            )
    finally:
        await parts.close()
    return notes


async def _result_without_calls(toolbox: Toolbox, sample: Sample) -> dict[str, Any] | None:
    """Return what the objects of tools leave for the reward of an episode without calls; None if they cannot
    be opened, which the calls of the tools have reported. ToolError or SetupError: the result fails."""
    session = toolbox.session(sample)
    try:
        try:
            await session.open()
        except AsyncrlError:
            return None
        return await session.result()
    finally:
        await session.close()


def _placeholder_arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    """Make arguments that a tool's schema accepts: first choices, or 1."""
    schema = function.get("parameters", {})
    values_by_type = {"string": "1", "boolean": True, "array": [], "object": {}}
    properties = schema.get("properties") or {}
    required_properties = {key: properties.get(key, {}) for key in schema.get("required", ())}
    return {
        key: [*property_schema.get("enum", ()), values_by_type.get(str(property_schema.get("type")), 1)][0]
        for key, property_schema in required_properties.items()
    }


@preflight_check("device", requires=("libraries",))
def check_device(inputs: Inputs) -> Iterator[Note]:
    """Check that there is a GPU if the configuration asks for GPUs, and one for each rank. Warn about servers
    that share GPUs."""
    config = inputs.config
    gpu_count = count_gpus(config)
    if config.model.device == "cuda" and sees_gpu(config) is False:
        raise ConfigError("model.device is cuda, but torch sees no GPU here; use auto or cpu")

    assigned_gpus = placement.assign_gpus(config, gpu_count) if gpu_count else {}
    rank_count = sum(name.startswith(placement.TRAINER) for name in assigned_gpus)
    if rank_count > gpu_count:
        raise ConfigError(
            f"trainer.ranks={rank_count}: each rank needs its own GPU, but torch sees {gpu_count}; lower "
            "trainer.ranks"
        )

    server_roles = placement.ENGINE, placement.SCORER
    server_counts = Counter(
        gpu for name in assigned_gpus if name.startswith(server_roles) for gpu in assigned_gpus[name]
    )
    shared_gpus = sorted(gpu for gpu in server_counts if server_counts[gpu] > 1 or gpu < rank_count)

    if shared_gpus and not config.shifts and "mem-fraction-static" not in config.engine.server_args:
        yield warning(
            f"servers share GPUs {', '.join(map(str, shared_gpus))} with other processes, but each server "
            "would take 85% of the memory; set engine.server_args={mem-fraction-static: 0.4} (or a lower "
            "value), or start fewer servers"
        )

    yield ok(f"model.device={config.model.device}, {config.model.dtype}")


@preflight_check("memory", requires=("model",))
def check_memory_room(inputs: Inputs) -> Iterator[Note]:
    if inputs.config.total_steps:
        memory.check_memory(inputs.config, sees_gpu(inputs.config))
        yield ok("enough for weights, gradients and optimizer state")


@preflight_check("weights", requires=("model",))
def check_weights_directory(inputs: Inputs) -> Iterator[Note]:
    """Check that versions can be written to the configured directory; if /dev/shm is configured, check that
    it has room for all versions that are kept."""
    from asyncrl.weights.disk import space_needed, weights_directory

    config = inputs.config
    needed_bytes = space_needed(config, published_bytes(config))
    directory = weights_directory(config.weights.directory, run_directory(config), config.name, needed_bytes)
    check_creatable(directory, "weights.directory")
    yield ok(f"versions are written to {directory} and take at most {format_bytes(needed_bytes)} at once")


@preflight_check("checkpoints")
def check_checkpoint_directory(inputs: Inputs) -> Iterator[Note]:
    """Check that checkpoints can be written to the configured directory; the trainer checks URLs. Check that
    the checkpoints that a resumed run needs exist, unless the run can do without."""
    from asyncrl.store.checkpoints import checkpoints_of
    from asyncrl.store.reader import RunReader

    config = inputs.config
    run_dir = run_directory(config)
    checkpoints = checkpoints_of(config, run_dir)
    database = run_dir / DATABASE

    if checkpoints.is_local and config.checkpoint.directory:
        check_creatable(Path(checkpoints.root), "checkpoint.directory")

    if database.exists() and database.stat().st_size:
        with closing(RunReader.open(run_dir)) as reader:
            recorded_steps = reader.checkpoints()
            covered_step = reader.covered_step

        if recorded_steps and max(checkpoints.steps(), default=-1) < covered_step:
            gone_text = (
                f"{checkpoints.root}: the run's checkpoints (up to step {recorded_steps[-1]}) are missing"
            )
            if covered_step:
                raise ConfigError(f"{gone_text}; restore these files, or start a new run with another name=…")
            yield warning(f"{gone_text}, so all steps will be repeated from their plans")
    elif config.checkpoint.directory and checkpoints.steps():
        raise ConfigError(
            f"checkpoint.directory: {checkpoints.root} holds checkpoints of a run with this name, but "
            f"{run_dir} does not contain that run; choose another name=…, or restore the run directory"
        )

    yield ok(config.checkpoint.directory or "in the run directory")


@preflight_check("servers")
def check_remote(inputs: Inputs) -> Iterator[Note]:
    config = inputs.config
    check_servers(config)
    uses_servers = config.engine.remote or config.scorers
    starts_engines = config.engine.remote and not config.engine.urls
    if starts_engines and (draft_text := draft_warning(config.engine.server_args)):
        yield warning(f"engine.server_args: {draft_text}")
    yield ok("keys, addresses and commands are valid" if uses_servers else "none")


def outside_weights(config: RunConfig) -> list[Path]:
    """Return directories outside the run directory in which the run's versions, and caches of versions, may
    lie: of this launch, and of launches that `record_launch_name` has recorded. If a recorded run directory
    still exists elsewhere, this run directory is a copy, and versions of the original are left alone."""
    from asyncrl.weights.disk import SHARED_MEMORY, unique_run_name

    run_dir = run_directory(config)
    configured_directories = {config.weights.directory} - {"auto", "shm", "run"}

    places_file = run_dir / PLACES_FILE
    recorded_lines = filter(
        OWN_NAME_LINE.match, places_file.read_text().splitlines() if places_file.exists() else ()
    )
    earlier_places = [line.split("\t", 1) for line in recorded_lines]
    earlier_names = (
        name
        for name, earlier_run_dir in earlier_places
        if not os.path.exists(earlier_run_dir) or os.path.samefile(earlier_run_dir, run_dir)
    )

    name_prefixes = (f"{SHARED_MEMORY}/asyncrl-", *(f"{path}/" for path in configured_directories))
    names = (unique_run_name(run_dir, config.name), *earlier_names)
    return [Path(prefix + name) for name in names for prefix in name_prefixes]


def record_launch_name(config: RunConfig) -> None:
    """Record for `outside_weights` the name of this launch's directories, and the place of its run directory:
    the next launch may run under another host name, or after the run directory was moved."""
    from asyncrl.weights.disk import unique_run_name

    run_dir = run_directory(config)
    with (run_dir / PLACES_FILE).open("a") as file:
        file.write(f"{unique_run_name(run_dir, config.name)}\t{run_dir.resolve()}\n")


@preflight_check("settings", requires=("model",))
def check_settings(inputs: Inputs) -> Iterator[Note]:
    """Warn about settings that are valid, but probably a mistake."""
    from asyncrl.conversation.parsers import detect, parsers
    from asyncrl.episodes.parts import shown_calls

    config = inputs.config
    has_gpu = sees_gpu(config)
    is_training = config.total_steps > 0
    rollout = config.rollout
    engine = config.engine
    parser = rollout.parser
    slot_count = rollout.workers * rollout.slots
    live_episodes = config.buffer.max_live_groups * config.buffer.episodes_per_group

    if is_training and slot_count > live_episodes:
        batches_ahead = config.buffer.max_live_groups / config.buffer.groups_per_batch - 1
        yield warning(
            f"at most {live_episodes} episodes run at once, so {slot_count - live_episodes} of {slot_count} "
            "slots (rollout.workers * rollout.slots) stay empty: the limit is one batch "
            f"(groups_per_batch * episodes_per_group episodes) plus {batches_ahead:g} times as many for "
            "later batches (target_staleness)"
        )

    longest_episode = rollout.rows * rollout.max_tokens
    token_budget = config.trainer.micro_batch_tokens
    if is_training and longest_episode > token_budget:
        yield warning(
            f"an episode may have {longest_episode} tokens (rollout.max_tokens times rollout.max_rows), "
            f"more than trainer.micro_batch_tokens ({token_budget}); an episode of this length forms a "
            "micro-batch by itself and needs more memory"
        )

    if has_gpu is False and engine.remote and not (engine.urls or engine.server_command):
        yield warning(
            "engine=sglang starts servers on GPUs, but torch sees none here; on a CPU, run make sglang-cpu, "
            "then set engine=sglang_cpu"
        )

    if engine.urls and config.model.train_vision:
        yield warning(
            "engine.urls: with model.train_vision=true, start the servers with SGLANG_VLM_CACHE_SIZE_MB=0; "
            "otherwise they sample with outputs of the vision tower's earlier weights"
        )

    if is_training and not config.checkpoint.every and config.total_steps > CheckpointConfig().every:
        yield warning(
            "checkpoint.every=0: checkpoints are written only every 1,000 steps and at the end; until "
            "then, all turns stay on disk and their records in memory, and a crash loses all steps since "
            "the last checkpoint"
        )

    if has_gpu is False and config.trainer.offload_optimizer:
        yield warning("trainer.offload_optimizer has no effect on a CPU, where everything is in main memory")

    writes_calls = (rollout.tools or rollout.environment or rollout.agent) and parser in parsers
    written_call = None
    detected_parser = None
    if writes_calls:
        with suppress(ConfigError):  # a template that is refused is reported by another check
            written_call = inputs.parts.chat.written_call()
        detected_parser = detect(chat_template(config), written_call)

    if detected_parser not in (None, parser):
        yield warning(
            f"rollout.parser is {parser}, but the model's chat template looks like {detected_parser}: tool "
            f"calls would be treated as text; set rollout.parser={detected_parser}"
        )

    # Without data, the check of the data has failed.
    is_unsure = writes_calls and rollout.tools and not detected_parser and inputs.has_data
    if is_unsure and not shown_calls(inputs.parts, inputs.run_data.train[0].prompt):
        if written_call is not None:
            yield warning(
                f"rollout.parser is {parser}, but no parser reads the calls that the chat template writes, "
                "so calls would be treated as text; write a parser, or use another template "
                "(docs/guides/chat.md)"
            )
        else:
            yield warning(
                f"rollout.parser is {parser}, but the chat template does not show how the model writes "
                "calls, so calls in another format would be treated as text; choose from "
                f"{', '.join(parsers.names())}, or write your own (docs/guides/chat.md)"
            )

    if is_training:
        yield from map(warning, estimates.cost_warnings(config, has_gpu))


@preflight_check("engine", requires=("tensors", "data"))
def check_engine(inputs: Inputs) -> Iterator[Note]:
    """Check that the embedded engine serves the model, on a small copy, and that its slots fit."""
    finding = inputs.copy_findings.get("engine")
    if finding is None:
        return

    architecture = architecture_name(inputs.config.model.path)
    if finding.problems is None:
        yield ok(f"it is unknown whether the embedded engine serves {architecture}: {finding.reason}")
    elif problem := finding.problems["engine"]:
        raise ConfigError(problem)
    else:
        served_text = f"the embedded engine serves {architecture}"
        memory_text = finding.reason
        if finding.slot is not None:
            memory_text = memory.check_engine_memory(inputs.config, sees_gpu(inputs.config), finding.slot)
        yield ok(": ".join(filter(None, (served_text, memory_text))))


@preflight_check("packing", requires=("tensors", "data"))
def describe_packing(inputs: Inputs) -> Iterator[Note]:
    """Describe how rows will be laid out, and which layer forbids another layout, by a small copy of the
    model. Raises ConfigError where ranks share a row and rows cannot be packed."""
    finding = inputs.copy_findings.get("trainer")
    if finding is None:
        return

    config = inputs.config
    wanted_packing = config.trainer.packing
    architecture = architecture_name(config.model.path)
    if finding.problems is None:
        yield ok(
            f"rows: {wanted_packing} (trainer.packing), unless {architecture} does not allow this: "
            f"{finding.reason}"
        )
        return

    if padded_problem := finding.problems["padded"]:
        yield warning(f"{architecture} depends on which rows are batched together: it {padded_problem}")
    problem = finding.problems[wanted_packing] if wanted_packing != "padded" else ""
    if config.trainer.sequence_parallel > 1:
        problem = problem or finding.problems["shared"]

    if problem and config.trainer.sequence_parallel > 1:
        raise ConfigError(
            f"trainer.sequence_parallel={config.trainer.sequence_parallel} needs packed rows, but "
            f"{architecture} {problem}; set trainer.sequence_parallel=1"
        )

    if problem:
        yield ok(
            f"rows: padded instead of {wanted_packing} (trainer.packing), because {architecture} {problem}"
        )
    elif wanted_packing == "padded" or uses_gpu(config, sees_gpu(config)) is False:
        yield ok(f"rows: {wanted_packing} (trainer.packing)")
    else:
        yield ok(f"rows: {wanted_packing} (trainer.packing), if the loaded model allows it on a GPU")


@preflight_check("cluster", requires=("launch",))
def describe_cluster(inputs: Inputs) -> Iterator[Note]:
    """Describe which processes would go to which machine of the Ray cluster, one line per machine; nothing
    without a cluster. Raises ConfigError if the cluster has no room for all processes."""
    launch = inputs.config.launch
    if launch.kind == "ray" and launch.ray_address:
        from asyncrl.launch.ray import plan_on_cluster

        with _silenced_libraries():
            launcher_host = own_address() if launch.host == EVERY_ADDRESS else launch.host
            yield from map(ok, plan_on_cluster(inputs.config, launcher_host))


@preflight_check("estimate", requires=("data", "memory"))
def estimate(inputs: Inputs) -> Iterator[Note]:
    config = inputs.config
    if config.total_steps:
        has_gpu = sees_gpu(config)
        prompt_tokens = len(inputs.first_prompt)
        train_count = len(inputs.run_data.train)
        test_count = len(inputs.run_data.test or ())

        yield from map(ok, estimates.describe_work(config, train_count, test_count, prompt_tokens))
        # How many side requests an agent makes is unknown before the agent has run.
        agent = inputs.parts.agent
        is_tested = isinstance(agent, Command) and agent.harness.tested
        if config.rollout.agent and not config.rollout.untrained_agents and not is_tested:
            yield ok(
                "agent: the model is trained on all requests with the episode's reward, including side "
                "requests (titles, commit messages), unless rollout.untrained_agents lists them; "
                "a rollout/rows/mean above 1 means more than one conversation per episode"
            )
        yield from map(ok, estimates.describe_costs(config, has_gpu))
        yield from memory.describe_memory(config, has_gpu, inputs.run_data.sequence_image_ids)
        if uses_gpu(config, has_gpu) is False and not inputs.run_data.train[0].demonstration:
            yield from map(ok, estimates.describe_time(config, test_count, prompt_tokens))


@contextmanager
def _silenced_libraries() -> Iterator[None]:
    """Silence the logs of libraries, which repeat the errors that they raise."""
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
