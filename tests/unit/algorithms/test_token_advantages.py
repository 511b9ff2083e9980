from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms.advantages import AdvantageInput, Trace, advantages, returns
from asyncrl.errors import ConfigError, ProtocolError
from asyncrl.types import EpisodeResult

ALONE = EpisodeResult(0.0)
NUMBER = st.floats(-5, 5)
SHARE = st.sampled_from([0.0, 0.5, 0.9, 1.0])


def of(name: str, given: AdvantageInput, **options: object) -> list[float]:
    value = advantages.get(name).bound(options, "$").of(given)
    assert isinstance(value, np.ndarray) and value.dtype == np.float64
    assert value.shape == given.rewards.shape
    return value.tolist()


def episode(rewards: Sequence[float], turn: Sequence[int] | None = None, **given: object) -> AdvantageInput:
    r = np.asarray(rewards, dtype=np.float64)
    t = np.zeros(len(r), dtype=np.int64) if turn is None else np.asarray(turn, dtype=np.int64)
    known = {name: np.asarray(v) if name == "values" else v for name, v in given.items()}
    return AdvantageInput(ALONE, (ALONE,), r, t, 1, **known)  # type: ignore[arg-type]


# -- returns -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, [3.0, 3.0, 2.0, 2.0]),
        ({"gamma": 0.5}, [0.75, 1.5, 1.0, 2.0]),  # 2, 0 + 1, 1 + ½, 0 + ¾
        ({"turn_gamma": 0.1}, [1.2, 1.2, 2.0, 2.0]),  # 1 + 0.1·2 at the boundary
        ({"gamma": 0.5, "turn_gamma": 0.1}, [0.525, 1.05, 1.0, 2.0]),
        ({"gamma": 0.0}, [0.0, 1.0, 0.0, 2.0]),
    ],
)
def test_discounted_returns_by_hand(options: dict[str, float], wanted: list[float]) -> None:
    given = episode([0, 1, 0, 2], [0, 0, 1, 1])
    assert of("reinforce_pp", given, **options) == pytest.approx(wanted, rel=1e-12)


def test_a_turn_without_model_tokens_is_discounted_as_well() -> None:
    assert of("reinforce_pp", episode([0, 8], [0, 2]), turn_gamma=0.5) == [2.0, 8.0]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(NUMBER, st.floats(0, 1)), max_size=70))
def test_returns_are_the_recursion(pairs: list[tuple[float, float]]) -> None:
    after = 0.0
    wanted = []
    for reward, discount in reversed(pairs):
        after = reward + discount * after
        wanted.insert(0, after)
    rewards, discounts = np.array(pairs, dtype=np.float64).reshape(-1, 2).T
    assert returns(rewards, discounts).tolist() == pytest.approx(wanted, rel=1e-12, abs=1e-12)


def test_inputs_are_left_alone() -> None:
    given = episode([0, 1, 0, 2], [0, 0, 1, 1], values=[1.0, 2, 3, 4], greedy=1.0)
    for name in ("reinforce_pp", "gae", "remax"):
        of(name, given)
    assert given.rewards.tolist() == [0, 1, 0, 2]
    assert given.values is not None and given.values.tolist() == [1, 2, 3, 4]


def test_remax_is_the_return_less_that_of_the_greedy_episode() -> None:
    assert of("remax", episode([0.25, 0, 1], [0, 1, 1], greedy=0.5)) == [0.75, 0.5, 0.5]
    with pytest.raises(ProtocolError, match="remax: an episode has no reward from a greedy episode"):
        of("remax", episode([1.0]))


@pytest.mark.parametrize("name", ["reinforce_pp", "remax", "gae", "grpo_turn", "optimal_token_baseline"])
def test_an_episode_without_model_tokens_has_no_advantages(name: str) -> None:
    assert of(name, episode([], values=[], greedy=0.0)) == []


@pytest.mark.parametrize("options", [{"gamma": 1.1}, {"turn_gamma": -0.1}, {"lam": 0.5}])
def test_factors_are_checked(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"^algorithm\.advantage[.:]"):
        advantages.get("reinforce_pp").bound(options, "algorithm.advantage")


# -- gae ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, [0.5, 0.75]),  # G − V
        ({"lam": 0.0}, [-0.25, 0.75]),  # δ
        ({"gamma": 0.9, "lam": 0.5}, [0.0625, 0.75]),  # 0.225 − 0.5 + 0.45·0.75
        ({"turn_gamma": 0.0}, [-0.5, 0.75]),
    ],
)
def test_gae_by_hand(options: dict[str, float], wanted: list[float]) -> None:
    assert of("gae", episode([0, 1], [0, 1], values=[0.5, 0.25]), **options) == pytest.approx(wanted)


def test_gae_without_values_says_so() -> None:
    with pytest.raises(ProtocolError, match="gae: an episode has no values from the critic"):
        of("gae", episode([1.0]))


@dataclass(frozen=True)
class Token:
    """Of a whole episode, tools and templates included, for the reference."""

    model: bool
    turn: int
    value: float
    reward: float


@st.composite
def conversations(draw: st.DrawFn) -> list[Token]:
    """Turns of model tokens, each followed by tool tokens; both earn rewards."""
    tokens = []
    for turn in range(draw(st.integers(1, 4))):
        for model, size in ((True, draw(st.integers(1, 4))), (False, draw(st.integers(0, 3)))):
            tokens += [Token(model, turn, draw(NUMBER), draw(NUMBER)) for _ in range(size)]
    return tokens


def recursive_gae(tokens: list[Token], i: int, gamma: float, lam: float, turn_gamma: float) -> float:
    """A of model token i by its definition. What tools earn before the next model token falls on i."""
    later = [j for j in range(i + 1, len(tokens)) if tokens[j].model]
    until = later[0] if later else len(tokens)
    reward = sum(token.reward for token in tokens[i:until])
    if not later:
        return reward - tokens[i].value
    discount = gamma * turn_gamma ** (tokens[until].turn - tokens[i].turn)
    delta = reward + discount * tokens[until].value - tokens[i].value
    return delta + discount * lam * recursive_gae(tokens, until, gamma, lam, turn_gamma)


@settings(max_examples=40, deadline=None)
@given(conversations(), SHARE, SHARE, SHARE)
def test_gae_is_the_recursion_over_model_tokens(
    tokens: list[Token], gamma: float, lam: float, turn_gamma: float
) -> None:
    at = [i for i, token in enumerate(tokens) if token.model]
    ends = [*at[1:], len(tokens)]
    given = episode(
        [sum(token.reward for token in tokens[i:j]) for i, j in zip(at, ends, strict=True)],
        [tokens[i].turn for i in at],
        values=[tokens[i].value for i in at],
    )
    options = {"gamma": gamma, "lam": lam, "turn_gamma": turn_gamma}
    computed_advantages = of("gae", given, **options)
    assert computed_advantages == pytest.approx(
        [recursive_gae(tokens, i, **options) for i in at], rel=1e-9, abs=1e-9
    )
    kept = len(at) // 2  # masking a prefix changes nothing behind it
    assert given.values is not None
    suffix = replace(given, rewards=given.rewards[kept:], turn=given.turn[kept:], values=given.values[kept:])
    assert of("gae", suffix, **options) == pytest.approx(computed_advantages[kept:], rel=1e-9, abs=1e-9)


# -- turns -------------------------------------------------------------------------------------------------

# G by turn: (1, 0), (1, 1), (0,), (3, 3, 3)
FOUR = tuple(
    EpisodeResult(sum(turns), 4, turns)
    for i, turns in enumerate([(1.0, 0.0), (0.0, 1.0), (0.0,), (0.0, 0.0, 3.0)])
)


def by_turn(own: EpisodeResult, siblings: Sequence[EpisodeResult], **options: object) -> list[float]:
    """Two tokens per turn; one number per turn."""
    turn = np.repeat(np.arange(len(own.turn_rewards)), 2)
    computed_advantages = of(
        "grpo_turn", AdvantageInput(own, siblings, np.zeros(len(turn)), turn, len(siblings)), **options
    )
    assert computed_advantages[::2] == computed_advantages[1::2]
    return computed_advantages[::2]


def test_turns_are_compared_with_the_same_turn_of_siblings_that_have_it() -> None:
    """Turn 0: mean 5/4. Turn 1: (0 + 1 + 3)/3. Turn 2: nobody else, the advantage of the whole episode."""
    wanted = [[-1 / 4, -4 / 3], [-1 / 4, -1 / 3], [-5 / 4], [7 / 4, 5 / 3, 7 / 4]]
    for own, advantage in zip(FOUR, wanted, strict=True):
        assert by_turn(own, FOUR) == pytest.approx(advantage, rel=1e-12)


def test_turns_by_their_std() -> None:
    """Variances: 1, 1, 0, 3 have (1 + 1 + 25 + 49)/16 / 3; 0, 1, 3 have (16 + 1 + 25)/9 / 2."""
    first = math.sqrt(76 / 48) + 1e-6
    second = math.sqrt(42 / 18) + 1e-6
    computed_advantages = by_turn(FOUR[3], FOUR, std=True)
    assert computed_advantages == pytest.approx([7 / 4 / first, 5 / 3 / second, 7 / 4 / first], rel=1e-12)


def test_turns_are_discounted() -> None:
    """G of the last with ½: (¾, 1½, 3); of the others (1, 0), (½, 1), (0,)."""
    computed_advantages = by_turn(FOUR[3], FOUR, turn_gamma=0.5)
    assert computed_advantages == pytest.approx([0.75 - 2.25 / 4, 1.5 - 2.5 / 3, 0.75 - 2.25 / 4], rel=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(NUMBER, min_size=1, max_size=4), min_size=1, max_size=5), st.integers(0, 3))
def test_turns_in_any_order_of_siblings(group: list[list[float]], shift: int) -> None:
    members = [EpisodeResult(math.fsum(turns), 1, tuple(turns)) for i, turns in enumerate(group)]
    for own in members:
        computed_advantages = by_turn(own, members)
        assert by_turn(own, members[shift:] + members[:shift]) == pytest.approx(computed_advantages, abs=1e-9)
        assert computed_advantages[0] == pytest.approx(
            own.reward - sum(m.reward for m in members) / len(members), abs=1e-9
        )
        if len(members) == 1:
            assert computed_advantages == [0.0] * len(computed_advantages)


def test_equal_turn_rewards_get_zero() -> None:
    members = [EpisodeResult(0.4, 1, (0.1, 0.3)) for i in range(7)]
    assert by_turn(members[0], members) == by_turn(members[0], members, std=True) == [0.0, 0.0]


def test_without_turn_rewards_a_turn_gets_what_the_episode_gets() -> None:
    members = [EpisodeResult(reward) for i, reward in enumerate([1.0, 0.0, 0.5])]
    given = AdvantageInput(members[0], members, np.array([0.0, 0, 1]), np.array([0, 1, 1]), len(members))
    assert of("grpo_turn", given) == [0.5] * 3


# -- optimal token baseline --------------------------------------------------------------------------------


def trace(number: int, rewards: Sequence[float], pi: Sequence[float], collision: Sequence[float]) -> Trace:
    own = EpisodeResult(sum(rewards))
    with np.errstate(divide="ignore"):
        logp = np.log(pi)
    return Trace(
        f"g/{number}",
        "g",
        own,
        logp,
        rewards=np.array(rewards, dtype=np.float64),
        collision=np.array(collision),
    )


def credit_of(t: Trace, traces: Sequence[Trace]) -> list[float]:
    turn = np.zeros(len(t.rewards), int)
    given = AdvantageInput(t.own, [x.own for x in traces], t.rewards, turn, len(traces), traces=traces)
    return of("optimal_token_baseline", given)


def test_optimal_token_baseline_by_hand() -> None:
    """Steps 1 − 1 + 0.5 = 0.5 and 1 − 1.8 + 0.82 = 0.02, so B_0 = (1·0.5 + 0·0.02) / 0.52."""
    long = trace(0, [0, 1], [0.5, 0.5], [0.5, 0.5])
    short = trace(1, [0], [0.9], [0.82])
    assert credit_of(long, [long, short]) == pytest.approx([1 - 0.5 / 0.52, 0.0])
    assert credit_of(short, [long, short]) == pytest.approx([-0.5 / 0.52])


def test_certain_tokens_are_compared_with_the_plain_mean() -> None:
    sure = [trace(i, [reward], [1.0], [1.0]) for i, reward in enumerate([1.0, 0.0])]
    assert credit_of(sure[0], sure) == [0.5]


@pytest.mark.parametrize("reward", [0.1, 1 / 3, -7.7])
def test_alone_or_with_equal_rewards_the_advantage_is_exactly_zero(reward: float) -> None:
    same = [trace(i, [0, reward], [0.3 + i / 9, 0.7], [0.51, 0.6]) for i in range(3)]
    assert credit_of(same[0], same) == credit_of(same[0], same[:1]) == [0.0, 0.0]


def test_weights_that_rounding_made_negative_do_not_cancel_others() -> None:
    """Steps −1e-7 and 1.001e-7: their sum would be 1e-10, and the advantage 1001."""
    traces = [trace(0, [1], [1.0], [1 - 1e-7]), trace(1, [0], [1.0], [1 + 1.001e-7])]
    assert credit_of(traces[0], traces) == pytest.approx([1.0])


def test_one_bad_log_prob_does_not_spoil_the_group() -> None:
    traces = [trace(0, [1, 0], [0.5, np.nan], [0.5, 0.5]), trace(1, [0, 0], [0.5, 0.5], [0.5, 0.5])]
    assert credit_of(traces[1], traces) == pytest.approx([-0.5, 0.0])


def test_without_its_group_it_is_refused() -> None:
    with pytest.raises(ProtocolError, match="optimal_token_baseline: an episode has no traces"):
        of("optimal_token_baseline", episode([1.0]))


@st.composite
def softmax_groups(draw: st.DrawFn) -> list[tuple[list[float], np.ndarray, np.ndarray]]:
    """Episodes of rewards [T], distributions [T, 3] and the sampled ids [T]."""
    made = []
    for _ in range(draw(st.integers(1, 4))):
        n = draw(st.integers(1, 4))
        logits = np.array(
            draw(st.lists(st.lists(st.floats(-3, 3), min_size=3, max_size=3), min_size=n, max_size=n))
        )
        p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        ids = np.array(draw(st.lists(st.integers(0, 2), min_size=n, max_size=n)))
        made.append((draw(st.lists(NUMBER, min_size=n, max_size=n)), p, ids))
    return made


@settings(max_examples=40, deadline=None)
@given(softmax_groups(), st.randoms(use_true_random=False))
def test_weights_are_squared_gradients_of_the_log_probs(
    group: list[tuple[list[float], np.ndarray, np.ndarray]], random: object
) -> None:
    """∂ log p(a) / ∂ logits = onehot(a) − p; its squared norm, added up over the tokens so far, is W."""
    traces = [
        trace(i, rewards, p[np.arange(len(ids)), ids].tolist(), (p**2).sum(1).tolist())
        for i, (rewards, p, ids) in enumerate(group)
    ]
    weights = [
        list(
            itertools.accumulate(float(((np.eye(3)[a] - q) ** 2).sum()) for q, a in zip(p, ids, strict=True))
        )
        for _, p, ids in group
    ]
    shuffled = list(traces)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    for i, (rewards, _, _) in enumerate(group):
        wanted = []
        for t in range(len(rewards)):
            there = [j for j, (r, _, _) in enumerate(group) if len(r) > t]
            gains = {j: sum(group[j][0][t:]) for j in there}
            baseline = sum(gains[j] * weights[j][t] for j in there) / sum(weights[j][t] for j in there)
            wanted.append(gains[i] - baseline if len(there) > 1 else 0.0)
        assert credit_of(traces[i], shuffled) == pytest.approx(wanted, rel=1e-7, abs=1e-7)
