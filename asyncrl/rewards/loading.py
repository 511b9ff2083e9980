"""Loads the functions of `rollout.reward`: names, options, weights, signatures and where each runs."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from asyncrl.config import Options
from asyncrl.errors import ConfigError, one_line, users_code
from asyncrl.registry import Call, bound, check_call
from asyncrl.rewards.base import Place, RewardFunction, RewardInput, rewards, verl_arguments

WHERE = "rollout.reward"
VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
CALL = Call(f"a function of ({', '.join(VERL)}) or (given: RewardInput)", VERL, by_name=True)


class RewardSource(msgspec.Struct, frozen=True):
    """Tells another process where a function is: its name or place, and its options."""

    spec: str
    options: dict[str, str | int | float | bool] = {}


@dataclass(frozen=True)
class Reward:
    """Gives one part of an episode's reward. `name` is what reports call it; `load` is called once in a
    process of its own before `function` is. `own_deadline`: an async one that bounds its own waits.
    `needs_truth`, `numbers`, `compared` (with its options): see `rewards.base.needs_truth`."""

    name: str
    function: Callable[[RewardInput], Any]
    place: Place
    source: RewardSource
    weight: float = 1.0
    load: Callable[[], object] = lambda: None
    own_deadline: float = 0.0
    needs_truth: bool = False
    numbers: bool = False
    compared: Callable[[Any], list[str] | None] | None = None


def load_rewards(plugin: str | Mapping[str, Options], where: str = WHERE) -> list[Reward]:
    """Load the rewards that the config names. ConfigError that begins with `where`."""
    named = {plugin: {}} if isinstance(plugin, str) else plugin
    if not named:
        raise ConfigError(f"{where} names no reward; name one, e.g. final_number")
    short = [spec.rpartition(":")[2] for spec in named]
    names = short if len(set(short)) == len(short) else list(named)
    return [
        _load(name, spec, options, where) for name, (spec, options) in zip(names, named.items(), strict=True)
    ]


def load_reward(source: RewardSource, where: str = WHERE) -> Reward:
    """Load one function of whole episodes, with its options bound."""
    found = rewards.load(source.spec, where)
    where = f"{where}.{source.spec}"
    function = bound(_with_verls_options(found, where), source.options, where, CALL)
    if not _is_typed(function):
        check_call(function, where, CALL)
    subject = function if inspect.isclass(found) else found
    waits = any(map(inspect.iscoroutinefunction, (subject, type(subject).__call__)))
    place: Place = "loop" if waits else getattr(found, "runs", "processes")
    load = getattr(function, "load", lambda: None)
    compared = getattr(found, "compared", None) if ":" not in source.spec else None
    own = getattr(found, "own_deadline", 0.0) if place == "loop" else 0.0
    return Reward(
        source.spec,
        _of_episode(function),
        place,
        source,
        load=load,
        own_deadline=own,
        needs_truth=bool(getattr(found, "needs_truth", False)),
        numbers=bool(getattr(found, "numbers", False)),
        compared=functools.partial(compared, **source.options) if compared else None,
    )


def in_loop(function: RewardFunction, name: str = "reward") -> Reward:
    """A function of either signature as a reward that runs in the event loop."""
    return Reward(name, _of_episode(function), "loop", RewardSource(name))


def _of_episode(function: RewardFunction) -> Callable[[RewardInput], Any]:
    return function if _is_typed(function) else lambda given: function(**verl_arguments(given))


def _load(name: str, spec: str, options: Options, where: str) -> Reward:
    weight = options.get("weight", 1.0)
    if not isinstance(weight, int | float) or not math.isfinite(weight):
        raise ConfigError(f"{where}.{spec}.weight is {weight!r}; a finite number is expected")
    source = RewardSource(spec, {key: value for key, value in options.items() if key != "weight"})
    return replace(load_reward(source, where), name=name, weight=float(weight))


def _with_verls_options(function: RewardFunction, where: str) -> RewardFunction:
    """Positional parameters after verl's four are options, too, as in reward functions written for verl."""
    if not callable(function):
        return function  # refused by `bound`
    try:
        with users_code():
            names = tuple(
                p.name
                for p in inspect.signature(function).parameters.values()
                if p.kind is p.POSITIONAL_OR_KEYWORD
            )
            if names[: len(VERL)] != VERL or names == VERL:
                return function
            signature = inspect.signature(function, eval_str=True)
    except Exception as error:  # of an annotation, or a builtin without a signature
        raise ConfigError(f"{where}: it has no usable signature ({one_line(error)})") from error
    made = functools.partial(function)
    given = list(signature.parameters.values())
    first = given[: len(VERL)]
    extra = given[len(VERL) :]
    options = [p.replace(kind=p.KEYWORD_ONLY) if p.kind is p.POSITIONAL_OR_KEYWORD else p for p in extra]
    made.__signature__ = signature.replace(parameters=[*first, *options])  # type: ignore[attr-defined]
    return made


def _is_typed(function: RewardFunction) -> bool:
    """True for one parameter that is not an option, called `given` or annotated as RewardInput."""
    options = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    taken = [p for p in inspect.signature(function).parameters.values() if p.kind not in options]
    if len(taken) != 1:
        return False
    note = taken[0].annotation  # text, where annotations are postponed
    return taken[0].name == "given" or note is RewardInput or str(note).endswith("RewardInput")
