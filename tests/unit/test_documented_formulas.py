"""The formulas of docs/background/formulas.md, read as arithmetic and evaluated, give what the code
gives."""

from __future__ import annotations

import ast
import inspect
import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.algorithms.advantages import AdvantageInput, advantages
from asyncrl.algorithms.correction import CorrectionInput, corrections
from asyncrl.algorithms.kl import ESTIMATORS
from asyncrl.algorithms.recipe import aggregations, losses
from asyncrl.rewards.shaping import ShapingInput, shapings
from asyncrl.types import EpisodeEnd, EpisodeResult
from tests.fakes.losses import evaluate as loss_of
from tests.fakes.losses import loss_input

# -- formulas as people write them -----------------------------------------------------------------------

SPELLING = [
    (r"−", "-"),
    (r"·", "*"),
    (r"²", "**2"),
    (r"≤", "<="),
    (r"e\^(-?\w+)", r"exp(\1)"),
    (r"\|([^|]+)\|", r"abs(\1)"),
    (r"\blog (\w+)", r"log(\1)"),
    (r"\b([us])A\b", r"\1*A"),
]
END = re.compile(r"[,:;.] |(?<=[\w)²|]) \(| while |$")  # where words go on, outside of parentheses
OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.LtE: operator.le,
}


def real(x: Any) -> torch.Tensor:
    return torch.as_tensor(x, dtype=torch.float64)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "min": min,
    "max": max,
    "abs": abs,
    "exp": lambda x: real(x).exp(),
    "log": lambda x: real(x).log(),
    "sg": lambda x: real(x).detach(),
    "clip": lambda x, low, high: min(max(x, low), high),
    "sigmoid": lambda x: 1 / (1 + real(-x).exp()),
}


def formula_of(docstring: str) -> str:
    """What stands after `L =`, `w =` or `Keep iff`, or at the beginning, up to the words that follow."""
    text = re.sub(r"^(\w = |Keep iff )", "", " ".join(docstring.split()))
    for match in END.finditer(text):
        before = text[: match.start()]
        if before.count("(") == before.count(")"):
            return before
    raise AssertionError("unreachable: the end of the text matches")


def evaluate(formula: str, symbols: Mapping[str, Any]) -> Any:
    """Arithmetic of names, numbers and scalar tensors only; anything else is an error."""
    for written, meant in SPELLING:
        formula = re.sub(written, meant, formula)

    def value(node: ast.AST) -> Any:
        match node:
            case ast.Constant(value=float() | int() as number):
                return number
            case ast.Name(id=name):
                return symbols[name]
            case ast.BinOp(left, op, right):
                return OPERATORS[type(op)](value(left), value(right))
            case ast.UnaryOp(op, operand):
                return OPERATORS[type(op)](value(operand))
            case ast.Compare(left, ops, comparators):
                sides = [value(side) for side in (left, *comparators)]
                return all(OPERATORS[type(op)](*sides[i : i + 2]) for i, op in enumerate(ops))
            case ast.Call(ast.Name(id=name), arguments, []):
                return FUNCTIONS[name](*map(value, arguments))
        raise ValueError(f"{formula}: {ast.dump(node)} is no arithmetic")

    return value(ast.parse(formula, mode="eval").body)


# -- losses and corrections, by token ---------------------------------------------------------------------

# log pi, log prox, log mu, A, w: each token is an episode of its own
TOKENS = [
    (-1.0, -1.1, -1.3, 2.0, 0.5),
    (-0.5, -1.5, -1.4, 0.7, 1.5),  # u and pi/mu over every upper bound
    (-2.5, -1.0, -0.9, 1.2, 1.0),
    (-1.0, -1.2, -0.8, -1.5, 0.9),
    (-0.6, -1.4, -1.6, -0.4, 1.1),
    (-2.4, -1.1, -1.2, -2.2, 2.0),  # u under every lower bound
]
RNG = np.random.default_rng(0)
TOKENS += [(*-RNG.exponential(size=3), RNG.normal(), RNG.choice([0.0, 0.6, 1.7])) for _ in range(40)]
LOSSES: dict[str, dict[str, Any]] = {  # options with which no clause in words acts
    "reinforce": {},
    "sft": {},
    "ppo": {"dual_clip": 100.0},
    "cispo": {"clip_low": 0.3},
    "cispo_scalerl": {"cap": 1.2},
    "sapo": {},
    "dro": {},
    "dppo_tv": {"delta_low": 0.9999, "delta_high": 0.9999, "cap": 1.2},
    "dppo_kl": {"delta_low": 99.0, "delta_high": 99.0, "cap": 1.2},
    "gspo": {},
    "gmpo": {},
    "topr": {},
    "clip_cov": {},
    "m2po": {},
}


def defaults(function: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def token_symbols(
    pi: Any, token: tuple[float, ...], options: Mapping[str, Any], *, one_sided: bool = False
) -> dict[str, Any]:
    """What the formulas call things; `pi` is log π, a tensor. `one_sided`: s is gmpo's."""
    _, prox, mu, a, w = token
    low = options.get("clip_low", 0.0)
    high = options.get("clip_high", 0.0)
    bounded = (pi - prox).clamp(max=high) if a > 0 else (pi - prox).clamp(min=-low)
    return {
        "π": pi.exp(),
        "prox": math.exp(prox),
        "μ": math.exp(mu),
        "A": a,
        "w": w,
        "u": (pi - prox).exp(),
        "ρ": math.exp(prox - mu),
        "r": 1.0 if a > 0 else (pi - mu).exp().clamp(max=1.0),
        "s": bounded.exp() if one_sided else (pi - prox).exp(),
        "τ": options.get("tau_positive" if a > 0 else "tau_negative", 0.0),
        "C": options.get("positive" if a >= 0 else "negative", 0.0),
        "β": options.get("beta", 0.0),
        **options,
    }


def column(place: int) -> torch.Tensor:
    return torch.tensor([token[place] for token in TOKENS], dtype=torch.float64)


IN_WORDS = {"kl_cov", "tba"}  # losses whose formula is a sentence; test_losses_by_hand.py has their numbers


def test_every_loss_is_evaluated_or_said_to_be_in_words() -> None:
    assert LOSSES.keys() | IN_WORDS == set(losses)


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str) -> None:
    """Value and gradient, with the weight of the correction."""
    entry, (logp, prox, mu, advantage, weight) = losses.get(name), map(list, zip(*TOKENS, strict=True))
    options = {**defaults(entry.of), **LOSSES[name]}
    given = loss_input(
        logp,
        prox=prox,
        mu=mu,
        advantage=advantage,
        weight=weight if entry.ratio == "prox" else None,
        row=range(len(TOKENS)),
        prepared=[float(name == "m2po")] * len(TOKENS),  # nothing chosen, all kept
    )
    token, slope = loss_of(name, given, **LOSSES[name])
    pi = real(logp).requires_grad_()
    formula = formula_of(inspect.getdoc(entry.of) or "")
    one_sided = name == "gmpo"
    wanted = torch.stack(
        [
            evaluate(formula, token_symbols(pi[i], known, options, one_sided=one_sided))
            for i, known in enumerate(TOKENS)
        ]
    )
    assert token.value.tolist() == pytest.approx(wanted.tolist(), rel=1e-12)
    (gradient,) = torch.autograd.grad(wanted.sum(), pi)
    assert slope.tolist() == pytest.approx(gradient.tolist(), rel=1e-12)


@pytest.mark.parametrize("name", ["ratio", "truncate", "mask"])
def test_corrections(name: str) -> None:
    rule = corrections.get(name)
    options = {"truncate": {"positive": 1.15, "negative": 1.3}, "mask": {"low": 0.9, "high": 1.2}}.get(
        name, {}
    )
    fresh = torch.ones(len(TOKENS), dtype=torch.bool)
    row = torch.arange(len(TOKENS))
    log_ratio = column(1) - column(2)
    given = CorrectionInput(log_ratio, log_ratio, column(3), row, 0 * row, fresh)
    verdict = rule.of(given, **options)
    token_weight = verdict.weight if verdict.keep is None else verdict.keep
    assert token_weight is not None
    formula = formula_of(inspect.getdoc(rule.of) or "")
    wanted = [evaluate(formula, token_symbols(real(token[0]), token, options)) for token in TOKENS]
    assert token_weight.tolist() == pytest.approx(wanted, rel=1e-12)
    assert len({round(float(x), 9) for x in wanted}) > 1, "the options act on some tokens only"


# -- aggregation, KL, advantages, shaping -----------------------------------------------------------------


@pytest.mark.parametrize("name", list(aggregations))
def test_aggregations(name: str) -> None:
    entry = aggregations.get(name).bound({"length": 64}, "aggregation")
    wanted = evaluate(
        formula_of(inspect.getdoc(aggregations.get(name).of) or ""), {"T_i": 3, "T_g": 12, "L": 64}
    )
    assert entry(3, 12).weight == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name != "straight_through"])
@pytest.mark.parametrize("d", [-1.3, 0.0, 0.4])
def test_kl_estimators(name: str, d: float) -> None:
    wanted = float(evaluate(formula_of(inspect.getdoc(ESTIMATORS[name]) or ""), {"d": d}))
    assert float(ESTIMATORS[name](torch.tensor(d, dtype=torch.float64))) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("name", ["dr_grpo", "grpo", "gpg", "reinforce_pp_baseline"])
def test_advantages(name: str) -> None:
    """Before the batch scales them: α is 1."""
    group = [EpisodeResult(reward) for reward in (0.0, 1.0, 0.25)]
    rewards = [member.reward for member in group]
    symbols = {"mean": np.mean(rewards), "std": np.std(rewards, ddof=1), "α": 1.0, "f_norm": 1.0}
    of = advantages.get(name).of
    for place, own in enumerate(group):
        computed_advantages = of(
            AdvantageInput(own, group, np.zeros(2), np.zeros(2, dtype=int), len(group), place)
        )
        wanted = evaluate(formula_of(inspect.getdoc(of) or ""), {**symbols, "R": own.reward})
        assert computed_advantages == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("tokens", [10, 85, 100, 120])
def test_shaping(tokens: int) -> None:
    symbols = {"len": tokens, "limit": 100, "buffer": 20, "factor": 0.5}
    given = ShapingInput(score=1.0, tokens=tokens, turns=1, end=EpisodeEnd.ANSWERED, limit=100)
    overlong = shapings.get("overlong")
    wanted = evaluate(formula_of(inspect.getdoc(overlong) or ""), symbols)
    assert overlong(given, buffer=20, factor=0.5) == pytest.approx(wanted, rel=1e-12)
