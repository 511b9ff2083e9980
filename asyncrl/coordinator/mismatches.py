"""Decides what happens to an engine whose log-probs are not the trainer's, by `weights.on_mismatch`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Sequence
from typing import NamedTuple

import msgspec

from asyncrl.algorithms.surprisal import SurprisalTest
from asyncrl.config import RunConfig
from asyncrl.coordinator.state import log
from asyncrl.types import PolicyVersion
from asyncrl.weights.manifest import LogprobGaps
from asyncrl.wire.messages.shared import Loaded, ProbeGap, ProbeSamples, Replace, SampledSequence
from asyncrl.wire.messages.trainer import SurprisalSums

# An engine may differ from the trainer by this multiple of the trainer's own rounding. Both round, each in
# its own way, which explains a factor of 1.4; if the engine rounds at random, 1.7 (tools/bench/rounding.py).
# Medians are compared: after rounding, routers of a mixture of experts choose other experts for some tokens,
# whose log-probs jump. How many differs from probe to probe, and so does the mean.
ROUNDING_MULTIPLE = 3.0
MIN_GAP_LIMIT = 1e-3  # nats; honest engines in float32 differ by 1e-5
MEAN_MULTIPLE = 10.0  # of the mean of the trainer's rounding, for engines that are wrong for few tokens
MIN_MEAN_LIMIT = 1e-2  # nats
# At the first comparison of a process, a mean gap beyond `mean_limit` and a largest gap beyond this many nats
# mean another model, which no run may train with.
OTHER_MODEL_GAP = 1.0
# The chance that a test of samples (surprisal, independence) judges any honest engine wrongly in a whole run:
# 1e-4 for both tests together.
ALARM_RATE = 0.5e-4
SOUND_PROBES = 5  # comparisons that a replaced process must pass before it may be replaced again
MIN_SAMPLED_TOKENS = 256  # tokens that an engine has sampled for its test, over which a mean gap is judged
REFUTING_TOKENS = 1024  # sampled tokens without a mismatch that end the alert about an engine's samples
MIN_TOKENS = 256  # trained tokens, sampled by the trained version itself, over which a mean gap is judged


def gap_limit(rounding: float) -> float:
    """Return the largest gap, in nats, that `rounding` explains; both are medians, or both are means of many
    tokens."""
    return max(MIN_GAP_LIMIT, ROUNDING_MULTIPLE * rounding)


def mean_limit(rounding: LogprobGaps) -> float:
    """Return the largest mean gap, in nats, of a probe of an honest engine."""
    return max(MIN_MEAN_LIMIT, MEAN_MULTIPLE * rounding.mean)


class SampleGap(NamedTuple):
    """The differences in nats between reported log-probs and the trainer's, over an engine's samples of a
    version, and of the versions before if they had too few tokens to be judged.

    median_sum: the median gap of each report, times its tokens, summed over the reports.
    """

    version: PolicyVersion
    median_sum: float = 0.0
    tokens: int = 0

    @property
    def mean_of_medians(self) -> float:
        return self.median_sum / max(1, self.tokens)


class StoredVerdicts(msgspec.Struct, frozen=True):
    """What a restarted coordinator must know of the mismatches so far. For the fields see `Mismatches`."""

    launch: str  # the verdicts concern the processes of this launch
    count: int
    fatal: str
    problems: list[tuple[str, str, str]]  # engine, comparison and text
    replaced: set[tuple[str, str]]
    passed_probes: dict[str, int]
    past_first_comparison: set[str]
    replacements: dict[str, Replace]
    suspect_places: set[str]
    test_count: int
    independence_test_count: int


class Mismatches:
    """Judges the gaps between engines and trainer, of probes and of trained tokens, and engines' samples.

    `count`: mismatches so far. `fatal`: why the run must stop; '' otherwise. `needs_storing`: the verdicts
    may have changed since the caller has stored them and set this to False.

    A process that has failed gets neither versions (`may_load`) nor work (`may_sample`), and is judged no
    more. The process that takes its place gets no work before it has been compared with the trainer.

        compared ──► mismatch ──► replacement requested ──► successor says hello ──► compared ──► may sample

    The verdict on a process holds until its successor says hello: a process that was only silent keeps it.
    """

    def __init__(self, config: RunConfig) -> None:
        self._action = config.weights.on_mismatch
        self._temperature = config.rollout.temperature
        self._replace_again_seconds = 2 * config.launch.lease  # a killed process is missed after a lease
        # Comparisons after which the process of an engine was replaced, with the engine's name.
        self._replaced: set[tuple[str, str]] = set()
        self._passed_probes: Counter[str] = Counter()  # by name of the engine, since a mismatch
        self._problems: dict[tuple[str, str], str] = {}  # unsolved mismatches by engine and comparison
        self._rounding: LogprobGaps | None = None  # of the newest probe
        self._past_first_comparison: set[bytes] = set()  # their next gap is no other model's
        self._compared_by_this_coordinator: set[bytes] = set()  # the other processes are uncompared
        # By identity of the engine's process.
        self._sample_tests: dict[bytes, SurprisalTest] = {}
        self._sample_gaps: dict[bytes, SampleGap] = {}
        self._failed_versions: dict[bytes, PolicyVersion] = {}  # whose samples were reported as a mismatch
        self._unjudged_tokens = 0.0  # of batches with too few tokens, since their last verdict
        self._unjudged_gap_sum = 0.0  # nats, over these tokens
        self._test_count = 0  # tests of samples that have begun
        self._independence_test_count = 0
        # By identity of the engine's process, until its successor says hello.
        self._replacements: dict[bytes, Replace] = {}
        self._next_request_at: dict[bytes, float] = {}
        self._suspect_places: set[str] = set()  # places of replaced processes, until a comparison
        self.sample_tokens = 0  # tested so far
        self.count = 0
        self.fatal = ""
        self.needs_storing = False

    def may_load(self, peer: bytes) -> bool:
        """Return False for a process that is to be replaced."""
        return peer not in self._replacements and not self.fatal

    def may_sample(self, peer: bytes) -> bool:
        """Return False for a process that is to be replaced, and for its successor until it is compared."""
        return self.may_load(peer) and place_of(peer) not in self._suspect_places

    def is_uncompared(self, peer: bytes) -> bool:
        """Return True if this coordinator has received no comparison of the process with the trainer."""
        return peer not in self._compared_by_this_coordinator

    def note_rounding(self, rounding: LogprobGaps) -> None:
        """Note the trainer's own rounding at a probe, also for engines that compute no log-probs of given
        texts: the tokens that the run trains on are judged by it."""
        self._rounding = rounding

    @property
    def newest(self) -> str:
        """The newest mismatch that no later comparison has refuted, for the alert; '' if there is none."""
        return next(reversed(self._problems.values()), "")

    def judge_probe(self, peer: bytes, name: str, message: Loaded) -> bool:
        """Return False if the engine's process is to be replaced (the first time), or the run to stop."""
        if not self.may_load(peer):
            return False
        if message.uncompared:
            return True

        self.needs_storing = True
        is_first = peer not in self._past_first_comparison
        if message.lane == "train":  # a second engine, for validation, proves nothing about the first
            self._past_first_comparison.add(peer)
            self._compared_by_this_coordinator.add(peer)
            self._suspect_places.discard(place_of(peer))

        gap = message.probe_gap
        if gap is None:  # the engine computes no log-probs
            return True
        self.note_rounding(gap.rounding)

        has_wrong_mean = gap.mean > mean_limit(gap.rounding)
        if has_wrong_mean or gap.median > gap_limit(gap.rounding.median):
            text = describe_gap(name, message.ref.version.step, gap)
            is_other_model = gap.largest > OTHER_MODEL_GAP and has_wrong_mean
            if self._action == "warn" and is_first and is_other_model:
                self._note_problem(name, "probe", text)
                self.fatal = f"{text}; start the engine with the trainer's model.path and dtype"
                return False
            return self._act_on(peer, name, "probe", text)

        self._problems.pop((name, "probe"), None)
        self._passed_probes[name] += 1
        if self._passed_probes[name] >= SOUND_PROBES:
            self._replaced.discard((name, "probe"))
        return True

    def judge_samples(self, peer: bytes, name: str, version: PolicyVersion, sums: SurprisalSums) -> bool:
        """Judge all sequences that an engine's process has sampled for a test; these of `version` are new.
        Returns as `judge_probe` does."""
        if self._rounding is None or not self.may_load(peer):
            return self.may_load(peer)

        self.needs_storing = True
        largest_gap = gap_limit(self._at_temperature(self._rounding.median))
        mean_rounding = self._at_temperature(self._rounding.mean)

        test = self._sample_tests.get(peer)
        if test is None:
            self._test_count += 1
            alarm_rate = ALARM_RATE / (self._test_count * (self._test_count + 1))  # sums to ALARM_RATE
            test = self._sample_tests[peer] = SurprisalTest(alarm_rate)
        test.add(tokens=sums.tokens, deviation=sums.deviation, squares=sums.squares, variance=sums.variance)
        self.sample_tokens += sums.tokens

        gap = self._sample_gaps.get(peer)
        if gap is None or (gap.version != version and gap.tokens >= MIN_SAMPLED_TOKENS):
            gap = SampleGap(version)
        median_sum = gap.median_sum + sums.median_gap * sums.tokens
        gap = self._sample_gaps[peer] = SampleGap(version, median_sum, gap.tokens + sums.tokens)
        has_wrong_logprobs = gap.tokens >= MIN_SAMPLED_TOKENS and gap.mean_of_medians > largest_gap
        if not has_wrong_logprobs and not test.has_failed(mean_rounding):
            if test.tokens >= REFUTING_TOKENS:
                self._problems.pop((name, "samples"), None)
            return True

        if self._failed_versions.get(peer) == version:  # a failed sum stays failed: reported once a version
            return True
        self._failed_versions[peer] = version

        text = describe_samples(name, version.step, test)
        if has_wrong_logprobs:
            text = (
                f"{name} reports log-probs that differ from the trainer's: for {gap.tokens:,} tokens that it "
                f"sampled up to v{version.step}, by {gap.mean_of_medians:.3g} nats (mean of medians); "
                f"rounding explains at most {largest_gap:.2g}"
            )
        return self._act_on(peer, name, "samples", text)

    def judge_labels(self, peer: bytes, name: str, message: ProbeSamples) -> bool:
        """Judge the versions that an engine names for the tokens that it has sampled for a test. Returns as
        `judge_probe` does."""
        if not self.may_load(peer):
            return False

        self.needs_storing = True
        if message.wrong_label is None:
            self._problems.pop((name, "labels"), None)
            return True

        text = (
            f"{name} names v{message.wrong_label} as the version of tokens that it sampled with "
            f"v{message.version.step}"
        )
        return self._act_on(peer, name, "labels", text)

    def judge_independence(self, peer: bytes, name: str, message: ProbeSamples) -> bool:
        """Judge whether sequences of an engine with the same prompt are equal more often than by chance.
        Returns as `judge_probe` does."""
        if not self.may_load(peer):
            return False

        evidence = equality_evidence(message.sequences)
        if not evidence.compared_count:
            return True

        self.needs_storing = True
        self._independence_test_count += 1
        test_number = self._independence_test_count
        alarm_rate = ALARM_RATE / (test_number * (test_number + 1))  # sums to ALARM_RATE
        if evidence.log_ratio < -math.log(alarm_rate):
            return True

        text = (
            f"{name} does not sample independently: {evidence.equal_count} of {len(message.sequences)} "
            f"sequences sampled with v{message.version.step} repeat the first sequence sampled for the same "
            "prompt; it may use one seed for all requests"
        )
        return self._act_on(peer, name, "independence", text)

    def judge_tokens(self, step: int, mean_gap: float, tokens: float) -> None:
        """Judge the gap of a batch's tokens that the trained version itself has sampled. Batches with too few
        such tokens are judged together. No engine can be named, so that none is replaced."""
        if self._rounding is None or not tokens:
            return

        if tokens < MIN_TOKENS:
            self._unjudged_tokens += tokens
            self._unjudged_gap_sum += mean_gap * tokens
            if self._unjudged_tokens < MIN_TOKENS:
                return
            tokens = self._unjudged_tokens
            mean_gap = self._unjudged_gap_sum / tokens
            self._unjudged_tokens = self._unjudged_gap_sum = 0.0

        self.needs_storing = True
        largest_gap = gap_limit(self._at_temperature(self._rounding.mean))
        if mean_gap <= largest_gap:
            self._problems.pop(("", "tokens"), None)
            return

        text = (
            f"the log-probs that engines reported for {tokens:,.0f} tokens, up to step {step}, differ "
            f"from the trainer's by {mean_gap:.3g} nats on average; rounding explains at most "
            f"{largest_gap:.2g}"
        )
        self._note_problem("", "tokens", text)
        if self._action == "stop":
            self.fatal = f"{text}; {ADVICE}"

    @property
    def sample_z(self) -> float:
        """The largest |z| among the tests of the engines' samples."""
        return max((abs(test.z) for test in self._sample_tests.values()), default=0.0)

    def forget_predecessors(self, peer: bytes) -> None:
        """Forget the earlier processes in the place of this one, which has said hello."""
        known_peers = {*self._past_first_comparison, *self._sample_tests, *self._replacements}
        for known_peer in known_peers:
            if known_peer != peer and place_of(known_peer) == place_of(peer):
                self.needs_storing = True
                self._past_first_comparison.discard(known_peer)
                self._compared_by_this_coordinator.discard(known_peer)
                self._sample_tests.pop(known_peer, None)
                self._sample_gaps.pop(known_peer, None)
                self._failed_versions.pop(known_peer, None)
                self._replacements.pop(known_peer, None)
                self._next_request_at.pop(known_peer, None)

    @property
    def replacements(self) -> dict[bytes, Replace]:
        """The requests to replace processes, by identity of the process, until its successor says hello."""
        return self._replacements

    def due_replacements(self, now: float, connected: Container[bytes]) -> list[tuple[bytes, Replace, bool]]:
        """Return the processes to be replaced, with the requests, and True if a request is repeated: the
        launcher may have missed the first, or may not have started the process. Requests are repeated only
        while the process is `connected`."""
        due_requests: list[tuple[bytes, Replace, bool]] = []
        for peer, message in self._replacements.items():
            is_repeated = peer in self._next_request_at
            if is_repeated and (peer not in connected or now < self._next_request_at[peer]):
                continue
            due_requests.append((peer, message, is_repeated))
            self._next_request_at[peer] = now + self._replace_again_seconds
        return due_requests

    def encode_verdicts(self, launch: str) -> str:
        """Return the verdicts on the processes of a launch, for `restore_verdicts`."""
        verdicts = StoredVerdicts(
            launch=launch,
            count=self.count,
            fatal=self.fatal,
            problems=[(name, comparison, text) for (name, comparison), text in self._problems.items()],
            replaced=self._replaced,
            passed_probes=self._passed_probes,
            past_first_comparison={peer.decode() for peer in self._past_first_comparison},
            replacements={peer.decode(): message for peer, message in self._replacements.items()},
            suspect_places=self._suspect_places,
            test_count=self._test_count,
            independence_test_count=self._independence_test_count,
        )
        return msgspec.json.encode(verdicts, order="sorted").decode()

    def restore_verdicts(self, encoded: str, launch: str) -> None:
        """Restore the verdicts of an earlier coordinator, unless they are of another launch. Requests to
        replace a process count as repeated."""
        verdicts = msgspec.json.decode(encoded, type=StoredVerdicts)
        if verdicts.launch != launch:
            return

        self.count = verdicts.count
        self.fatal = verdicts.fatal
        self._problems = {(name, comparison): text for name, comparison, text in verdicts.problems}
        self._replaced = verdicts.replaced
        self._passed_probes = Counter(verdicts.passed_probes)
        self._past_first_comparison = {peer.encode() for peer in verdicts.past_first_comparison}
        self._replacements = {peer.encode(): message for peer, message in verdicts.replacements.items()}
        self._next_request_at = dict.fromkeys(self._replacements, 0.0)
        self._suspect_places = verdicts.suspect_places
        self._test_count = verdicts.test_count
        self._independence_test_count = verdicts.independence_test_count

    def _at_temperature(self, rounding: float) -> float:
        """Return the rounding of a probe, in nats, at the temperature of the rollout. The probe is scored at
        temperature 1; a lower temperature enlarges the differences of logits."""
        return rounding / min(1.0, self._temperature)

    def _note_problem(self, name: str, comparison: str, text: str) -> None:
        self.count += 1
        self._problems.pop((name, comparison), None)  # the newest problem is the last
        self._problems[name, comparison] = text
        log.error("%s", text)

    def _act_on(self, peer: bytes, name: str, comparison: str, text: str) -> bool:
        """Have a mismatched engine replaced, or the run stopped. Returns True if the engine may sample."""
        self._note_problem(name, comparison, text)
        self._passed_probes[name] = 0
        if self._action == "warn":
            return True

        if self._action == "replace" and (name, comparison) not in self._replaced:
            self._replaced.add((name, comparison))
            self._suspect_places.add(place_of(peer))
            role, _, incarnation = peer.decode().split("/")
            self._replacements[peer] = Replace(role, text, incarnation)
            log.error("replacing %s", name)
        else:
            is_repeated = (name, comparison) in self._replaced
            repetition = "; replacing its process once did not help" if is_repeated else ""
            self.fatal = f"{text}{repetition}; {ADVICE}"
        return False


def place_of(peer: bytes) -> str:
    """Return role and index of a process, which its successors share."""
    return peer.decode().rpartition("/")[0]


class EqualityEvidence(NamedTuple):
    """Comparisons of sequences with the first sequence of their prompt. `log_ratio`: the log of the
    likelihood ratio of "half of the sequences are copies" to "all sequences are independent"."""

    log_ratio: float = 0.0
    compared_count: int = 0
    equal_count: int = 0


def equality_evidence(sequences: Sequence[SampledSequence]) -> EqualityEvidence:
    """Compare sequences with the first sequence of their prompt.

    An independent sequence equals the first one with the probability p of the first one, by its reported
    log-probs, and a copy with probability 1/2 or so. The mean of the ratio over independent sequences is 1,
    so that by Markov's inequality the ratio exceeds 1/alpha with a probability of at most alpha.

    Prompts whose first sequence has p > 1/2 are left out, before their other sequences are read. Otherwise a
    different sequence would be evidence of copies, and where p is nearly 1, as at a low temperature, the
    rounding of p alone would decide how much.
    """
    first_sequences: dict[tuple[int, ...], SampledSequence] = {}
    log_ratio = 0.0
    compared_count = 0
    equal_count = 0
    for sequence in sequences:
        prompt = sequence.ids[: -len(sequence.logprobs)]
        first_sequence = first_sequences.setdefault(prompt, sequence)
        if first_sequence is sequence:
            continue

        logprob = sum(first_sequence.logprobs)
        if not -math.inf < logprob <= math.log(0.5):  # another test finds what is not finite
            continue

        compared_count += 1
        if sequence.ids == first_sequence.ids:
            equal_count += 1
            log_ratio += math.log(0.5) - logprob
        else:
            log_ratio += math.log(0.5) - math.log(-math.expm1(logprob))

    return EqualityEvidence(log_ratio, compared_count, equal_count)


ADVICE = (
    "check that the engines serve the model of model.path in model.dtype, with a KV cache of that dtype, and "
    "without TF32 if that is float32 (docs/guides/gpus.md); to train on their samples anyway, for example if "
    "the engines are quantized on purpose, set weights.on_mismatch=warn"
)


def describe_samples(name: str, step: int, test: SurprisalTest) -> str:
    """Describe an engine whose samples fail the test, with the size of the deviation."""
    if test.deviation < 0:
        comparison = "less"
        cause = "it may sample with top_p, top_k or min_p, or at a lower temperature"
    else:
        comparison = "more"
        cause = "it may sample at a higher temperature, or with a penalty"
    return (
        f"{name} does not sample from the trainer's distribution: its samples up to v{step} are {comparison} "
        f"surprising than the trainer's would be (z = {test.z:.1f} over {test.tokens:,} tokens); {cause}"
    )


def describe_gap(name: str, step: int, gap: ProbeGap) -> str:
    """Describe an engine's mismatch, with its size."""
    return (
        f"{name} reports log-probs that differ from the trainer's: for {gap.tokens} tokens of the probe at "
        f"v{step}, by a median of {gap.median:.3g} nats (mean {gap.mean:.3g}, largest {gap.largest:.3g}); "
        f"rounding explains a median of at most {gap_limit(gap.rounding.median):.2g} and a mean of at most "
        f"{mean_limit(gap.rounding):.2g}; the engine may have other weights, or compute in another dtype"
    )
