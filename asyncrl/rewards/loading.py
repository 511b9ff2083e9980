"""Loads the functions of `rollout.reward`: names, options, weights, signatures and where each runs."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from asyncrl.config import Options
from asyncrl.errors import ConfigError, one_line, users_code
from asyncrl.registry import Call, bind_plugin, check_call, select_columns
from asyncrl.rewards.base import (
    RewardFunction,
    RewardInput,
    RewardLocation,
    rewards,
    score_of_batch,
    trl_arguments,
    verl_arguments,
)

REWARD_KEY = "rollout.reward"
TRL_PARAMETERS = frozenset({"completions", "environments"})  # either one tells TRL's signature
EPISODE_COLUMNS = TRL_PARAMETERS | {"prompts"}  # columns that each episode has, whatever the data
VERL_PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")
REWARD_CALL = Call(
    f"a function with ({', '.join(VERL_PARAMETERS)}), (given: RewardInput) or TRL's (completions, **kwargs)",
    VERL_PARAMETERS,
    by_name=True,
)


class RewardSource(msgspec.Struct, frozen=True):
    """Tells another process how to load a function: a name or path, and options."""

    spec: str
    options: dict[str, str | int | float | bool] = {}


@dataclass(frozen=True)
class Reward:
    """Gives one part of an episode's reward. `name`: the name in reports; `load`: called once in the reward
    process before the first call of `function`. `own_deadline`: an async function that bounds its own waits.
    `needs_truth`, `numbers`, `compared` (with options bound): see `rewards.base.needs_truth`.
    `needed_columns`: those of the data that a function of TRL's signature cannot do without."""

    name: str
    function: Callable[[RewardInput], Any]
    location: RewardLocation
    source: RewardSource
    weight: float = 1.0
    load: Callable[[], object] = lambda: None
    own_deadline: float = 0.0
    needs_truth: bool = False
    numbers: bool = False
    compared: Callable[[Any], list[str] | None] | None = None
    needed_columns: tuple[str, ...] = ()


def load_rewards(plugin: str | Mapping[str, Options], where: str = REWARD_KEY) -> list[Reward]:
    """Load the rewards that the config names. ConfigError that begins with `where`."""
    options_by_spec = {plugin: {}} if isinstance(plugin, str) else plugin
    if not options_by_spec:
        raise ConfigError(f"{where} does not name a reward; set a reward such as final_number")

    short_names = [spec.rpartition(":")[2] for spec in options_by_spec]
    names = short_names if len(set(short_names)) == len(short_names) else list(options_by_spec)
    loaded_rewards: list[Reward] = []

    for name, (spec, options) in zip(names, options_by_spec.items(), strict=True):
        weight = options.get("weight", 1.0)
        if not isinstance(weight, int | float) or not math.isfinite(weight):
            raise ConfigError(f"{where}.{spec}.weight must be a finite number, not {weight!r}")
        source = RewardSource(spec, {key: value for key, value in options.items() if key != "weight"})
        loaded_rewards.append(replace(load_reward(source, where), name=name, weight=float(weight)))

    return loaded_rewards


def load_reward(source: RewardSource, where: str = REWARD_KEY) -> Reward:
    """Load one reward as a function of episodes, with options bound."""
    loaded_object = rewards.load(source.spec, where)
    where = f"{where}.{source.spec}"
    function = bind_plugin(
        _with_verls_options(loaded_object, where),
        source.options,
        where,
        REWARD_CALL,
        may_miss=_is_function_of_trl(loaded_object),
    )
    is_of_trl = _is_of_trl(function) and not _is_typed(function)
    if not is_of_trl and not _is_typed(function):
        check_call(function, where, REWARD_CALL)

    # TRL's keyword-only parameters that the configuration does not set are columns, which replace defaults.
    if is_of_trl and isinstance(function, functools.partial):
        own_keywords = loaded_object.keywords if isinstance(loaded_object, functools.partial) else {}
        set_names = source.options.keys() | own_keywords.keys()
        set_options = {name: value for name, value in function.keywords.items() if name in set_names}
        function = functools.partial(function.func, *function.args, **set_options)

    subject = function if inspect.isclass(loaded_object) else loaded_object
    is_async = any(map(inspect.iscoroutinefunction, (subject, type(subject).__call__)))
    location: RewardLocation = "loop" if is_async else getattr(loaded_object, "runs", "processes")
    compared = getattr(loaded_object, "compared", None) if ":" not in source.spec else None

    return Reward(
        name=source.spec,
        function=_takes_episode(function),
        location=location,
        source=source,
        load=getattr(function, "load", lambda: None),
        own_deadline=getattr(loaded_object, "own_deadline", 0.0) if location == "loop" else 0.0,
        needs_truth=bool(getattr(loaded_object, "needs_truth", False)),
        numbers=bool(getattr(loaded_object, "numbers", False)),
        compared=functools.partial(compared, **source.options) if compared else None,
        needed_columns=tuple(_needed_columns(function)) if is_of_trl else (),
    )


def in_loop(function: RewardFunction, name: str = "reward") -> Reward:
    """Make a reward that runs in the event loop from a function of either signature."""
    return Reward(name, _takes_episode(function), "loop", RewardSource(name))


def _takes_episode(function: RewardFunction) -> Callable[[RewardInput], Any]:
    """Adapt a function of any signature to take an episode."""
    if _is_typed(function):
        return function
    if _is_of_trl(function):
        return functools.partial(_score_as_batch, function)
    return lambda episode: function(**verl_arguments(episode))


def _score_as_batch(function: RewardFunction, episode: RewardInput) -> Any:
    """Call a function of TRL's signature, which may be async, with a batch of one episode."""
    # No column may replace an option. An attribute `keywords` of any other object is the user's own.
    options = function.keywords if isinstance(function, functools.partial) else {}
    columns = {name: value for name, value in trl_arguments(episode).items() if name not in options}
    scores = function(**select_columns(function, columns))
    if not inspect.isawaitable(scores):
        return score_of_batch(scores)

    async def await_scores() -> float:
        return score_of_batch(await scores)

    return await_scores()


def _needed_columns(function: RewardFunction) -> Iterator[str]:
    for parameter in inspect.signature(function).parameters.values():
        is_passed_by_name = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if (
            is_passed_by_name
            and parameter.default is parameter.empty
            and parameter.name not in EPISODE_COLUMNS
        ):
            yield parameter.name


def _is_of_trl(function: RewardFunction) -> bool:
    """Tell whether a function has TRL's parameters, and not the text of verl's signature."""
    names = inspect.signature(function).parameters.keys()
    return bool(TRL_PARAMETERS & names) and "solution_str" not in names


def _is_function_of_trl(loaded_object: Any) -> bool:
    """Tell whether keyword-only parameters of a loaded object may be columns: a class takes options alone."""
    try:
        return not inspect.isclass(loaded_object) and _is_of_trl(loaded_object)
    except (TypeError, ValueError):  # no function, or a builtin: `bind_plugin` and `check_call` say so
        return False


def _with_verls_options(function: RewardFunction, where: str) -> RewardFunction:
    """Treat positional parameters after verl's four as options, as functions written for verl expect."""
    if not callable(function):
        return function  # refused by `bind_plugin`

    try:
        with users_code():
            names = tuple(
                parameter.name
                for parameter in inspect.signature(function).parameters.values()
                if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            )
            if names[: len(VERL_PARAMETERS)] != VERL_PARAMETERS or names == VERL_PARAMETERS:
                return function

            signature = inspect.signature(function, eval_str=True)
    except Exception as error:  # a bad annotation, or a builtin without a signature
        raise ConfigError(f"{where}: no usable signature ({one_line(error)})") from error

    parameters = list(signature.parameters.values())
    for index, parameter in enumerate(parameters):
        if index >= len(VERL_PARAMETERS) and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            parameters[index] = parameter.replace(kind=parameter.KEYWORD_ONLY)

    with_options = functools.partial(function)
    with_options.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return with_options


def _is_typed(function: RewardFunction) -> bool:
    """Tell whether the only parameter beside options is called `given` or annotated as RewardInput."""
    option_kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    positional_parameters = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind not in option_kinds
    ]
    if len(positional_parameters) != 1:
        return False

    (parameter,) = positional_parameters
    annotation = parameter.annotation  # a text if annotations are postponed
    return parameter.name == "given" or str(annotation).endswith("RewardInput") or annotation is RewardInput
