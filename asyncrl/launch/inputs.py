"""The inputs of checks: configuration, chat template, tools, rewards and data of a run, each made once."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from asyncrl.config import RunConfig
from asyncrl.conversation.commands import Fail
from asyncrl.conversation.demonstration import demonstration_turns
from asyncrl.data.tasks import Task, task_of
from asyncrl.errors import AsyncrlError, ConfigError, SetupError
from asyncrl.gateway import Command
from asyncrl.launch.architecture import CopyFinding, Purpose, find_on_copy, remembered_findings
from asyncrl.launch.data import RunData, check_data
from asyncrl.launch.run_directory import previous_config

if TYPE_CHECKING:
    from asyncrl.episodes.parts import EpisodeParts

MAX_TRIED_IMAGES = 16  # Images in which agents are looked up and sandboxes are started.


@dataclass
class Inputs:
    """The inputs of the checks. Each input is made when a check first reads the input, and no check changes
    any.

    If making an input fails, the first check that reads the input reports the error, and checks that require
    that check are skipped.
    """

    unresolved_config: RunConfig
    asks_child: bool = True  # False: of a small copy of the model only what is remembered is an input

    @cached_property
    def resolved_config(self) -> RunConfig:
        """The configuration with directories in place of model names, and with the policy for groups."""
        from asyncrl.algorithms.recipe import with_group_policy
        from asyncrl.launch.models import decide_on_images, resolve_models

        config = resolve_models(self.unresolved_config, previous_config(self.unresolved_config))
        return with_group_policy(decide_on_images(config))

    @property
    def config(self) -> RunConfig:
        """The resolved configuration; before resolution, or if that has failed, the unresolved
        configuration."""
        config: RunConfig = vars(self).get("resolved_config", self.unresolved_config)
        return config

    @cached_property
    def parts(self) -> EpisodeParts:
        """Chat template, tools and rewards, each made once."""
        from asyncrl.episodes.parts import EpisodeParts  # imports transformers

        return EpisodeParts(self.config)

    @cached_property
    def image_tasks(self) -> list[Task]:
        """One task for each image that episodes work in."""
        tasks_by_image: dict[str, Task] = {}
        for samples in filter(None, (self.run_data.train, self.run_data.test)):
            tasks_by_image |= {task.image: task for task in filter(None, map(task_of, samples))}
        return [*tasks_by_image.values()]

    @cached_property
    def agent_versions(self) -> dict[str, str]:
        """The version of the coding agent that leads episodes, by the agent's name; empty without such an
        agent. Raises ConfigError if the agent's program cannot be run as episodes run it."""
        agent = self.parts.agent
        if not isinstance(agent, Command):
            return {}
        name = agent.harness.name

        try:
            version = asyncio.run(agent.version(self.image_tasks[:MAX_TRIED_IMAGES]))
            return {name: version} if agent.harness.tested else {}
        except SetupError as error:
            raise ConfigError(f"rollout.agent.{name}: {error}") from error
        except (AsyncrlError, TimeoutError) as error:
            place_text = "in the sandbox"
            advice = ", add the paths that the program reads to `show`, or set `sandbox: none`"
            if self.image_tasks:
                place_text = "in a task's image"
                advice = ", or install it in the image"
            elif agent.sandbox == "none":
                place_text = "here"
                advice = ""
            reason = str(error) or "the program did not answer in time"
            raise ConfigError(
                f"rollout.agent.{name}: cannot run {place_text}: {reason}; set `program` to its path{advice}"
            ) from error

    @cached_property
    def run_data(self) -> RunData:
        """The samples of the run, in files without names."""
        return check_data(self.parts)

    @cached_property
    def copy_findings(self) -> dict[Purpose, CopyFinding]:
        """What a small copy of the model shows, by purpose: `engine` where a worker embeds torch's engine,
        `trainer` where the run trains. Without a child, what is not remembered is left out."""
        from asyncrl.algorithms.recipe import imitates  # imports torch

        config = self.config
        samples_turns = not config.total_steps or not imitates(config) or self.run_data.test is not None
        purposes: list[Purpose] = []
        if config.engine.name == "torch" and not config.engine.remote and samples_turns:
            purposes.append("engine")
        if config.total_steps:
            purposes.append("trainer")

        find_copy = find_on_copy if self.asks_child else remembered_findings
        return find_copy(config.model.path, purposes)

    @property
    def has_data(self) -> bool:
        """Whether the samples have been read."""
        return "run_data" in vars(self)

    @cached_property
    def first_prompt(self) -> tuple[int, ...]:
        """The token ids of the first prompt as the model reads it; for a conversation to be learned, the
        tokens before its first answer. Empty if an environment or an agent writes the prompts."""
        sample = self.run_data.train[0]
        rollout = self.config.rollout
        if rollout.environment or rollout.agent:
            return ()

        schemas = self.parts.toolbox.schemas(sample)
        if not sample.demonstration:
            return tuple(self.parts.rules.chat.prompt_ids(sample.prompt, schemas))
        turns = demonstration_turns(self.parts.rules, sample, schemas)
        return () if isinstance(turns, Fail) else tuple(turns[0].context)
