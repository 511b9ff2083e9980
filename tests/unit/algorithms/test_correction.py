from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms.correction import Correction, CorrectionInput, correct, corrections, select_rules
from asyncrl.errors import ConfigError

DEFAULT: dict[str, dict[str, Any]] = {"mask": {}, "truncate": {}}

# rho, advantage → weight, masked, truncated; defaults: band [0.5, 5], caps +5 and -2
TABLE = [
    (0.3, 1.0, 0.0, True, False),
    (0.51, 1.0, 0.51, False, False),
    (1.0, -1.0, 1.0, False, False),
    (2.5, 1.0, 2.5, False, False),
    (3.0, -1.0, 2.0, False, True),
    (4.99, 1.0, 4.99, False, False),
    (5.01, 1.0, 0.0, True, False),
    (3.0, 0.0, 3.0, False, False),
]

# Two episodes; rho by hand. The fourth token is stale: it counts nowhere.
RHO = [2.0, 3.0, 0.5, 1.0, 0.25, 4.0]
ROW = [0, 0, 0, 0, 1, 1]
TURN = [0, 0, 1, 1, 0, 1]
FRESH = [True, True, True, False, True, True]
ADVANTAGE = [1.0, 1.0, -1.5, -99.0, 1.0, -2.0]  # the first episode's mean is +1/6, the second's -1/2


def tokens(
    log_ratio: list[float], advantage: list[float], row: list[int], turn: list[int], trainable: list[bool]
) -> CorrectionInput:
    logs = [value if counts else 0.0 for value, counts in zip(log_ratio, trainable, strict=True)]
    real = (torch.tensor(values, dtype=torch.float64) for values in (logs, logs, advantage))
    return CorrectionInput(*real, torch.tensor(row), torch.tensor(turn), torch.tensor(trainable))


def example() -> CorrectionInput:
    return tokens([math.log(rho) for rho in RHO], ADVANTAGE, ROW, TURN, FRESH)


def single(rho: float, advantage: float = 1.0) -> CorrectionInput:
    return tokens([math.log(rho)], [advantage], [0], [0], [True])


def corrected(named: dict[str, dict[str, Any]], given: CorrectionInput) -> Correction:
    return correct(select_rules(named, "algorithm.correction"), given)


def trainable(values: torch.Tensor) -> list[Any]:
    """Those of the trainable tokens of the example."""
    return [value for value, counts in zip(values.tolist(), FRESH, strict=True) if counts]


@pytest.mark.parametrize(("rho", "advantage", "weight", "masked", "truncated"), TABLE)
def test_mask_and_truncation_by_hand(
    rho: float, advantage: float, weight: float, masked: bool, truncated: bool
) -> None:
    """The bounds are on rho: 0.3 goes and 2.5 stays, not the other way round."""
    done = corrected(DEFAULT, single(rho, advantage))
    assert done.weight.item() == pytest.approx(weight)
    assert (done.masked.item(), done.truncated.item()) == (masked, truncated)
    assert done.ratio.item() == pytest.approx(rho)


WEIGHTS = [
    ("ratio", {}, [2, 3, 0.5, 0.25, 4]),
    ("ratio", {"level": "turn"}, [6, 6, 0.5, 0.25, 4]),
    ("ratio", {"level": "sequence"}, [3, 3, 3, 1, 1]),
    ("ratio", {"level": "geometric"}, [3 ** (1 / 3)] * 3 + [1, 1]),
    ("truncate", {}, [2, 3, 0.5, 0.25, 2]),
    ("truncate", {"level": "turn"}, [5, 5, 0.5, 0.25, 2]),
    ("truncate", {"level": "turn", "positive": 5.5, "negative": 0.1}, [5.5, 5.5, 0.1, 0.25, 0.1]),
    # The last token of the first episode has A < 0, its episode has not, and the other way round.
    ("truncate", {"level": "sequence", "positive": 2.5, "negative": 0.75}, [2.5] * 3 + [0.75] * 2),
    ("truncate", {"level": "geometric", "positive": 1.2, "negative": 0.75}, [1.2] * 3 + [0.75] * 2),
]


@pytest.mark.parametrize(("name", "options", "weights"), WEIGHTS)
def test_weights_of_levels_by_hand(name: str, options: dict[str, Any], weights: list[float]) -> None:
    assert trainable(corrected({name: options}, example()).weight) == pytest.approx(weights)


LOG3 = math.log(3)
LOG4 = math.log(4)
# The mean of k2 over the first episode, (log²2 + log²3 + log²0.5)/6, and of k3 over the second.
K2 = (2 * math.log(2) ** 2 + LOG3**2) / 6
K3 = (0.25 - 1 + LOG4 + 4 - 1 - LOG4) / 2
KEPT = [
    ("mask", {"level": "turn"}, [0, 0, 1, 0, 1]),
    ("mask", {"level": "sequence", "high": 2}, [0, 0, 0, 1, 1]),
    ("mask", {"level": "geometric", "low": 1.01}, [1, 1, 1, 0, 0]),
    ("reject_sequence", {}, [0, 0, 0, 1, 1]),
    ("reject_sequence", {"high": 1.45}, [1, 1, 1, 1, 1]),
    ("reject_sequence", {"low": 1.4, "high": 1.45}, [1, 1, 1, 0, 0]),
    # k1 bounds rho on both sides: 0.25 and 4 are equally far.
    ("reject", {"estimator": "k1", "level": "token", "limit": LOG4 - 0.01}, [1, 1, 1, 0, 0]),
    ("reject", {"estimator": "k1", "level": "token", "limit": LOG4 + 0.01}, [1, 1, 1, 1, 1]),
    ("reject", {"estimator": "k1", "level": "turn", "limit": LOG3}, [1, 1, 1, 0, 0]),
    ("reject", {"estimator": "k1", "limit": LOG3 / 3 - 0.01}, [0, 0, 0, 1, 1]),
    ("reject", {"estimator": "k1", "limit": LOG3 / 3 + 0.01}, [1, 1, 1, 1, 1]),
    ("reject", {"estimator": "k2", "limit": K2 - 0.01}, [0, 0, 0, 0, 0]),
    ("reject", {"estimator": "k2", "limit": K2 + 0.01}, [1, 1, 1, 0, 0]),
    ("reject", {"estimator": "k3", "limit": K3 - 0.01}, [1, 1, 1, 0, 0]),
    ("reject", {"estimator": "k3", "limit": K3 + 0.01}, [1, 1, 1, 1, 1]),
    ("veto", {}, [1, 1, 1, 1, 1]),
    ("veto", {"least": 0.3}, [1, 1, 1, 0, 0]),
    ("veto", {"least": 0.6}, [0, 0, 0, 0, 0]),
]


@pytest.mark.parametrize(("name", "options", "kept"), KEPT)
def test_masks_by_hand(name: str, options: dict[str, Any], kept: list[int]) -> None:
    done = corrected({name: options}, example())
    assert trainable(done.weight) == kept
    assert trainable(done.masked) == [not keep for keep in kept]


# mean log mu - log prox of an episode, its advantages → kept; delta 0.1
NEGATIVE = [
    ([0.15, 0.15], [-1.0, -1.0], False),
    ([0.05, 0.05], [-1.0, -1.0], True),
    ([0.4, -0.1], [-2.0, 1.0], False),
    ([0.4, -0.1], [-1.0, 2.0], True),
    ([0.4, -0.3], [-1.0, -1.0], True),
    ([-0.4, -0.4], [-1.0, -1.0], True),  # the policy has come to like it: not what is masked
    ([5.0, 5.0], [0.0, 0.0], True),
]


@pytest.mark.parametrize(("distance", "advantage", "kept"), NEGATIVE)
def test_a_wrong_answer_that_the_policy_left_behind_is_dropped(
    distance: list[float], advantage: list[float], kept: bool
) -> None:
    given = tokens([-d for d in distance], advantage, [0, 0], [0, 0], [True, True])
    assert corrected({"negative": {}}, given).weight.tolist() == [float(kept)] * 2


def test_rules_compose_and_each_sees_the_uncorrected_ratio() -> None:
    """The veto drops the second episode, the band one token of the first."""
    named: dict[str, dict[str, Any]] = {
        "veto": {"least": 0.3},
        "mask": {"low": 0.1, "high": 2.9},
        "ratio": {},
    }
    done = corrected(named | {"batch_mean": {}}, example())
    assert trainable(done.weight) == pytest.approx([2, 0, 0.5, 0, 0])
    assert trainable(done.masked) == [False, True, False, True, True]
    assert trainable(done.ratio) == pytest.approx([2, 3, 0.5, 0.25, 4])


def test_no_rule_weighs_everything_one_and_still_reports_the_ratio() -> None:
    done = corrected({}, single(math.e**2))
    assert done.weight.item() == 1.0 and not done.masked.item()
    assert done.ratio.item() == pytest.approx(math.exp(2))


REFUSED: list[tuple[dict[str, dict[str, Any]], str]] = [
    ({"truncate": {}, "ratio": {}}, "two weights"),
    ({"mask": {"low": 6}}, r"x\.mask: low \(6.* above high \(5"),
    ({"reject_sequence": {"low": 1.2}}, "swap"),
    ({"truncate": {"level": "episode"}}, r"x\.truncate\.level: .*episode.*choose from token"),
    ({"truncate": {"positive": 0}}, "positive"),
    ({"reject": {"limit": -1}}, "limit"),
    ({"veto": {"least": 2}}, "least"),
    ({"batch_mean": {"level": "token"}}, "unknown option 'level'"),
    ({"vetoes": {}}, "did you mean veto"),
]


@pytest.mark.parametrize(("named", "message"), REFUSED)
def test_what_makes_no_sense_is_refused(named: dict[str, dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        select_rules(named, "x")


# -- all rules at all levels, against loops ----------------------------------------------------------------

VARIANTS = [
    ("truncate", {"level": level, "positive": 3.0, "negative": 1.5})
    for level in ("token", "turn", "sequence", "geometric")
]
VARIANTS += [("ratio", {"level": level}) for level in ("token", "turn", "sequence", "geometric")]
VARIANTS += [("mask", {"level": level}) for level in ("token", "turn", "sequence", "geometric")]
VARIANTS += [
    ("reject", {"level": level, "estimator": estimator, "limit": 0.3071})
    for level in ("token", "turn", "sequence")
    for estimator in ("k1", "k2", "k3")
]
VARIANTS += [("reject_sequence", {}), ("veto", {"least": 0.2}), ("negative", {"delta": 0.2037})]
BOUND = [(name, options, select_rules({name: options}, "$")) for name, options in VARIANTS]

token = st.tuples(
    st.floats(-3, 3),
    st.sampled_from([-1.5, -1.0, 0.0, 2.0]),
    st.integers(0, 2),
    st.integers(0, 2),
    st.booleans(),
)  # log rho, advantage, row, turn, trainable
batches = st.lists(token, min_size=1, max_size=9)


def given_of(batch: list[tuple[float, float, int, int, bool]]) -> CorrectionInput:
    return tokens(*(list(column) for column in zip(*batch, strict=True)))  # type: ignore[arg-type]


def reference(name: str, options: dict[str, Any], given: CorrectionInput, i: int) -> tuple[float, bool]:
    """(weight, kept) of token i, which is trainable, from the definitions."""
    level = options.get("level", "sequence")
    scope = [
        j
        for j in range(len(given.row))
        if given.trainable[j]
        and (level != "token" or j == i)
        and given.row[j] == given.row[i]
        and (level != "turn" or given.turn[j] == given.turn[i])
    ]
    logs = [float(given.log_ratio[j]) for j in scope]
    total = math.fsum(logs)
    mean = math.fsum(logs) / len(logs)
    rho = math.exp(min(max(mean if level == "geometric" else total, -20), 20))
    credit = math.fsum(float(given.advantage[j]) for j in scope) / len(scope)
    if name == "reject":
        k = {
            "k1": [-x for x in logs],
            "k2": [x * x / 2 for x in logs],
            "k3": [math.exp(x) - 1 - x for x in logs],
        }
        return 1.0, abs(math.fsum(k[options["estimator"]]) / len(logs)) <= options["limit"]
    return {
        "truncate": (min(rho, 1.5 if credit < 0 else 3.0), True),
        "ratio": (rho, True),
        "mask": (1.0, 0.5 <= rho <= 5),
        "reject_sequence": (1.0, 0.9 <= math.exp(mean) <= 1.1),
        "veto": (1.0, min(logs) >= math.log(0.2)),
        "negative": (1.0, not (credit < 0 and -mean > 0.2037)),
    }[name]


@settings(max_examples=20, deadline=None)
@given(batches)
def test_every_rule_at_every_level_against_plain_loops(
    batch: list[tuple[float, float, int, int, bool]],
) -> None:
    given = given_of(batch)
    for name, options, rules in BOUND:
        done = correct(rules, given)
        for i in range(len(batch)):
            if given.trainable[i]:
                weight, kept = reference(name, options, given, i)
                assert done.weight[i].item() == pytest.approx(weight if kept else 0.0), (name, options)
                assert done.masked[i].item() == (not kept), (name, options)


def test_the_variants_are_all_rules() -> None:
    """A new rule needs a line there; batch_mean gives no weight of its own."""
    assert {name for name, _ in VARIANTS} == set(corrections.names()) - {"batch_mean"}


@settings(max_examples=10, deadline=None)
@given(batches)
def test_the_order_and_the_cut_into_micro_batches_do_not_matter(
    batch: list[tuple[float, float, int, int, bool]],
) -> None:
    """Reversed, and with the last episode in a micro-batch of its own."""
    apart = [t for t in batch if t[2] != 2], [t for t in batch if t[2] == 2]
    ordered = apart[0] + apart[1]
    for _, _, rules in BOUND:
        whole = correct(rules, given_of(ordered)).weight.tolist()
        back = correct(rules, given_of(ordered[::-1])).weight.tolist()
        cut = [w for part in apart if part for w in correct(rules, given_of(part)).weight.tolist()]
        assert back[::-1] == pytest.approx(whole) and cut == pytest.approx(whole)


@settings(max_examples=20, deadline=None)
@given(batches)
def test_where_prox_is_mu_every_rule_leaves_weight_one(
    batch: list[tuple[float, float, int, int, bool]],
) -> None:
    given = given_of([(0.0, *rest) for _, *rest in batch])  # type: ignore[misc]
    for name in corrections:
        done = corrected({name: {}}, given)
        assert done.weight.eq(1).all() and not done.masked.any() and not done.truncated.any(), name


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=10))
def test_any_log_ratio_gives_finite_weights(values: list[float]) -> None:
    n = len(values)
    zeros = torch.zeros(n, dtype=torch.long)
    log_ratio = torch.tensor(values)
    trainable = torch.ones(n, dtype=torch.bool)
    given = CorrectionInput(log_ratio, log_ratio, torch.ones(n), zeros, zeros, trainable)
    for name, options, rules in BOUND:
        done = correct(rules, given)
        assert torch.isfinite(done.ratio).all() and torch.isfinite(done.weight).all(), (name, options)
        assert done.weight.dtype == torch.float32 and (done.weight >= 0).all()
    assert (corrected(DEFAULT, given).weight <= 5).all()


@pytest.mark.parametrize("name", corrections.names())
def test_a_batch_without_fresh_tokens_has_finite_weights(name: str) -> None:
    given = tokens([1.0, 2.0], [1.0, -1.0], [0, 1], [0, 0], [False, False])
    assert torch.isfinite(corrected({name: {}}, given).weight).all()
