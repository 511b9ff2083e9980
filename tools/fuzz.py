"""Garbage for every decoder that reads from a socket, a child or a server, and for the coordinator itself.

    python tools/fuzz.py --inputs 1000000 --seed 1

An input is a valid message, of any of its types, in which values were replaced by awkward ones (bounds of
integers, NaN, empty, long and nested values), and bytes flipped, cut out or repeated. A decoder may raise the
error that it documents, and nothing else. The coordinator receives inputs that decode as a worker's or a
server supervisor's messages, and must go on: no error, and every episode still counted.

Prints how many inputs each target took; ends at the first failure, with its input.
"""

from __future__ import annotations

import argparse
import base64
import logging
import math
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from asyncrl.buffer.payloads import check_turn, decode_reply, decode_turn
from asyncrl.config import parse
from asyncrl.coordinator.loop import Coordinator
from asyncrl.data import Samples, samples_path
from asyncrl.engines.sglang.stream import StreamEvent
from asyncrl.engines.sglang.stream import decode_event as read_event
from asyncrl.engines.sglang.transport import error_text
from asyncrl.episodes.recorded import turns_of
from asyncrl.errors import ConfigError, EngineError, ProtocolError
from asyncrl.gateway import completions, responses
from asyncrl.gateway.exchange import ApiError
from asyncrl.types import Generation, Message, Sample, Turn, TurnReply
from asyncrl.weights import collective_messages
from asyncrl.wire.addresses import incarnation_of
from asyncrl.wire.enrolment import read_token
from asyncrl.wire.messages import channels
from asyncrl.wire.messages.engine import SupervisorHello
from asyncrl.wire.messages.shared import Attempt
from asyncrl.wire.messages.trainer import TrainerHello
from asyncrl.wire.messages.worker import Records, WorkerHello
from asyncrl.wire.sockets import Codec, Endpoints, choose_endpoints

INTEGERS = (0, 1, 2, 3, -1, 127, 1 << 31, 1 << 53, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 63))
NUMBERS = (0.0, 1.0, -1.0, 0.5, math.nan, math.inf, -math.inf, 1e308, -1e308, 1e15, -1e15, 5e-324)
TEXTS = (
    "9" * 5000,
    "",
    "0.0",
    "0.1",
    "0.2",
    "1.0",
    "val0/sampled/0",
    "val",
    "train",
    "a/b",
    "\0",
    "é" * 50,
    "x" * 5000,
)
Encode = Callable[[Any], bytes]


def plain(kind: inspect.Type, rng: random.Random) -> Any:
    """A valid value of a type, as built-in types."""
    match kind:
        case inspect.StructType(array_like=True, fields=fields):
            return [plain(field.type, rng) for field in fields]
        case inspect.StructType(fields=fields, tag_field=tag_field, tag=tag):
            return ({tag_field: tag} if tag_field else {}) | {
                f.encode_name: plain(f.type, rng) for f in fields
            }
        case inspect.NamedTupleType(fields=fields):
            return [plain(field.type, rng) for field in fields]
        case inspect.UnionType(types=types):
            return plain(rng.choice(types), rng)
        case inspect.VarTupleType(item_type=item) | inspect.ListType(item_type=item):
            return [plain(item, rng) for _ in range(rng.randrange(3))]
        case inspect.TupleType(item_types=items):
            return [plain(item, rng) for item in items]
        case inspect.DictType(key_type=key, value_type=value):
            return {plain(key, rng): plain(value, rng) for _ in range(rng.randrange(2))}
        case inspect.LiteralType(values=values):
            return rng.choice(values)
        case inspect.EnumType(cls=cls):
            return rng.choice([*cls]).value
        case inspect.IntType():
            return rng.randrange(3)
        case inspect.FloatType():
            return rng.random()
        case inspect.BoolType():
            return rng.random() < 0.5
        case inspect.BytesType():
            return rng.randbytes(8)
        case inspect.NoneType():
            return None
    return rng.choice(TEXTS[1:6])


def awkward(rng: random.Random) -> Any:
    deep: Any = rng.choice(TEXTS)
    for _ in range(rng.choice((1, 3, 2000))):
        deep = [deep]
    return rng.choice(
        (rng.choice(INTEGERS), rng.choice(NUMBERS), rng.choice(TEXTS), None, True, [], {}, deep)
    )


def spoilt(value: Any, rng: random.Random, share: float) -> Any:
    """Return the value with a share of its parts replaced, left out or repeated."""
    if rng.random() < share:
        return awkward(rng)
    if isinstance(value, dict):
        return {key: spoilt(item, rng, share) for key, item in value.items() if rng.random() > share / 4}
    if isinstance(value, list):
        return [spoilt(item, rng, share) for item in value for _ in range(1 + (rng.random() < share / 4))]
    return value


def bent(data: bytes, rng: random.Random) -> bytes:
    """Return the bytes with a few of them flipped, cut out, put in or repeated."""
    bent_data = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(bent_data) + 1)
        match rng.randrange(4):
            case 0 if at < len(bent_data):
                bent_data[at] ^= 1 << rng.randrange(8)
            case 1:
                del bent_data[at : at + rng.randrange(1, 9)]
            case 2:
                bent_data[at:at] = rng.randbytes(rng.randrange(1, 9))
            case _:
                bent_data[at:at] = bent_data[at : at + 16]

    return bytes(bent_data)


def inputs(kind: Any, encode: Encode, rng: random.Random) -> Iterator[bytes]:
    """Yield garbage that is near to a message of a type, for ever."""
    type_ = inspect.type_info(kind)
    while True:
        try:
            data = encode(spoilt(plain(type_, rng), rng, rng.choice((0.0, 0.05, 0.3))))
        except (msgspec.EncodeError, OverflowError, ValueError, RecursionError):
            continue  # an integer of no format
        yield bent(data, rng) if rng.random() < 0.5 else data


@dataclass(frozen=True)
class Target:
    """A decoder. `kind`: the type that the decoder reads."""

    name: str
    read: Callable[[bytes], Any]
    error: type[Exception]
    kind: Any
    encode: Encode = msgspec.msgpack.encode


def targets() -> list[Target]:
    """Return every decoder of data from another process."""
    wire = {f"control of {role}": union for role, union in channels.ToCoordinatorControl.items()}
    wire |= {f"bulk of {role}": union for role, union in channels.ToCoordinatorBulk.items()}
    wire |= {f"versions for {role}": union for role, union in channels.ToVersionServer.items()}
    wire |= {
        name: getattr(channels, name)
        for name in (
            "ToWorkerControl",
            "ToWorkerBulk",
            "ToSupervisor",
            "ToTrainerControl",
            "ToTrainerBulk",
            "ToObserver",
            "ToVersionReader",
        )
    }

    json = msgspec.json.encode
    message_targets = []
    for name, union in wire.items():
        codec = Codec(union)
        message_targets.append(
            Target(name, lambda data, codec=codec: codec.decode([data]), ProtocolError, union)
        )

    return [
        *message_targets,
        Target("turn", lambda data: check_turn("0.0", decode_turn(data), 1, 100), ProtocolError, Turn),
        Target("replies", decode_reply, ProtocolError, TurnReply),
        Target("recorded turns", lambda data: turns_of([data, b""]), ProtocolError, Turn),
        Target("recorded replies", lambda data: turns_of([TURN, data]), ProtocolError, TurnReply),
        Target("token", read_token, ConfigError, Endpoints, token_text),
        *(
            Target(
                name,
                lambda data, decoder=decoder: collective_messages._decode_message(data, decoder),
                ProtocolError,
                kind,
            )
            for name, kind, decoder in (
                (
                    "question from a supervisor",
                    collective_messages.Question,
                    collective_messages._question_decoder,
                ),
                ("answer about weights", collective_messages.Answer, collective_messages._answer_decoder),
            )
        ),
        Target("event from a server", read_event, EngineError, StreamEvent, json),
        Target("error from a server", error_text, EngineError, dict[str, dict[str, str]], json),
        Target("chat completions", completions.read, ApiError, completions.ChatRequest, json),
        Target("responses", responses.read, ApiError, responses.ResponsesRequest, json),
    ]


TURN = msgspec.msgpack.encode(Turn(0, (1,), Generation((), (), (), "stop")))  # type: ignore[arg-type]


def token_text(content: Any) -> bytes:
    return base64.urlsafe_b64encode(msgspec.msgpack.encode(content))


class Stopped(Exception):
    """A target failed. The message names the target and the input."""


def feed(target: Target, count: int, rng: random.Random) -> int:
    """Return how many of so many inputs the target accepted.

    Stopped: the target raised an undocumented error.
    """
    accepted = 0
    generated = inputs(target.kind, target.encode, rng)
    for _ in range(count):
        data = next(generated)
        try:
            target.read(data)
            accepted += 1
        except target.error:
            continue
        except BaseException as error:
            raise Stopped(f"{target.name}: {type(error).__name__}: {error}; input: {data!r}") from error

    return accepted


class Endured:
    """A coordinator in the midst of a run, which receives decodable messages of a worker or a supervisor."""

    WORKER = b"rollout/0/load.1"
    KEEPER = b"engine/0/load.2"
    RANK = b"trainer/0/load.3"

    def __init__(self, run_dir: Path, remote: bool, rng: random.Random) -> None:
        config = parse({
            "name": "fuzz", "run_dir": str(run_dir), "model": {"path": "m"}, "data": {"train": "d"},
            "engine": {"name": "sglang", "servers": 1} if remote else {},
            "buffer": {"groups_per_batch": 1000, "episodes_per_group": 4},  # so many may fail in a row
            "launch": {"lease": 1e6, "start_timeout": 1e6, "stall_timeout": 1e6},  # nobody is lost by silence
        })  # fmt: skip

        path = samples_path(run_dir / "fuzz", "train")
        path.parent.mkdir(parents=True)
        with path.open("w+b") as file:
            Samples.write(file, [[Sample(row, "s", (Message("user", "?"),), "1") for row in range(100)]])
        self.coordinator = Coordinator(config, choose_endpoints("127.0.0.1", 0), "load")
        self.now = self.coordinator._last_pass_at
        self.rng = rng
        self.message_count = 0

    def hear(self, count: int) -> None:
        """So many inputs, a turn for each few. Stopped at an error, or when the run ends."""
        control = channels.ToCoordinatorControl
        bulk = channels.ToCoordinatorBulk
        sources = [
            (self.WORKER, control["rollout"]),
            (self.WORKER, bulk["rollout"]),
            (self.KEEPER, control["engine"]),
        ]

        message_sources = [
            (peer, union is bulk["rollout"], Codec(union), inputs(union, msgspec.msgpack.encode, self.rng))
            for peer, union in sources
        ]

        frames = [inputs(kind, msgspec.msgpack.encode, self.rng) for kind in (Turn, TurnReply)]
        for number in range(count):
            if number % 16 == 0:
                self._turn()
            peer, sequenced, codec, source = self.rng.choice(message_sources)
            with suppress(ProtocolError):
                message, _ = codec.decode([next(source)])
                self._tell(
                    peer,
                    self._current(message) if sequenced else message,
                    [next(self.rng.choice(frames)) for _ in range(3 * sequenced)],
                )

    def _current(self, message: Any) -> Any:
        """Number records as the next ones of the worker, mostly for its own episodes: other records are
        fenced."""
        worker = self.coordinator.workers.peers.get(self.WORKER)
        if worker is None or not isinstance(message, Records):
            return message

        counted = []
        for seq, (record, count) in enumerate(message.counted, worker.last_record + 1):
            attempt = record.attempt
            if worker.running and self.rng.random() < 0.9:
                uid = self.rng.choice([*worker.running])
                attempt = Attempt(uid, self.coordinator.state.ledger.buffer.episodes[uid].attempt)
            counted.append((msgspec.structs.replace(record, seq=seq, attempt=attempt), count))

        return Records(tuple(counted))

    def _tell(self, peer: bytes, message: Any, frames: list[bytes]) -> None:
        coordinator = self.coordinator
        try:
            (coordinator._on_bulk if frames else coordinator._on_control)(peer, message, frames, self.now)
            self.message_count += 1
        except BaseException as error:
            raise Stopped(f"coordinator: {type(error).__name__}: {error}; at: {message} {frames}") from error

    def _turn(self) -> None:
        coordinator = self.coordinator
        self.now = self.now + 0.05

        hellos = {
            self.RANK: TrainerHello(0, 1, incarnation_of("load", 3), 0, vocabulary=100),
            self.WORKER: WorkerHello(0, incarnation_of("load", 1), 8, 1),
            self.KEEPER: SupervisorHello(0, incarnation_of("load", 2), "http://127.0.0.1:1", 1),
        }
        for peer, hello in hellos.items():
            if peer != self.KEEPER or coordinator.engines.remote:
                coordinator._on_control(peer, hello, [], self.now)

        coordinator.run_pass(self.now)
        flow = coordinator.state.ledger.buffer.account()
        if coordinator.lifecycle.error or not flow.conserved:
            raise Stopped(
                f"coordinator: {coordinator.lifecycle.error or flow}, after {self.message_count} messages"
            )


def fuzz(count: int, seed: int, coordinator_share: float = 0.1) -> Counter[str]:
    """Feed so many inputs in all; return how many inputs each target accepted. Stopped: the first failure."""
    every = targets()

    took = Counter[str]()
    coordinator_inputs = int(count * coordinator_share)
    for target in every:
        rng = random.Random(f"{seed}/{target.name}")
        took[target.name] = feed(target, (count - coordinator_inputs) // len(every) + 1, rng)

    with tempfile.TemporaryDirectory() as folder:
        for remote in (False, True):
            endured = Endured(Path(folder) / str(remote), remote, random.Random(f"{seed}/{remote}"))
            with closing(endured.coordinator):
                endured.hear(coordinator_inputs // 2)
            took[f"coordinator, {'servers' if remote else 'embedded engines'}"] = endured.message_count

    return took


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)

    logging.disable(logging.ERROR)
    began = time.process_time()

    try:
        took = fuzz(options.inputs, options.seed)
    except Stopped as failure:
        print(failure)
        return 1

    for name, accepted in took.items():
        print(f"{name:<36} took {accepted:>8,}")
    spent = time.process_time() - began
    print(f"{options.inputs:,} inputs, seed {options.seed}: no undocumented error; {spent:.0f} CPU s")

    return 0


if __name__ == "__main__":
    raise SystemExit(main())
