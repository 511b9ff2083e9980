"""Engines whose log-probs are not the trainer's: which gaps rounding explains, and what happens then."""

from __future__ import annotations

import math
from itertools import product

import msgspec
import numpy as np
import pytest

from asyncrl.config import parse
from asyncrl.coordinator.mismatches import (
    MEAN_MULTIPLE,
    MIN_MEAN_LIMIT,
    MIN_TOKENS,
    SOUND_PROBES,
    Mismatches,
    equality_evidence,
    gap_limit,
)
from asyncrl.types import PolicyVersion
from asyncrl.weights.manifest import LogprobGaps, WeightsRef
from asyncrl.wire.messages.shared import Loaded, ProbeGap, ProbeSamples, SampledSequence
from asyncrl.wire.messages.trainer import SurprisalSums

ENGINE = b"engine/1/b7"
SUCCESSOR = b"engine/1/c8"
WORKER = b"rollout/0/w3"
FLOAT32_ROUNDING = 1e-6
BFLOAT16_ROUNDING = 0.05  # of SmolLM2-135M


def mismatches(action: str = "replace", temperature: float = 1.0) -> Mismatches:
    return Mismatches(
        parse(
            {
                "name": "t",
                "model": {"path": "m"},
                "data": {"train": "d"},
                "rollout": {"temperature": temperature},
                "weights": {"on_mismatch": action},
            }
        )
    )


def loaded(
    gap_size: float, rounding: float = FLOAT32_ROUNDING, step: int = 3, mean_gap: float | None = None
) -> Loaded:
    """An answer with this median gap, and this mean gap, if that is not the same."""
    gap = ProbeGap(
        largest=4 * gap_size,
        mean=gap_size if mean_gap is None else mean_gap,
        median=gap_size,
        tokens=512,
        rounding=LogprobGaps(4 * rounding, rounding, rounding),
    )
    return Loaded(WeightsRef(PolicyVersion(1, step), "v"), "train", "sum", 0.1, probe_gap=gap)


@pytest.mark.parametrize(
    ("gap_size", "rounding", "may_sample"),
    [
        (1e-5, FLOAT32_ROUNDING, True),
        (0.02, FLOAT32_ROUNDING, False),  # the weights of one step before
        (1.4 * BFLOAT16_ROUNDING, BFLOAT16_ROUNDING, True),  # both round
        (4 * BFLOAT16_ROUNDING, BFLOAT16_ROUNDING, False),
        (math.inf, BFLOAT16_ROUNDING, False),
    ],
)
@pytest.mark.parametrize("earlier_probes", [0, 5])
def test_every_probe_is_judged_by_the_trainers_rounding(
    gap_size: float, rounding: float, may_sample: bool, earlier_probes: int
) -> None:
    judge = mismatches()
    for step in range(earlier_probes):
        assert judge.judge_probe(ENGINE, "engine 1", loaded(rounding, rounding, step))
    assert judge.judge_probe(ENGINE, "engine 1", loaded(gap_size, rounding, step=7)) is may_sample
    assert judge.count == (not may_sample)
    if not may_sample:
        assert "engine 1" in judge.newest and "v7" in judge.newest and f"{gap_size:.3g} nats" in judge.newest


@pytest.mark.parametrize("rounding", [FLOAT32_ROUNDING, BFLOAT16_ROUNDING])
def test_few_tokens_are_judged_by_a_wider_limit(rounding: float) -> None:
    """Routers that choose other experts after rounding change the log-probs of some tokens, and with those
    the mean. An engine that is wrong for few tokens changes the mean by more."""
    judge = mismatches("stop")
    limit = max(MIN_MEAN_LIMIT, MEAN_MULTIPLE * rounding)
    assert judge.judge_probe(ENGINE, "engine 1", loaded(rounding, rounding, mean_gap=0.9 * limit))
    assert not judge.judge_probe(ENGINE, "engine 1", loaded(rounding, rounding, mean_gap=1.1 * limit))
    assert f"mean {1.1 * limit:.3g}" in judge.fatal and f"a mean of at most {limit:.2g}" in judge.fatal


def test_an_engine_without_a_comparison_is_not_judged() -> None:
    judge = mismatches("stop")
    without_probe = Loaded(WeightsRef(PolicyVersion(1, 0), "v"), "train", "sum", 0.1)
    assert judge.judge_probe(ENGINE, "engine 1", without_probe) and not judge.count


def test_an_engine_is_replaced_once_and_then_the_run_stops() -> None:
    judge = mismatches("replace")
    assert not judge.judge_probe(ENGINE, "engine 1", loaded(0.5))
    assert not judge.judge_probe(WORKER, "worker 0", loaded(0.5))  # counted by engine
    due_requests = judge.due_replacements(0.0, connected=())
    assert [(peer, request.role, request.incarnation) for peer, request, _ in due_requests] == [
        (ENGINE, "engine", "b7"),
        (WORKER, "rollout", "w3"),
    ]
    assert judge.count == 2 and not judge.fatal

    judge.forget_predecessors(SUCCESSOR)
    assert not judge.judge_probe(SUCCESSOR, "engine 1", loaded(0.5))
    assert "replacing its process once did not help" in judge.fatal


def test_a_process_that_is_to_be_replaced_is_judged_once() -> None:
    """Its verdict stands: another comparison was on its way, a worker has two engines, and a probe may come
    that it would pass."""
    judge = mismatches("replace")
    assert not judge.judge_probe(ENGINE, "engine 1", loaded(0.5))
    for message in (loaded(0.5), loaded(1e-6)):
        assert not judge.judge_probe(ENGINE, "engine 1", message) and not judge.may_sample(ENGINE)
    assert not judge.judge_samples(ENGINE, "engine 1", PolicyVersion(1, 8), sums(0.0))
    assert judge.count == 1 and not judge.fatal


def test_a_successor_may_sample_once_it_is_compared() -> None:
    judge = mismatches("replace")
    assert not judge.judge_probe(ENGINE, "engine 1", loaded(0.5))
    judge.forget_predecessors(SUCCESSOR)
    without_probe = Loaded(WeightsRef(PolicyVersion(1, 4), "v"), "train", "sum", 0.1, uncompared=True)
    assert judge.judge_probe(SUCCESSOR, "engine 1", without_probe)
    assert judge.judge_probe(SUCCESSOR, "engine 1", msgspec.structs.replace(loaded(0.0), lane="eval"))
    assert judge.may_load(SUCCESSOR) and not judge.may_sample(SUCCESSOR)
    assert judge.judge_probe(SUCCESSOR, "engine 1", loaded(0.0)) and judge.may_sample(SUCCESSOR)
    assert judge.may_sample(b"engine/11/c9"), "of another engine nothing is known"


def test_a_replacement_is_requested_again_while_the_process_is_connected() -> None:
    judge = mismatches("replace")
    judge.judge_probe(ENGINE, "engine 1", loaded(0.5))
    period = 60.0  # twice launch.lease

    def repetitions(now: float, *connected: bytes) -> list[bool]:
        return [is_repeated for _, _, is_repeated in judge.due_replacements(now, connected)]

    assert repetitions(0.0) == [False], "the first request does not wait for the process"
    assert repetitions(period / 2, ENGINE) == []
    assert repetitions(period, ENGINE) == [True]
    assert repetitions(3 * period) == [], "it is silent"
    assert repetitions(3 * period, ENGINE) == [True], "it is back"
    judge.forget_predecessors(SUCCESSOR)
    assert repetitions(9 * period, ENGINE, SUCCESSOR) == [] and judge.replacements == {}


@pytest.mark.parametrize("launch", ["launch", "next launch"])
def test_verdicts_survive_the_coordinator_and_not_the_launch(launch: str) -> None:
    before = mismatches("replace")
    before.judge_probe(WORKER, "worker 0", loaded(0.0))
    before.judge_probe(ENGINE, "engine 1", loaded(0.5))
    after = mismatches("replace")
    after.restore_verdicts(before.encode_verdicts("launch"), launch)
    if launch != "launch":
        assert (after.count, after.newest, after.replacements) == (0, "", {}) and after.may_sample(ENGINE)
        return

    assert (after.count, after.newest) == (1, before.newest) and not after.may_load(ENGINE)
    assert after.may_sample(WORKER) and after.is_uncompared(WORKER), "not by this coordinator"
    assert after.due_replacements(9.0, [ENGINE]) == [(ENGINE, before.replacements[ENGINE], True)]
    after.forget_predecessors(SUCCESSOR)
    assert not after.may_sample(SUCCESSOR)
    after.judge_probe(SUCCESSOR, "engine 1", loaded(0.5))
    assert "replacing its process once did not help" in after.fatal

    last = mismatches("replace")
    last.restore_verdicts(after.encode_verdicts("launch"), "launch")
    assert last.fatal == after.fatal


def test_a_restarted_coordinator_continues_the_count_of_tests() -> None:
    """All tests of a run share one rate of false alarms."""
    before = mismatches("warn")
    before.judge_probe(WORKER, "worker 0", loaded(0.0))
    copies = ProbeSamples(PolicyVersion(1, 0), (sampled(1, (5,) * 12), sampled(1, (5,) * 12)))
    different = ProbeSamples(PolicyVersion(1, 0), (sampled(1, (5,) * 12), sampled(1, (6,) * 12)))
    for index in range(1000):
        before.judge_samples(b"rollout/%d/a" % index, f"worker {index}", PolicyVersion(1, 0), sums(0.0))
        before.judge_independence(WORKER, "worker 0", different)
    assert before.count == 0

    after = mismatches("stop")
    after.restore_verdicts(before.encode_verdicts("launch"), "launch")
    after.judge_probe(WORKER, "worker 0", loaded(0.0))
    assert after.judge_samples(WORKER, "worker 0", PolicyVersion(1, 0), sums(-6.3))
    assert after.judge_independence(WORKER, "worker 0", copies)
    first = mismatches("stop")
    first.judge_probe(WORKER, "worker 0", loaded(0.0))
    assert not first.judge_samples(WORKER, "worker 0", PolicyVersion(1, 0), sums(-6.3))
    assert not mismatches("stop").judge_independence(WORKER, "worker 0", copies)


def test_an_engine_that_drifts_does_not_stop_a_run_with_alerts_when_the_coordinator_is_restarted() -> None:
    before = mismatches("warn")
    before.judge_probe(ENGINE, "engine 1", loaded(0.0))
    after = mismatches("warn")
    after.restore_verdicts(before.encode_verdicts("launch"), "launch")
    assert after.judge_probe(ENGINE, "engine 1", loaded(2.0)) and after.count == 1 and not after.fatal


def test_an_engine_that_was_sound_for_long_may_be_replaced_again() -> None:
    judge = mismatches("replace")
    for process in (b"engine/1/a", b"engine/1/b"):
        assert not judge.judge_probe(process, "engine 1", loaded(0.5))
        judge.forget_predecessors(b"engine/1/next")
        for _ in range(SOUND_PROBES):
            assert judge.judge_probe(b"engine/1/next", "engine 1", loaded(1e-6))
    assert judge.count == 2 and not judge.fatal


def test_another_model_stops_the_run_whatever_the_action() -> None:
    """At the first comparison of a process; a later gap of this size is a mismatch like others."""
    judge = mismatches("warn")
    assert not judge.judge_probe(ENGINE, "engine 1", loaded(2.0, BFLOAT16_ROUNDING))
    assert "start the engine with the trainer's model.path" in judge.fatal and judge.count == 1

    later = mismatches("warn")
    for mean_gap in (BFLOAT16_ROUNDING, 2.0):
        assert later.judge_probe(ENGINE, "engine 1", loaded(mean_gap, BFLOAT16_ROUNDING))
    assert later.count == 1 and not later.fatal


def test_an_alert_ends_with_the_comparison_that_refutes_it() -> None:
    judge = mismatches("warn")
    judge.judge_probe(ENGINE, "engine 1", loaded(0.1))
    judge.judge_tokens(3, 1.5, MIN_TOKENS)
    assert "step 3" in judge.newest
    judge.judge_tokens(4, 1e-6, MIN_TOKENS)
    assert "engine 1" in judge.newest
    judge.judge_probe(ENGINE, "engine 1", loaded(1e-6))
    assert judge.newest == "" and judge.count == 2


def test_a_low_temperature_enlarges_what_rounding_explains() -> None:
    judge = mismatches("stop", temperature=0.25)
    judge.judge_probe(ENGINE, "engine 1", loaded(0.02, rounding=0.02))
    judge.judge_tokens(1, 0.2, MIN_TOKENS)
    assert not judge.count
    judge.judge_tokens(1, 0.25, MIN_TOKENS)
    assert judge.count == 1


def test_a_mismatch_stops_the_run_or_is_only_reported() -> None:
    stopping = mismatches("stop")
    assert not stopping.judge_probe(ENGINE, "engine 1", loaded(0.5))
    assert "weights.on_mismatch=warn" in stopping.fatal and not stopping.replacements

    warning = mismatches("warn")
    assert warning.judge_probe(ENGINE, "engine 1", loaded(0.1))
    assert (warning.count, warning.fatal, warning.replacements) == (1, "", {})


def test_trained_tokens_are_judged_from_the_first_step() -> None:
    judge = mismatches("stop")
    judge.judge_tokens(1, 1.5, MIN_TOKENS)
    assert not judge.count, "no probe has told the rounding yet"

    judge.judge_probe(ENGINE, "engine 1", loaded(1e-6))
    judge.judge_tokens(1, gap_limit(FLOAT32_ROUNDING), MIN_TOKENS)
    assert not judge.count
    judge.judge_tokens(2, 1.5, MIN_TOKENS)
    assert judge.count == 1 and "step 2, differ from the trainer's by 1.5 nats" in judge.fatal


def test_few_trained_tokens_of_each_step_are_judged_together() -> None:
    judge = mismatches("warn")
    judge.judge_probe(ENGINE, "engine 1", loaded(1e-6))
    for step in (1, 2, 3):
        judge.judge_tokens(step, 0.0, 0)
        judge.judge_tokens(step, 0.5 * step, MIN_TOKENS // 3)
    assert not judge.count
    judge.judge_tokens(4, 0.0, MIN_TOKENS % 3)
    assert judge.count == 1 and f"for {MIN_TOKENS} tokens, up to step 4" in judge.newest
    assert "by 0.996 nats" in judge.newest

    judge.judge_tokens(5, 0.9, MIN_TOKENS - 1)
    judge.judge_tokens(6, 0.0, MIN_TOKENS)
    assert judge.count == 1 and not judge.newest, "a step with enough tokens is judged alone"
    judge.judge_tokens(7, 0.0, 1)
    assert judge.count == 2, "the tokens of step 5 were still to be judged"


def sums(z: float, gap: float = 0.0, tokens: int = 1024) -> SurprisalSums:
    """Sums over tokens whose surprisal has the variance 1."""
    return SurprisalSums(
        engine=ENGINE.decode(),
        tokens=tokens,
        deviation=z * math.sqrt(tokens),
        squares=float(tokens),
        variance=float(tokens),
        median_gap=gap,
    )


def test_tokens_of_an_engine_without_scores_are_judged_by_the_trainers_rounding() -> None:
    judge = mismatches()
    judge.note_rounding(LogprobGaps(4e-6, FLOAT32_ROUNDING, FLOAT32_ROUNDING))
    assert judge.judge_probe(
        ENGINE, "engine 1", Loaded(WeightsRef(PolicyVersion(1, 3), "v"), "train", "", 0.1)
    )
    judge.judge_tokens(4, gap_limit(FLOAT32_ROUNDING), MIN_TOKENS)
    assert judge.count == 0
    judge.judge_tokens(5, 1.5, MIN_TOKENS)
    assert judge.count == 1


@pytest.mark.parametrize(
    ("z", "comparison", "cause"),
    [(-12.0, "less surprising", "top_p, top_k or min_p"), (12.0, "more surprising", "a higher temperature")],
)
def test_an_engine_is_named_by_its_samples(z: float, comparison: str, cause: str) -> None:
    judge = mismatches("stop")
    judge.judge_probe(ENGINE, "engine 1", loaded(0.0))
    assert not judge.judge_samples(ENGINE, "engine 1", PolicyVersion(1, 8), sums(z))
    assert (
        "engine 1" in judge.fatal and "up to v8" in judge.fatal and f"z = {z:.1f} over 1,024" in judge.fatal
    )
    assert comparison in judge.fatal and cause in judge.fatal
    assert (judge.count, judge.sample_z, judge.sample_tokens) == (1, abs(z), 1024)


def test_an_engine_whose_samples_fail_again_is_not_replaced_for_ever() -> None:
    """It passes every probe in between."""
    judge = mismatches("replace")
    for process in (b"engine/1/a", b"engine/1/b"):
        judge.forget_predecessors(process)
        for _ in range(2 * SOUND_PROBES):
            assert judge.judge_probe(process, "engine 1", loaded(0.0))
        assert not judge.judge_samples(process, "engine 1", PolicyVersion(1, 8), sums(-12.0))
    assert "replacing its process once did not help" in judge.fatal


def test_few_sampled_tokens_are_no_evidence_and_a_failed_sum_is_reported_once_a_version() -> None:
    judge = mismatches("warn")
    judge.judge_probe(ENGINE, "engine 1", loaded(0.0, BFLOAT16_ROUNDING))
    for _ in range(15):
        assert judge.judge_samples(ENGINE, "engine 1", PolicyVersion(1, 0), sums(0.0, gap=1.0, tokens=16))
    assert judge.count == 0
    for _ in range(3):
        judge.judge_samples(ENGINE, "engine 1", PolicyVersion(1, 0), sums(0.0, gap=1.0, tokens=16))
    assert judge.count == 1 and "256 tokens" in judge.newest

    judge.judge_samples(ENGINE, "engine 1", PolicyVersion(1, 1), sums(0.0, gap=0.01))
    assert judge.newest == "", "the samples of a later version are right"


def test_few_tokens_of_each_version_are_judged_together() -> None:
    judge = mismatches("stop")
    judge.judge_probe(ENGINE, "engine 1", loaded(0.0))
    assert judge.judge_samples(ENGINE, "engine 1", PolicyVersion(1, 1), sums(0.0, gap=0.01, tokens=128))
    assert not judge.judge_samples(ENGINE, "engine 1", PolicyVersion(1, 2), sums(0.0, gap=0.01, tokens=128))
    assert "256 tokens that it sampled up to v2" in judge.fatal


def test_samples_are_judged_together_by_process() -> None:
    judge = mismatches("replace")
    judge.judge_probe(ENGINE, "engine 1", loaded(0.0))
    verdicts = [
        judge.judge_samples(ENGINE, "engine 1", PolicyVersion(1, step), sums(-3.0)) for step in range(8)
    ]
    assert verdicts[0] and not verdicts[-1], "one z of -3 is chance, eight are not"
    assert judge.judge_samples(WORKER, "worker 0", PolicyVersion(1, 8), sums(-3.0))
    judged_probes = verdicts.index(False) + 1  # samples after the verdict are not counted
    assert judge.sample_z == pytest.approx(3 * math.sqrt(judged_probes))

    judge.forget_predecessors(SUCCESSOR)
    assert judge.judge_samples(SUCCESSOR, "engine 1", PolicyVersion(1, 9), sums(-3.0))
    assert judge.sample_z == pytest.approx(3.0) and judge.sample_tokens == (judged_probes + 2) * 1024


def test_engines_share_the_false_alarm_rate_of_a_run() -> None:
    """The more engines, the more it takes."""
    judge = mismatches("warn")
    judge.judge_probe(ENGINE, "engine 1", loaded(0.0))
    for index in range(2000):
        judge.judge_samples(b"engine/%d/a" % index, f"engine {index}", PolicyVersion(1, 0), sums(-6.0))
    assert 1 <= judge.count < 100


def test_reported_log_probs_of_samples_are_judged_like_the_probe() -> None:
    judge = mismatches("stop")
    judge.judge_probe(ENGINE, "engine 1", loaded(0.0, BFLOAT16_ROUNDING))
    assert judge.judge_samples(ENGINE, "engine 1", PolicyVersion(1, 0), sums(0.0, gap=0.14))
    assert not judge.judge_samples(ENGINE, "engine 1", PolicyVersion(1, 1), sums(0.0, gap=0.16))
    assert "sampled up to v1, by 0.16 nats" in judge.fatal
    not_finite = mismatches("stop")
    not_finite.judge_probe(ENGINE, "engine 1", loaded(0.0))
    assert not not_finite.judge_samples(ENGINE, "engine 1", PolicyVersion(1, 0), sums(0.0, gap=math.inf))


def test_samples_are_not_judged_without_a_probe() -> None:
    judge = mismatches("stop")
    assert judge.judge_samples(ENGINE, "engine 1", PolicyVersion(1, 0), sums(-50.0)) and not judge.count


def test_an_engine_that_names_another_version_is_a_mismatch_until_it_names_the_right_one() -> None:
    version = PolicyVersion(1, 8)
    judge = mismatches("warn")
    assert judge.judge_labels(ENGINE, "engine 1", ProbeSamples(version, (), wrong_label=7))
    assert judge.newest == "engine 1 names v7 as the version of tokens that it sampled with v8"
    assert judge.judge_labels(ENGINE, "engine 1", ProbeSamples(version, ()))
    assert judge.newest == "" and judge.count == 1

    judge = mismatches("replace")
    assert not judge.judge_labels(ENGINE, "engine 1", ProbeSamples(version, (), wrong_label=7))
    assert not judge.may_sample(ENGINE)


def sampled(prompt: int, continuation: tuple[int, ...], logprob: float = -1.0) -> SampledSequence:
    return SampledSequence((prompt, *continuation), (logprob,) * len(continuation))


def test_equal_samples_of_one_prompt_are_a_mismatch() -> None:
    version = PolicyVersion(1, 8)
    copies = tuple(sampled(prompt, (5,) * 16) for prompt in (1, 1, 2, 2))
    judge = mismatches("stop")
    assert not judge.judge_independence(ENGINE, "engine 1", ProbeSamples(version, copies))
    assert "2 of 4 sequences sampled with v8 repeat the first" in judge.fatal

    judge = mismatches("stop")
    for step in range(100):  # one certain sequence, and others that differ
        likely = [sampled(1, (5,) * 16, -0.001) for _ in range(4)]
        different = [sampled(2, (step % 7, index)) for index in range(12)]
        message = ProbeSamples(PolicyVersion(1, step), (*likely, *different))
        assert judge.judge_independence(ENGINE, "engine 1", message)
    assert not judge.count


def test_the_evidence_of_independent_sequences_has_the_mean_one() -> None:
    """Exactly, over all pairs of sequences of two tokens; what a sequence is likely to be does not matter."""
    probabilities = {0: 0.8, 1: 0.15, 2: 0.05}  # the likeliest sequence has more than 1/2
    pairs = [(first, second) for first in probabilities for second in probabilities]
    mean = 0.0
    for pair in product(pairs, repeat=2):
        sequences = [
            SampledSequence((9, *tokens), tuple(math.log(probabilities[token]) for token in tokens))
            for tokens in pair
        ]
        log_ratio = equality_evidence(sequences).log_ratio
        mean += math.prod(probabilities[token] for tokens in pair for token in tokens) * math.exp(log_ratio)
    assert mean == pytest.approx(1.0)


def sample_greedily(generator: np.random.Generator, step: int) -> tuple[SampledSequence, ...]:
    """Sample as an honest engine at temperature 0.01, of which each request rounds its logits in its own way:
    at a near tie, it gives the token that it has chosen nearly all probability."""
    sequences: list[SampledSequence] = []
    for prompt in range(4):
        logits_by_prefix: dict[tuple[int, ...], np.ndarray] = {}
        for _ in range(4):
            tokens: tuple[int, ...] = ()
            logprobs: tuple[float, ...] = ()
            for _ in range(16):
                if tokens not in logits_by_prefix:
                    logits_by_prefix[tokens] = generator.normal(0, 2, 200)
                logits = (logits_by_prefix[tokens] + generator.normal(0, 0.05, 200)) / 0.01
                probabilities = np.exp(logits - np.logaddexp.reduce(logits))
                token = int(generator.choice(len(logits), p=probabilities / probabilities.sum()))
                tokens += (token,)
                logprobs += (float(np.log(probabilities[token])),)
            sequences.append(SampledSequence((step, prompt, *tokens), logprobs))
    return tuple(sequences)


def test_rounding_at_a_low_temperature_is_no_evidence_of_copies() -> None:
    generator = np.random.default_rng(0)
    judge = mismatches("warn", temperature=0.01)
    for step in range(8):
        message = ProbeSamples(PolicyVersion(1, step), sample_greedily(generator, step))
        judge.judge_independence(ENGINE, "engine 1", message)
    assert judge.count == 0


def test_reports_without_a_pair_are_no_tests_of_independence() -> None:
    """Otherwise each of them lowers the alarm rate of the reports with a pair."""
    version = PolicyVersion(1, 8)
    judge = mismatches("stop")
    for prompt in range(1000):
        single = ProbeSamples(version, (sampled(prompt, (5,) * 16),))
        assert judge.judge_independence(ENGINE, "engine 1", single)
    copies = (sampled(1, (5,) * 12), sampled(1, (5,) * 12))
    assert not judge.judge_independence(ENGINE, "engine 1", ProbeSamples(version, copies))
