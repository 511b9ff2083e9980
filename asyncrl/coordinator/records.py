"""Process the records of rollout workers: turns, replies and endings.

Each record is processed once, and then acknowledged.

consumes: turns, replies, endings (bulk), of training and of validation
waits for: the preceding record, if a record was lost
unblocks: the workers (acks), and through the buffer the trainer
"""

from __future__ import annotations

from typing import assert_never

from asyncrl.buffer.payloads import (
    add_turn,
    check_logprobs,
    check_part,
    check_result,
    check_turn,
    decode_part,
    decode_reply,
    decode_turn,
)
from asyncrl.buffer.records import MAX_NAME_CHARACTERS, EpisodeRecord, OpenTurn
from asyncrl.buffer.replay import running_attempt
from asyncrl.coordinator.images import ImageHandler
from asyncrl.coordinator.reporting import Reporter, result_entry, save_transcripts, transcript_entry
from asyncrl.coordinator.state import RunState, log
from asyncrl.coordinator.workers import WorkerHandler, WorkerRecord
from asyncrl.errors import ProtocolError
from asyncrl.store.reader import part_kind
from asyncrl.types import FailReason, Generation
from asyncrl.wire.messages.worker import Ack, Failed, Fenced, Finished, Generated, Record, Replied, Sampled


class RecordHandler:
    """Processes the workers' records of episodes, in the order of their sequence numbers."""

    def __init__(
        self, state: RunState, workers: WorkerHandler, images: ImageHandler, reporter: Reporter
    ) -> None:
        self.run_dir = state.run_dir
        self.ledger = state.ledger
        self.buffer = state.ledger.buffer
        self.fleet = state.fleet
        self.journal = state.journal
        self.store = state.journal.store
        self.workers = workers
        self.images = images
        self.reporter = reporter
        self._workers_to_ack: set[bytes] = set()

        # Stored episodes may exceed the limit, as they may have begun under another configuration.
        stored_tokens = (
            episode.tokens + episode.untrained_tokens for episode in self.buffer.episodes.values()
        )
        rollout = state.config.rollout  # side requests have as many sequences of their own
        configured_tokens = rollout.rows * rollout.max_tokens * (2 if state.config.side_requests else 1)
        self._max_episode_tokens = max([configured_tokens, *stored_tokens])

    def process_record(self, peer: bytes, message: Record, frames: list[bytes], now: float) -> None:
        """Process a sequenced record once. The acknowledgement follows after the commit."""
        worker = self.workers.peers.get(peer)
        if worker is None:
            return  # without an acknowledgement the worker sends the record again after the hello
        if message.seq > worker.last_record + 1:
            return  # a record in between was lost: wait for the resend

        self._workers_to_ack.add(peer)
        if message.seq <= worker.last_record:
            return

        worker.last_record = message.seq
        if isinstance(message, Finished):
            self.fleet.liveness.note_progress(now)
        else:
            self.fleet.liveness.note_alive(now)

        message = _validated(message, self._max_episode_tokens)
        uid = message.attempt.uid
        attempt = message.attempt.attempt
        episode = running_attempt(self.ledger.owner_of(uid).episodes, uid, attempt)
        if episode is None or episode.worker != worker.hello.incarnation:
            self.journal.outbox.to_bulk(peer, Fenced(message.attempt))
            return

        try:
            self._apply_record(worker, episode, message, frames, now)
        except ProtocolError as error:
            log.error("%s: %s", worker.name, error)
            self.workers.give_up_attempt(worker, episode, FailReason.EPISODE_ERROR, str(error), now)

    def _apply_record(
        self, worker: WorkerRecord, episode: EpisodeRecord, message: Record, frames: list[bytes], now: float
    ) -> None:
        match message:
            case Generated():
                self._store_turn(worker, episode, message, frames, now)
            case Sampled():
                self._store_part(worker, episode, message, frames, now)

            case Replied():
                frame, *image_files = _frames_with_first(frames)
                replies = decode_reply(frame).replies
                if not 0 <= message.turn < episode.turns:
                    raise ProtocolError(
                        f"episode {episode.uid}: got replies to turn {message.turn}, which does not exist"
                    )

                self.images.store_files(episode.uid, message.turn, image_files)
                self.store.put_frame(episode.uid, message.turn, "replied", frame)
                self.store.put_calls(episode.uid, message.turn, replies)

                failed_tool = next((reply.call.name for reply in replies if reply.failed), "")
                if failed_tool and not episode.failed_tool:
                    episode.failed_tool = failed_tool[:MAX_NAME_CHARACTERS]
                    self.ledger.owner_of(episode.uid).mark_changed(episode)

            case Finished():
                turns = message.stats.turns + message.stats.untrained_turns
                longest_sequence = max(message.result.tokens, message.stats.longest_row)
                if not 0 < turns == episode.turns or longest_sequence > episode.tokens:
                    durable = f"{episode.turns} turns with {episode.tokens} tokens are durable"
                    raise ProtocolError(
                        f"episode {episode.uid}: the worker reported {turns} turns and {longest_sequence} "
                        f"tokens, but {durable}"
                    )

                if frames:
                    frame = _single_frame(frames)
                    check_result(frame)
                    self.store.put_frame(episode.uid, turns - 1, "result", frame)

                self.store.put_answer(episode.uid, message.answer)
                episode.open = {}  # unfinished turns of requests that an agent gave up
                del worker.running[episode.uid]

                if episode.uid in self.ledger.held_out.episodes:
                    self.ledger.held_out.finish_episode(episode, message)
                    return

                self._save_transcript(episode, message)
                sample = self.buffer.live_groups[episode.group].sample
                self.buffer.finish_episode(
                    episode, message.result, message.stats, self.fleet.engine_time(now)
                )
                self.reporter.note_landed(episode, sample, message.answer)

                if not self.ledger.first_attempts.landed:
                    self.ledger.first_attempts.landed = True
                    self.store.put_meta("landed", self.fleet.launch)  # for a restart of the coordinator alone

            case Failed():
                log.info("episode %s failed: %s (%s)", episode.uid, message.reason, message.detail)
                del worker.running[episode.uid]
                self.workers.fail_episode(episode, message.reason, message.detail, now)
            case _:
                assert_never(message)

    def _save_transcript(self, episode: EpisodeRecord, message: Finished) -> None:
        """Save the text of a transcribed episode."""
        if not message.text:
            return

        mode = "greedy" if episode.greedy else "sampled"
        outcome = {"mode": mode, **result_entry(message.result), "turns": message.stats.turns}
        outcome |= {
            "versions": (episode.oldest, episode.newest),
            "notes": message.notes,
            "text": message.text,
        }

        sample = self.ledger.samples[self.buffer.live_groups[episode.group].sample]
        transcript = transcript_entry(episode.uid, sample, **outcome)
        save_transcripts(self.run_dir, "training", self.ledger.buffer.current_step, [transcript])

    def _store_turn(
        self,
        worker: WorkerRecord,
        episode: EpisodeRecord,
        message: Generated,
        frames: list[bytes],
        now: float,
    ) -> None:
        # Parts are of no use even if the turn is refused.
        part = episode.open.pop(message.session, OpenTurn())

        if message.turn < episode.turns:
            return  # sent again to a restarted coordinator, perhaps after its parts
        if message.turn > episode.turns:
            raise ProtocolError(
                f"episode {episode.uid}: expected turn {episode.turns}, got turn {message.turn}"
            )

        frame, *image_files = _frames_with_first(frames)
        turn = decode_turn(frame)
        check_turn(episode.uid, turn, episode.rows, self.fleet.vocabulary)
        self.images.check_turn(episode.uid, turn)
        check_logprobs(f"episode {episode.uid}, turn {turn.index}", turn.generation)
        if turn.index != message.turn:
            raise ProtocolError(f"episode {episode.uid}: expected turn {message.turn}, got turn {turn.index}")

        if self._reject_unpushed(worker, episode, turn.generation, now):
            return

        model_tokens = len(turn.generation.ids)
        episode_tokens = episode.tokens + episode.untrained_tokens
        if episode_tokens + len(turn.context) + model_tokens > self._max_episode_tokens:
            limit = f"{self._max_episode_tokens} tokens (rollout.max_tokens)"
            raise ProtocolError(f"episode {episode.uid}: turn {message.turn} exceeds the limit of {limit}")

        self.images.store_files(episode.uid, message.turn, image_files)
        self.store.put_frame(episode.uid, message.turn, "generated", frame)
        add_turn(episode, turn, message.seconds)
        self.ledger.owner_of(episode.uid).mark_changed(episode)

        if episode.uid in self.buffer.episodes:
            self.reporter.count_turn(model_tokens)
            if not turn.untrained:
                self.buffer.waiting_tokens.begin_life(
                    episode.uid, self.fleet.engine_time(now), model_tokens - part.tokens
                )

    def _reject_unpushed(
        self, worker: WorkerRecord, episode: EpisodeRecord, sampled: Generation, now: float
    ) -> bool:
        """Return True if a training episode was sampled on weights that were never published.

        The attempt is then given up, and the worker's own engine quarantined.
        """
        newest_version = max((span.version for span in sampled.spans), default=0)
        if episode.uid not in self.buffer.episodes or newest_version <= self.fleet.versions.newest.step:
            return False

        problem = f"{worker.name} reports v{newest_version}, which was never pushed"
        log.error(problem)
        self.workers.engines.quarantine(worker.peer, now)
        self.workers.give_up_attempt(worker, episode, FailReason.ENGINE_LOST, problem, now)
        return True

    def _store_part(
        self, worker: WorkerRecord, episode: EpisodeRecord, message: Sampled, frames: list[bytes], now: float
    ) -> None:
        """Store a part of a turn. An unsuitable part is left out, as the complete turn comes all the same."""
        frame = _single_frame(frames)
        part = decode_part(frame)
        check_part(episode.uid, part, self.fleet.vocabulary)

        if self._reject_unpushed(worker, episode, part.sampled, now):
            return

        turn = episode.open.get(part.session)
        if turn is None or turn.prompt != part.prompt:
            turn = OpenTurn(part.prompt)  # an earlier turn of the session is not sampled any more

        if part.start != turn.tokens or not part.sampled.ids:
            return  # sent again to a restarted coordinator, perhaps without the parts before it

        turn_tokens = turn.tokens + len(part.sampled.ids)
        other_open_tokens = sum(
            open_turn.tokens for session, open_turn in episode.open.items() if session != part.session
        )
        if (
            episode.tokens + episode.untrained_tokens + other_open_tokens + turn_tokens
            > self._max_episode_tokens
        ):
            return  # an agent gave up many requests

        self.store.put_frame(episode.uid, part.session, part_kind(turn.parts), frame)
        oldest = min([turn.oldest, *(span.version for span in part.sampled.spans)])
        episode.open[part.session] = OpenTurn(part.prompt, turn.parts + 1, turn_tokens, oldest)
        episode.seconds = max(episode.seconds, message.seconds)
        self.ledger.owner_of(episode.uid).mark_changed(episode)

        if episode.uid in self.buffer.episodes:
            self.buffer.waiting_tokens.begin_life(
                episode.uid, self.fleet.engine_time(now), len(part.sampled.ids)
            )

    def queue_acks(self) -> None:
        """Queue a cumulative ack for each worker that sent records in this pass of the loop."""
        for peer in self._workers_to_ack:
            if (worker := self.workers.peers.get(peer)) is not None:
                self.journal.outbox.to_bulk(peer, Ack(worker.last_record))

        self._workers_to_ack = set()


def _validated(message: Record, most_tokens: int) -> Record:
    """Return the record, or a failure if a number in the record cannot be trained, summed up or stored."""
    if not isinstance(message, Finished):
        return message

    result = message.result
    stats = message.stats

    if problem := result.problem:
        return Failed(message.seq, message.attempt, FailReason.REWARD_ERROR, problem)
    if problem := stats.misfit_text(most_tokens) or result.misfit_text(stats.turns, most_tokens):
        return Failed(message.seq, message.attempt, FailReason.EPISODE_ERROR, f"impossible: {problem}")
    return message


def _frames_with_first(frames: list[bytes]) -> list[bytes]:
    """Return the frames of a turn or of replies, whose first is not the file of an image."""
    if not frames:
        raise ProtocolError("expected a frame, got none")
    return frames


def _single_frame(frames: list[bytes]) -> bytes:
    if len(frames) != 1:
        raise ProtocolError(f"expected one frame, got {len(frames)}")
    return frames[0]
