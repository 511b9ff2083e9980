"""Samples of engines between their arrival and the trainer's request for a plan."""

from __future__ import annotations

from asyncrl.coordinator.pending_samples import MAX_ENGINES, PendingSamples
from asyncrl.types import PolicyVersion
from asyncrl.wire.messages.shared import MAX_SAMPLES, ProbeSamples, SampledSequence
from asyncrl.wire.messages.trainer import EngineSamples

VOCABULARY = 40
SEQUENCE = SampledSequence((1, 2, 3), (-0.5,))
OLD = PolicyVersion(1, 3)
NEW = PolicyVersion(1, 4)


def pending(*samples: tuple[str, PolicyVersion, int]) -> PendingSamples:
    """Samples of engines: name, version, number of sequences."""
    pending_samples = PendingSamples()
    for engine, version, count in samples:
        pending_samples.add(engine.encode(), ProbeSamples(version, (SEQUENCE,) * count), VOCABULARY)
    return pending_samples


def test_samples_of_other_versions_are_dropped() -> None:
    samples = pending(("a", OLD, 1), ("b", NEW, 2), ("c", PolicyVersion(2, 4), 1))
    assert samples.take(NEW) == (EngineSamples("b", (SEQUENCE,) * 2),)
    assert samples.take(NEW) == samples.take(OLD) == ()


def test_an_engine_has_samples_of_one_version_and_no_more_than_a_message_may_hold() -> None:
    samples = pending(("a", OLD, 1), ("a", NEW, 2), ("a", NEW, 3), ("b", NEW, MAX_SAMPLES), ("b", NEW, 1))
    assert [len(engine.sequences) for engine in samples.take(NEW)] == [5, MAX_SAMPLES]


def test_many_engines_are_scored_in_several_plans() -> None:
    samples = pending(*((f"engine {index}", NEW, 1) for index in range(MAX_ENGINES + 1)))
    assert [len(samples.take(NEW)) for _ in range(3)] == [MAX_ENGINES, 1, 0]


def test_samples_that_the_trainer_could_not_score_are_dropped() -> None:
    """An id beyond the vocabulary would end a rank."""
    samples = PendingSamples()
    for sequence in (
        SampledSequence((1, VOCABULARY), (-0.5,)),
        SampledSequence((1, 2), (-0.5, -0.5)),
        SampledSequence((1, 2), ()),
    ):
        samples.add(b"a", ProbeSamples(NEW, (SEQUENCE, sequence)), VOCABULARY)
    samples.add(b"a", ProbeSamples(NEW, ()), VOCABULARY)
    assert samples.take(NEW) == ()
