"""Weights through a process group: the trainer's end, and the protocol with the supervisors.

As many ranks of the trainer as there are servers, or all, have one `Sender` each. Server i belongs to sender
i modulo the number of senders, of senders on the server's machine if there are any. The server's supervisor
has one `Receiver` (engines/sglang/receiver.py), which asks for versions and controls the server over HTTP.
The weights go from the sender, rank 0 of a group, to the server.

    supervisor                                trainer                        server
    VersionRequest            ──►  its turn; rank 0 listens; a pause of training begins
    /init_weights_update_group ◄── Plan(buckets, group)  ───────────────► joins rank 0
    BucketRequest(i)          ──►  bucket i is ready
    /update_weights_from_...  ◄──  BucketReady(i), broadcasts ──────────► receives, loads
                                   a new group has sent: the pause ends
      (until then bucket i + 1 is read, flattened and hashed)
    BucketRequest(after last) ──►
    the version is loaded     ◄──  Sent(manifest)

One connection carries these messages and owns the group: an open connection means a complete group, which is
used for the next version, too. A failure on either side closes the connection; the other side notices at once
and gives the group up, so that a server that waits for a broadcast gets an error instead. A server joins only
when rank 0 is listening, and receives only when the bucket is ready, so a server never waits for a process
that does not exist.

Processes may also freeze: both ends have deadlines, but a server that waits for a frozen trainer answers no
request and has to be started again. On a GPU, training stands still while a server joins a new group and gets
the first bucket, with which NCCL makes its communicator (pause.py). Training may compile for minutes before
this pause: the server does not know of the group yet, and goes on with the old weights.

Nothing here is authenticated or encrypted: for private networks.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
import uuid
from collections.abc import Generator
from concurrent.futures import Future
from contextlib import ExitStack, closing, suppress
from itertools import chain

import torch
from torch import Tensor

from asyncrl.errors import DeadlineError, ProtocolError, one_line
from asyncrl.types import PolicyVersion
from asyncrl.weights import collective_messages as messages
from asyncrl.weights.group import ServerGroup, run_in_background
from asyncrl.weights.manifest import (
    Postponed,
    Superseded,
    TensorEntry,
    WeightsRef,
    build_manifest,
    split_buckets,
)
from asyncrl.weights.pause import TrainingPause
from asyncrl.weights.ranges import join_parts
from asyncrl.weights.snapshot import BucketBuffers, Snapshot

log = logging.getLogger("asyncrl.weights")

IDLE_SECONDS = 3600.0  # without a request, until a supervisor is disconnected; a supervisor may dial again
REFUSAL_SECONDS = 5.0  # for a refusal to be sent
PAUSE_FRACTION = 0.5  # of a request's time, for training to pause: so a refusal leaves time to ask again
OFFER_SECONDS = 5.0  # at most between the first and the last rank's offer of a version
RETRY_SECONDS = 1.0  # until the sender listens again after failing to accept a connection


class Sender:
    """Offers the newest version to all engines, and pushes the version to one engine after another.

    A sender listens at `host`, which servers and supervisors must be able to reach. A push takes at most
    `seconds`. `error`: a failure to read a version, for the owner to raise. `pause`: stops training while a
    new group makes its communicator; None: a new communicator does not disturb training.
    """

    def __init__(
        self,
        host: str,
        bucket_bytes: int,
        seconds: float,
        device: torch.device,
        pause: TrainingPause | None = None,
    ) -> None:
        self.bucket_bytes = bucket_bytes
        self.seconds = seconds
        self.device = device
        self.training_pause = pause
        self.bucket_buffers = BucketBuffers(page_locked=device.type == "cuda")
        self.push_lock = threading.Lock()  # one engine is served at a time, and has the buffers

        self._latest_snapshot: Snapshot | None = None
        self._offer_condition = threading.Condition()
        self.error: Exception | None = None
        self._closing_event = threading.Event()
        self._listener = socket.create_server((host, 0))
        self.address = f"tcp://{host}:{self._listener.getsockname()[1]}"

        self.connections: set[EngineConnection] = set()
        run_in_background(self._accept_receivers)

    def offer_snapshot(self, snapshot: Snapshot) -> WeightsRef:
        """Offer this version to engines from now on. A push under way goes on with the older version."""
        with self._offer_condition:
            self._latest_snapshot = snapshot
            self._offer_condition.notify_all()
        return WeightsRef(snapshot.version, self.address)

    def latest_snapshot(self, version: PolicyVersion, seconds: float) -> Snapshot | None:
        """Return the offered version, after a short wait for `version`: another rank may announce a version a
        little before this rank offers it."""
        with self._offer_condition:
            self._offer_condition.wait_for(
                lambda: self._latest_snapshot is not None and self._latest_snapshot.version >= version,
                min(OFFER_SECONDS, seconds),
            )
            return self._latest_snapshot

    def close(self) -> None:
        """End all pushes, now."""
        self._closing_event.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes up the thread in `accept`
        self._listener.close()
        for connection in list(self.connections):
            connection.disconnect()

    def _accept_receivers(self) -> None:
        while not self._closing_event.is_set():
            try:
                connection, _ = self._listener.accept()
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            except OSError as error:  # closed, or out of file descriptors, or a supervisor has left already
                if not self._closing_event.is_set():
                    log.warning("weights: cannot accept a supervisor; retrying soon: %s", one_line(error))

                self._closing_event.wait(RETRY_SECONDS)
                continue

            engine_connection = EngineConnection(self, connection)
            self.connections.add(engine_connection)
            run_in_background(engine_connection.serve_engine)


class EngineConnection:
    """The connection of one engine, with the group that it is in. Lives on a thread of its own."""

    def __init__(self, sender: Sender, connection: socket.socket) -> None:
        self._sender = sender
        self._socket = connection
        self._group: ServerGroup | None = None
        self._engine = "an engine"

    def serve_engine(self) -> None:
        """Serve requests until the engine leaves, or a push fails."""
        if self._sender.device.type == "cuda":
            # The device of a new thread is GPU 0, which would page-lock the buckets.
            torch.cuda.set_device(self._sender.device)

        seconds = self._sender.seconds  # for the first request after dialling
        try:
            while True:
                idle_deadline = time.monotonic() + seconds
                try:
                    request = messages.receive_question(self._socket, messages.VersionRequest, idle_deadline)
                except TimeoutError:
                    log.info(
                        "weights: disconnecting %s, which has not requested anything for a long time",
                        self._engine,
                    )
                    return

                seconds = IDLE_SECONDS
                self._engine = request.engine
                deadline = time.monotonic() + min(self._sender.seconds, request.seconds)  # NaN never wins
                self._push_in_turn(request, deadline)
        except EOFError:
            log.debug("%s no longer needs weights from this sender", self._engine)
        except Exception as error:  # an error of the supervisor or the network: other pushes go on
            log.warning("push to %s failed: %s", self._engine, one_line(error))
            self._send_refusal(one_line(error), isinstance(error, Postponed))
        finally:
            self._sender.connections.discard(self)
            self._socket.close()
            if self._group is not None:
                self._group.close()

    def disconnect(self) -> None:
        """End `serve_engine` from another thread, as if the engine had left."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _push_in_turn(self, request: messages.VersionRequest, deadline: float) -> None:
        # Waits for the version before the lock, so that other engines can be served meanwhile.
        self._sender.latest_snapshot(request.version, messages.seconds_left(deadline))
        if not self._sender.push_lock.acquire(timeout=messages.seconds_left(deadline)):
            raise DeadlineError("the deadline passed while other engines were being served")

        try:
            snapshot = self._sender.latest_snapshot(request.version, 0)
            if snapshot is not None and snapshot.version == request.version:
                self._push_snapshot(snapshot, request, deadline)
                return
        finally:
            self._sender.push_lock.release()

        offered_label = snapshot.version.label if snapshot else "nothing"
        self._send_refusal(
            f"the sender offers {offered_label}", snapshot is not None and snapshot.version > request.version
        )

    def _push_snapshot(self, snapshot: Snapshot, request: messages.VersionRequest, deadline: float) -> None:
        bucket_slices = list(split_buckets(snapshot.layout, self._sender.bucket_bytes))
        entries: list[TensorEntry] = []
        last_broadcast: Future[None] | None = None
        with (
            closing(self._flatten_buckets(snapshot, bucket_slices, entries)) as flat_buckets,
            ExitStack() as pause_stack,
        ):
            first_bucket = next(flat_buckets)  # raises Superseded before the engine has done anything
            group, port = self._join_group(1 + request.ranks, deadline)
            buckets = tuple(snapshot.layout[bucket_slice] for bucket_slice in bucket_slices)

            if port and self._sender.training_pause is not None:  # Postponed, so far without the engine, too
                pause_seconds = PAUSE_FRACTION * messages.seconds_left(deadline)
                pause_stack.enter_context(self._sender.training_pause.entered(pause_seconds))

            plan = messages.Plan(buckets, group.name, port, group.backend, group.nccl_version)
            messages.send_answer(self._socket, plan, deadline)

            # A bucket is read while the bucket before is under way.
            for index, bucket_bytes in enumerate(chain((first_bucket,), flat_buckets)):
                self._await_arrival(index, last_broadcast, deadline)
                messages.send_answer(self._socket, messages.BucketReady(index), deadline)
                # A server makes its part of the communicator in the first broadcast only. Training goes on as
                # soon as this bucket is sent, before the next bucket is collected from all ranks.
                last_broadcast = group.broadcast(bucket_bytes, on_sent=pause_stack.close)

            self._await_arrival(len(bucket_slices), last_broadcast, deadline)

        messages.send_answer(
            self._socket, messages.Sent(build_manifest(snapshot.version, tuple(entries))), deadline
        )

    def _join_group(self, rank_count: int, deadline: float) -> tuple[ServerGroup, int]:
        """Return the engine's group, and the port at which the engine joins a new group; 0 for an old
        group."""
        if self._group is not None and self._group.rank_count == rank_count:
            return self._group, 0
        if self._group is not None:
            self._group.close()

        name = f"asyncrl-{uuid.uuid4().hex}"
        self._group = ServerGroup(name, rank_count, self._sender.device, self._sender.seconds)
        self._group.await_listening(deadline)

        return self._group, self._group.port

    def _flatten_buckets(
        self, snapshot: Snapshot, bucket_slices: list[slice], entries: list[TensorEntry]
    ) -> Generator[Tensor]:
        """Yield each bucket as the bytes of its tensors, one behind the other; `entries` gets the tensors. A
        bucket is valid until the next but one. An error in reading goes to the trainer, not to the engine."""
        largest_bucket = max(
            (sum(spec.nbytes for spec in snapshot.layout[bucket_slice]) for bucket_slice in bucket_slices),
            default=0,
        )
        try:
            with snapshot.hold_copy() as held_copy:
                for bucket_slice in bucket_slices:
                    parts_by_tensor = held_copy.collect_parts(bucket_slice)
                    entries += map(join_parts, snapshot.layout[bucket_slice], parts_by_tensor)

                    contiguous_bytes = held_copy.contiguous_bytes(bucket_slice)
                    if contiguous_bytes is not None:
                        yield contiguous_bytes
                    else:
                        yield self._sender.bucket_buffers.fill_next(
                            chain.from_iterable(parts_by_tensor), largest_bucket
                        )
        except (Superseded, GeneratorExit):
            raise
        except Exception as error:
            self._sender.error = error
            raise

    def _await_arrival(self, bucket_count: int, last_broadcast: Future[None] | None, deadline: float) -> None:
        """Wait until the engine has `bucket_count` buckets, the last of them sent by `last_broadcast`."""
        asked_bucket = messages.receive_question(self._socket, messages.BucketRequest, deadline).bucket
        if asked_bucket != bucket_count:
            raise ProtocolError(f"the engine requested bucket {asked_bucket}, but {bucket_count} were sent")
        if last_broadcast is not None:
            last_broadcast.result(messages.seconds_left(deadline))

    def _send_refusal(self, reason: str, postponed: bool) -> None:
        with suppress(OSError):
            messages.send_answer(
                self._socket, messages.Refused(reason, postponed), time.monotonic() + REFUSAL_SECONDS
            )
