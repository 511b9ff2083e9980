from __future__ import annotations

from itertools import chain

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms.aggregation import aggregations
from asyncrl.algorithms.credit import token_rewards
from asyncrl.config import Packing
from asyncrl.errors import ProtocolError
from asyncrl.trainer.batch import (
    TrainingSample,
    collate,
    partition_plan,
    training_sample,
    with_turns,
    with_values,
)
from asyncrl.types import EpisodeEnd, EpisodeResult, Generation, StopReason, TokenScores, Turn, VersionSpan
from asyncrl.vision.image_ids import FIRST_IMAGE_ID
from asyncrl.wire.messages.trainer import PlannedTrajectory
from tests.fakes.training import with_generation

OWN = EpisodeResult(1.0, 5, (0.25, 0.75), end=EpisodeEnd.MAX_TURNS)
ROW = PlannedTrajectory(
    uid="u",
    group="g",
    frames=2,
    own=OWN,
    siblings=(OWN, EpisodeResult(0.0, 7, (0.0,))),
    place=0,
    issued=2,
    temperature=0.5,
)
TOKEN_MEAN = aggregations.get("token_mean")
TURNS = [
    Turn(
        0,
        (1, 2),
        Generation((3, 4), (-0.1, -0.2), (VersionSpan(0, 1, 3, 3), VersionSpan(1, 2, 5, 3)), StopReason.STOP),
    ),
    Turn(1, (5,), Generation((6, 7, 8), (-0.3, -0.4, -0.5), (VersionSpan(0, 3, 5, 5),), StopReason.STOP)),
]


def joined(turns: list[Turn]) -> TrainingSample:
    return training_sample(ROW, turns, 5, 1, TOKEN_MEAN)


def test_turns_join_token_for_token() -> None:
    e = joined(TURNS)
    assert [ids.tolist() for ids in e.sequences] == [[1, 2, 3, 4, 5, 6, 7, 8]]
    assert e.sequence_of.tolist() == [0] * 5 and e.position.tolist() == [2, 3, 5, 6, 7]
    assert e.rollout_logprobs.tolist() == [-0.1, -0.2, -0.3, -0.4, -0.5] and e.lag.tolist() == [2, 0, 0, 0, 0]


def test_the_reference_comes_with_the_turns_or_is_unknown() -> None:
    scores = TokenScores(np.array([-1, -2], "<f4").tobytes())
    turns = [with_generation(TURNS[0], scores=scores), TURNS[1]]
    e = training_sample(ROW, turns, 5, 1, TOKEN_MEAN, scorer_topk=0)
    assert e.reference is not None
    np.testing.assert_array_equal(e.reference, [-1, -2, np.nan, np.nan, np.nan])
    assert joined(turns).reference is None


def test_a_turn_with_another_number_of_top_tokens_is_unknown() -> None:
    """A resumed run may ask scorers for more, or for the first time."""
    for before, known in ((0, False), (1, False), (3, False), (2, True)):
        scores = TokenScores(*map(bytes, (8, 8 * before, 8 * before)))
        e = training_sample(
            ROW, [with_generation(TURNS[0], scores=scores), TURNS[1]], 5, 1, TOKEN_MEAN, scorer_topk=2
        )
        assert e.reference is not None and e.teacher_topk is not None
        assert np.isfinite(e.reference).tolist() == [known, known, False, False, False]
        assert [column.shape for column in e.teacher_topk] == [(5, 2), (5, 2)]
    e = training_sample(
        ROW, [with_generation(t, scores=scores) for t in TURNS[:1]], 5, 1, TOKEN_MEAN, scorer_topk=0
    )
    assert e.reference is not None and np.isfinite(e.reference).all(), "an estimator reads the sampled token"


@pytest.mark.parametrize("sizes", [(4, 0, 0), (8, 8, 0), (8, 12, 12), (8, 2056, 2056)])
def test_scores_that_do_not_fit_their_turn_are_refused(sizes: tuple[int, int, int]) -> None:
    turn = with_generation(TURNS[0], scores=TokenScores(*map(bytes, sizes)))
    with pytest.raises(ProtocolError, match="turn 0: the sizes of the scores"):
        joined([turn])


def test_a_sampled_image_id_is_refused() -> None:
    turn = with_generation(TURNS[0], ids=(*TURNS[0].generation.ids[:-1], FIRST_IMAGE_ID))
    with pytest.raises(ProtocolError, match=f"{FIRST_IMAGE_ID} is not a valid token ID"):
        joined([turn])


def test_a_scorer_that_names_no_token_is_refused() -> None:
    def scored_turn(second: int) -> Turn:
        ids = np.array([0, second], "<i4").tobytes()
        scores = TokenScores(np.array([-1, np.nan], "<f4").tobytes(), ids, bytes(8))
        return with_generation(TURNS[0], scores=scores)

    joined([scored_turn(2**31 - 1)])  # beyond the policy's vocabulary: the trainer's to judge
    with pytest.raises(ProtocolError, match="turn 0: the scores contain -1, which is not a valid token ID"):
        joined([scored_turn(-1)])


BRANCHED = [
    *TURNS,
    Turn(2, (9, 9), Generation((10,), (-0.6,), (VersionSpan(0, 1, 4, 4),), StopReason.STOP), row=1),
    Turn(3, (11,), Generation((12, 13), (-0.7, -0.8), (VersionSpan(0, 2, 5, 5),), StopReason.STOP), row=0),
]


def test_turns_join_their_rows_and_model_tokens_keep_their_order() -> None:
    e = joined(BRANCHED)
    assert [ids.tolist() for ids in e.sequences] == [[1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13], [9, 9, 10]]
    assert list(zip(e.sequence_of, e.position, strict=True))[5:] == [(1, 2), (0, 9), (0, 10)]
    assert e.rollout_logprobs.tolist() == [-0.1, -0.2, -0.3, -0.4, -0.5, -0.6, -0.7, -0.8]
    assert e.lag.tolist() == [2, 0, 0, 0, 0, 1, 0, 0]


def test_rows_of_an_episode_stay_one_episode() -> None:
    branched = training_sample(ROW, BRANCHED, 5, 1, TOKEN_MEAN)
    plain = training_sample(ROW, TURNS[:1], 5, 1, TOKEN_MEAN)
    assert (branched.model_tokens, branched.total_tokens, branched.longest_sequence) == (8, 14, 11)
    micro = collate([branched, plain], torch.float64)
    chosen = micro.selected
    assert chosen.ids.shape == (3, 11)
    assert ((chosen.predictor_index + 1) // 11).tolist() == [0] * 5 + [1, 0, 0] + [2] * 2
    assert micro.episode.tolist() == [0] * 8 + [1] * 2
    assert chosen.labels.tolist() == [3, 4, 6, 7, 8, 10, 12, 13, 3, 4]
    assert micro.turn.tolist() == [0, 0, 1, 1, 1, 2, 3, 3, 0, 0]


@pytest.mark.parametrize("row", [2, -1])
def test_a_row_that_follows_nothing_is_refused(row: int) -> None:
    with pytest.raises(ProtocolError, match="episode u"):
        joined([*TURNS, msgspec.structs.replace(BRANCHED[2], row=row)])


@pytest.mark.parametrize(
    "turn",
    [
        with_generation(TURNS[0], logprobs=(-0.1,)),
        with_generation(TURNS[0], spans=(VersionSpan(0, 1, 3, 3),)),
        with_generation(TURNS[0], spans=(VersionSpan(0, 2, 3, 3), VersionSpan(1, 2, 3, 3))),
        msgspec.structs.replace(TURNS[0], context=()),
    ],
)
def test_arrays_that_do_not_fit_are_refused(turn: Turn) -> None:
    with pytest.raises(ProtocolError, match="episode u"):
        joined([turn, TURNS[1]])


def test_a_turn_that_answers_a_side_request_is_in_no_example() -> None:
    """The same examples as of the episode without it; in a trained row it is context."""
    span = (VersionSpan(0, 1, 5, 5),)
    title = Turn(0, (9,), Generation((9,), (-9.0,), span, StopReason.STOP), untrained=True)
    first = msgspec.structs.replace(TURNS[0], index=1, row=1)
    aside = Turn(2, (), Generation((5,), (-9.0,), span, StopReason.STOP), row=1, untrained=True)
    second = msgspec.structs.replace(TURNS[1], index=3, row=1, context=())
    frames = [msgspec.msgpack.encode(turn) for turn in (title, first, aside, second)]
    ((planned, turns),) = with_turns([msgspec.structs.replace(ROW, frames=4)], frames)
    assert turns == TURNS
    assert planned.own == OWN


def test_an_example_aligns_everything_to_model_tokens() -> None:
    e = training_sample(ROW, TURNS, 5, 1, aggregations.get("prompt_mean"))
    assert e.turn.tolist() == [0, 0, 1, 1, 1] and e.rewards.tolist() == [0, 0.25, 0, 0, 0.75]
    assert e.weight == pytest.approx(1 / 12) and e.denominator == pytest.approx(5 / 12)
    assert e.position.tolist() == [2, 3, 5, 6, 7]
    assert e.rollout_logprobs.tolist() == [-0.1, -0.2, -0.3, -0.4, -0.5]
    assert e.lag.tolist() == [2, 0, 0, 0, 0]
    assert e.stale.tolist() == [True, False, False, False, False]
    assert e.exact.tolist() == [False, False, True, True, True]  # token 3 attended to keys of version 3


def test_collate_pads_right_and_flattens_rows() -> None:
    long = training_sample(ROW, TURNS, 5, 1, TOKEN_MEAN)
    short = training_sample(ROW, TURNS[:1], 5, 1, TOKEN_MEAN)
    filled = with_values([long, short], "proximal_logprobs", -torch.arange(7.0))
    micro = collate(filled, torch.float32)
    assert micro.proximal_logprobs is not None and micro.proximal_logprobs.tolist() == [
        0,
        -1,
        -2,
        -3,
        -4,
        -5,
        -6,
    ]
    assert (
        filled[1].proximal_logprobs is not None
        and filled[1].proximal_logprobs.tolist() == [-5, -6]
        and micro.value is None
    )
    assert micro.selected.ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 0, 0, 0, 0]]
    assert micro.selected.labels.tolist() == [3, 4, 6, 7, 8, 3, 4]
    assert micro.selected.predictor_index.tolist() == [1, 2, 4, 5, 6, 9, 10]
    assert micro.within_staleness.tolist() == [False, True, True, True, True, False, True]
    assert micro.selected.temperature.tolist() == [0.5] * 7
    assert micro.rollout_logprobs.dtype == torch.float32 and bool(micro.is_counted.all())


def test_no_rows_make_one_token_that_counts_for_nothing() -> None:
    micro = collate([], torch.float64)
    assert micro.selected.ids.shape == (1, 2) and micro.weight.tolist() == [0.0]
    assert not micro.is_counted.any() and not micro.within_staleness.any()


def test_a_row_without_model_tokens_is_legal() -> None:
    empty = training_sample(
        ROW, [Turn(0, (1, 2), Generation((), (), (), StopReason.LENGTH))], 5, 1, TOKEN_MEAN
    )
    assert empty.model_tokens == 0 and empty.denominator == 0
    micro = collate([empty, training_sample(ROW, TURNS, 5, 1, TOKEN_MEAN)], torch.float64)
    assert (
        np.unique(micro.episode.numpy()).tolist() == [1] and micro.selected.predictor_index.min() + 1 == 8 + 2
    )


@pytest.mark.parametrize(
    ("by_turn", "turn", "wanted"),
    [
        ((1.0, 2.0), [0, 0, 1], [0, 1, 2]),
        ((1.0, 2.0, 4.0), [0, 2, 2], [3, 0, 4]),  # turn 1 has no token of its own
        ((1.0, 2.0), [1, 1], [1, 2]),  # nor has the first, and nothing is before it
        ((), [0, 0, 1], [0, 0, 8]),  # turns say nothing: all of it on the last token
        ((1.0,), [], []),
    ],
)
def test_rewards_fall_on_the_last_token_of_their_turn(
    by_turn: tuple[float, ...], turn: list[int], wanted: list[float]
) -> None:
    own = EpisodeResult(8.0, len(turn), by_turn)
    assert token_rewards(own, np.array(turn, dtype=np.int64)).tolist() == wanted


def test_a_truncated_episode_is_kept_out_of_the_loss_on_request() -> None:
    assert not training_sample(ROW, TURNS, 5, 1, TOKEN_MEAN, mask_truncated=True).within_staleness.any()
    answered = msgspec.structs.replace(ROW, own=msgspec.structs.replace(OWN, end=EpisodeEnd.ANSWERED))
    assert training_sample(answered, TURNS, 5, 1, TOKEN_MEAN, mask_truncated=True).within_staleness.any()


PACKINGS = st.sampled_from(["padded", "packed", "tree"])
SIZES = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 300), st.integers(1, 3)), max_size=40)


def sized(*sizes: tuple[int, int, int], prompt: int = 0) -> list[PlannedTrajectory]:
    """Trajectories by group, width and rows."""
    return [
        msgspec.structs.replace(
            ROW, uid=str(i), group=str(g), tokens=width * rows, rows=rows, width=width, prompt=prompt
        )
        for i, (g, width, rows) in enumerate(sizes)
    ]


@settings(deadline=None)
@given(SIZES, st.integers(50, 1000), st.sampled_from([1, 2, 4]), PACKINGS)
def test_each_trajectory_of_a_plan_goes_to_one_rank_in_parts_of_the_budget(
    sizes: list[tuple[int, int, int]], budget: int, ranks: int, packing: Packing
) -> None:
    """No rank has more than the mean and the largest one; the work of a token grows with its row's length."""
    planned = sized(*sizes)
    rank_plans = partition_plan(planned, packing, budget, 16, ranks)
    assert len(rank_plans) == ranks
    assert sorted(p.uid for rank in rank_plans for part in rank for p in part) == sorted(
        p.uid for p in planned
    )
    for part in chain(*rank_plans):
        assert sum(p.tokens for p in part) <= budget or len(part) == 1
    if packing != "tree":
        work = [[p.tokens * (1 + p.width / 192) for part in rank for p in part] for rank in rank_plans]
        every = [*chain(*work), 0]
        assert max(map(sum, work)) <= sum(every) / ranks + max(every)


def test_members_of_a_group_share_their_prompt_on_one_rank_as_far_as_they_fit() -> None:
    """Four groups of three, 30 + 3 * 10 tokens each; then one, of which a member alone is over the budget."""
    planned = sized(*((group, 40, 1) for group in range(4) for _ in range(3)), prompt=30)
    for ranks in (1, 2):
        rank_plans = partition_plan(planned, "tree", 100, 16, ranks)
        assert [[{p.group for p in part} for part in rank] for rank in rank_plans] == [
            [{str(group)} for group in range(rank, 4, ranks)] for rank in range(ranks)
        ]
    (rank_plans,) = partition_plan(
        sized((0, 50, 1), (0, 50, 1), (0, 50, 1), (0, 120, 1), prompt=30), "tree", 70, 16, 1
    )
    assert [[p.uid for p in part] for part in rank_plans] == [["3"], ["0", "1"], ["2"]]
