"""What images cost: bytes on the wire and in the store, and the delay of a worker's event loop.

    python tools/bench/images.py bytes [--episodes 1000]
    python tools/bench/images.py delays [--repeats 3] [--kinds text small tool ...]

A real worker plays episodes for a real coordinator, each in its own process, over ZeroMQ; the engine is
scripted, and the trainer of load_peers.py takes no time.

`bytes`: each episode has four small images: one of the prompt, which the data has; one that a tool makes
alike for all members of a group; two that a tool makes for this episode alone. The same episodes run with
texts instead, and the difference is what images cost: their files, and all that comes with them (ids in
turns, references, frames of ZeroMQ, rows of the index). Ratios are to the bytes of the image files.

`delays`: a task of the worker's loop sleeps a millisecond, and notes how late the loop wakes it, from the
first finished episode to the last. Kinds: `text` (no images), `small` (a tool draws them in threads), and
screenshots of 2,000 x 1,500 pixels of a `tool`, of a tool in a `process`, of an `environment` and of an agent
(`gateway`: four in each request, in base64, sent again with each request). Quantiles are over wake-ups; other
work on the machine adds to them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sqlite3
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
from common import ROOT, SINGLE_THREAD, loop_delays, table
from image_sources import IMAGES, draw_figure
from image_sources import THIS_FILE as SOURCES
from load import TURNS, Bench, quantiles
from load import start as start_coordinator

from asyncrl.config import RunConfig, parse
from asyncrl.data import Samples, samples_path
from asyncrl.data.storage import ImageWriter, images_path
from asyncrl.engines.base import Request
from asyncrl.launch.process import full_pipe
from asyncrl.rollout.worker import RolloutWorker
from asyncrl.rollout.worker import run as run_worker
from asyncrl.store.reader import RunReader
from asyncrl.store.schema import DATABASE
from asyncrl.store.segments import FrameLocation, SegmentReader
from asyncrl.types import IMAGE_MARK, Generation, Message, Sample, StopReason, VersionSpan
from asyncrl.vision.files import prepare_decoded
from asyncrl.vision.layout import read_image_layout
from asyncrl.wire import sockets
from asyncrl.wire.messages.shared import ImageFiles
from asyncrl.wire.messages.worker import Finished, Records
from asyncrl.wire.sockets import Endpoints, choose_endpoints
from tests.fakes.engine import ScriptedEngine

THIS_FILE = Path(__file__).resolve()
MEASURED = "images.json"  # in the run directory: what `measured_worker` has counted
MARKER = ".images_bench"  # in the run directory: the bench has made the directory, and may delete it
GROUP_SIZE = 8
SLOTS = 32
PATCH_SIZE = 16  # pixels
TURN_SECONDS = 0.05
FRAME_BYTES = 42  # what ZMTP and CURVE add to a frame: head, command, nonce and tag
KINDS = ("text", "small", "tool", "process", "environment", "gateway")
DELAY_QUANTILES = (0.5, 0.99, 0.999, 1.0)


# -- the worker's process -----------------------------------------------------------------------------------


class CallingEngine(ScriptedEngine):
    """Calls `look` in each of the first `calls` turns, and answers in the next one."""

    calls = IMAGES - 1

    def __init__(self, model_path: str, **options: Any) -> None:
        super().__init__(lambda request: "")
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(model_path)
        self._turns = Counter[str]()

    async def generate(self, request: Request) -> Generation:
        await asyncio.sleep(TURN_SECONDS)
        turn = self._turns[request.session]
        self._turns[request.session] += 1
        call = json.dumps({"name": "look", "arguments": {"call": turn}})
        text = f"<tool_call>\n{call}\n</tool_call>" if turn < self.calls else "42"
        ids = self._tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False)
        self.tokens += len(ids)
        span = VersionSpan(0, len(ids), self.version, self.version)
        return Generation(tuple(ids), (-0.5,) * len(ids), (span,), StopReason.STOP)


class AnsweringEngine(CallingEngine):
    """Answers in each turn."""

    calls = 0


class WireCounts(msgspec.Struct):
    """Bytes of the bulk channel, in both directions, as they travel. `sent_files`, `received_files`: number
    and bytes of image files."""

    sent: int = 0
    received: int = 0
    sent_files: tuple[int, int] = (0, 0)
    received_files: tuple[int, int] = (0, 0)


class Measured(msgspec.Struct):
    """What a worker has counted. `delays_ms`: of the event loop."""

    wire: WireCounts
    delays_ms: list[float]


def wire_size(parts: Sequence[bytes]) -> int:
    return sum(len(part) + FRAME_BYTES for part in parts)


def measured_worker(config: RunConfig, endpoints: Endpoints, index: int, incarnation: str) -> int:
    """Run a worker; count what its bulk channel carries, and how late its loop is.

    Takes the place of `run` in the worker's process.
    """
    counts = WireCounts()
    delay_spans: list[int] = []  # numbers of delays when an episode has finished
    delays_ms: list[float] = []
    encode_message = sockets.encode_message
    decode_message = sockets.Codec.decode
    serve = RolloutWorker.serve

    def counting_encode(message: Any, frames: Sequence[bytes]) -> list[bytes]:
        parts = encode_message(message, frames)
        if isinstance(message, Records):
            files = [file for _, own_frames in message.with_frames(frames) for file in own_frames[1:]]
            counts.sent += wire_size(parts)
            counts.sent_files = (
                counts.sent_files[0] + len(files),
                counts.sent_files[1] + sum(map(len, files)),
            )
            if any(isinstance(record, Finished) for record, _ in message.counted):
                delay_spans.append(len(delays_ms))
        return parts

    def counting_decode(codec: sockets.Codec, parts: list[bytes]) -> tuple[Any, list[bytes]]:
        message, frames = decode_message(codec, parts)
        if isinstance(message, ImageFiles):
            counts.received += wire_size(parts)
            counts.received_files = (
                counts.received_files[0] + len(frames),
                counts.received_files[1] + sum(map(len, frames)),
            )
        return message, frames

    async def measured_serve(worker: RolloutWorker) -> int:
        for sampler in worker._local_samplers.values():
            sampler.loads._mirror = None  # the trainer writes no weights
        async with loop_delays(delays_ms):
            return await serve(worker)

    sockets.encode_message = counting_encode
    sockets.Codec.decode = counting_decode  # type: ignore[assignment]
    RolloutWorker.serve = measured_serve  # type: ignore[assignment]
    code = run_worker(config, endpoints, index, incarnation)
    measured = Measured(counts, delays_ms[delay_spans[0] : delay_spans[-1]])
    path = Path(config.run_dir) / config.name / MEASURED
    path.write_bytes(msgspec.json.encode(measured))
    return code


# -- a run --------------------------------------------------------------------------------------------------


def write_model(directory: Path) -> None:
    """Write a tiny model whose processor reads images as Qwen3-VL's does: up to 1,280 ids of 32 x 32
    pixels."""
    sys.path.insert(0, str(ROOT / "tools"))
    from prepare_pictures import write_model as write_random_model

    write_random_model(directory, seed=0)

    config_path = directory / "config.json"
    model_config = json.loads(config_path.read_text())
    model_config["vision_config"]["patch_size"] = PATCH_SIZE
    config_path.write_text(json.dumps(model_config))

    processor_path = directory / "preprocessor_config.json"
    processor = json.loads(processor_path.read_text())
    processor["patch_size"] = PATCH_SIZE
    processor["size"] = {"shortest_edge": 64 * 64, "longest_edge": 1280 * 32 * 32}
    processor_path.write_text(json.dumps(processor))


def rollout_of(kind: str) -> dict[str, Any]:
    """Return what episodes of a kind play with."""
    match kind:
        case "environment":
            return {"environment": f"{SOURCES}:Screens"}
        case "gateway":
            return {"agent": f"{SOURCES}:agent", "reward": "agent"}
        case "tool":
            return {"tools": [f"{SOURCES}:look_at_screen"]}
        case "process":
            return {"tools": [f"{SOURCES}:look_in_process"]}
    return {"tools": [f"{SOURCES}:Figures"]}


def write_data(run_dir: Path, rows: int, kind: str) -> int:
    """Write the samples as the launcher does; return the bytes of their images."""
    layout = read_image_layout(str(run_dir / "model"))
    path = samples_path(run_dir, "train")
    path.parent.mkdir(parents=True)
    extra_info = json.dumps({"texts": kind == "text"})
    shows_figure = kind == "small"
    image_bytes = 0
    samples: list[Sample] = []
    with images_path(run_dir, "train").open("w+b") as file:
        writer = ImageWriter(file)
        for row in range(rows):
            image = prepare_decoded(draw_figure(row), layout)
            if shows_figure:
                writer.add(image.ref.digest, image.file)
                image_bytes += len(image.file)
            text = IMAGE_MARK if shows_figure else "figure"
            message = Message("user", f"{text} What is x?", images=(image.ref,) if shows_figure else ())
            samples.append(Sample(row, "bench", (message,), "42", extra_info_json=extra_info))
        if shows_figure:
            writer.finish(sample_ids=0)
    if not shows_figure:
        images_path(run_dir, "train").unlink()

    with path.open("w+b") as file:
        Samples.write(file, [samples])
    return image_bytes


def prepare(run_dir: Path, kind: str, episodes: int) -> int:
    """Write the run directory as the launcher leaves it; return the bytes of the data's images."""
    write_model(run_dir / "model")
    groups = max(2, min(SLOTS // GROUP_SIZE, episodes // GROUP_SIZE // 2))
    steps = max(1, episodes // (groups * GROUP_SIZE))
    engine = AnsweringEngine if kind in ("environment", "gateway") else CallingEngine
    rollout = {
        "workers": 1,
        "slots": SLOTS,
        "max_turns": IMAGES + 1,
        "max_tokens": 8192,
        "max_new_tokens": 64,
        "reward": "exact",
        "episode_timeout": 600.0,
    }
    config = parse(
        {
            "name": run_dir.name,
            "run_dir": str(run_dir.parent),
            "total_steps": steps,
            "model": {"path": str(run_dir / "model"), "dtype": "float32", "device": "cpu"},
            "data": {"train": "none"},
            "engine": {"name": f"{THIS_FILE}:{engine.__name__}"},
            "rollout": rollout | rollout_of(kind),
            "buffer": {
                "groups_per_batch": groups,
                "episodes_per_group": GROUP_SIZE,
                "filter_zero_variance": False,
                "max_bytes": 1 << 50,
            },
            "checkpoint": {"every": 0},
            "weights": {"on_mismatch": "warn"},  # the scripted engine gives equal answers to equal prompts
            "launch": {"start_timeout": 600.0},
            "store": {"keep_bytes": 1 << 50},
        }
    )
    (run_dir / "config.yaml").write_bytes(msgspec.yaml.encode(config))
    return write_data(run_dir, steps * groups, kind)


@contextmanager
def worker_process(run_dir: Path, endpoints: Endpoints) -> Iterator[subprocess.Popen[bytes]]:
    command = [
        *(sys.executable, "-m", "asyncrl.launch.role", "rollout", "--run-dir", str(run_dir)),
        *("--incarnation", "load.1", "--target", "images:measured_worker"),
    ]
    env = os.environ | SINGLE_THREAD | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(THIS_FILE.parent)])}
    encoded_endpoints = msgspec.msgpack.encode(endpoints.for_role("rollout"))
    with (run_dir / "worker.log").open("wb") as out, full_pipe(encoded_endpoints) as stdin:
        process = subprocess.Popen(command, cwd=ROOT, stdin=stdin, stdout=out, stderr=out, env=env)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


class RunFigures(msgspec.Struct):
    """What a run has measured. `data_bytes`: of the data's images; `store_bytes`: of index and segments;
    `coordinator_ms`: quantiles of the coordinator's passes."""

    measured: Measured
    data_bytes: int
    store_bytes: int
    coordinator_ms: list[float]
    seconds: float


def play(run_dir: Path, kind: str, episodes: int) -> RunFigures:
    """Play a run of one kind in an empty directory."""
    data_bytes = prepare(run_dir, kind, episodes)
    endpoints = choose_endpoints("127.0.0.1", 0)
    coordinator = start_coordinator(run_dir, endpoints, "")
    peers = argparse.Namespace(
        seed=0, servers=0, workers=0, slots=SLOTS, episodes=10**9, deadline=3600.0, checkpoint_every=50
    )
    bench = Bench(peers, endpoints, psutil.Process(coordinator.pid))
    began = time.monotonic()
    try:
        with worker_process(run_dir, endpoints) as worker:
            bench.serve()
            seconds = time.monotonic() - began
            if bench.ending is not None:
                coordinator.wait(60)
                worker.wait(60)
    finally:
        coordinator.kill()
        bench.context.destroy(linger=0)

    if bench.ending is None or bench.ending.error:
        waits = bench.status.waits[:5] if bench.status else None
        raise SystemExit(f"no measurement: {bench.ending}; see the logs in {run_dir}; waits: {waits}")

    with closing(sqlite3.connect(run_dir / DATABASE)) as index:
        index.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    stored_files = [run_dir / DATABASE, *(run_dir / "segments").iterdir()]
    passes = json.loads((run_dir / TURNS).read_text())["wall"]
    return RunFigures(
        msgspec.json.decode((run_dir / MEASURED).read_bytes(), type=Measured),
        data_bytes,
        sum(path.stat().st_size for path in stored_files),
        [1e3 * value for value in quantiles(passes)],
        seconds,
    )


# -- the tables ---------------------------------------------------------------------------------------------


def fresh_directory(options: argparse.Namespace, name: str) -> Path:
    """Return an empty directory for a run, in place of that of an earlier call. SystemExit if the directory
    is not the bench's."""
    run_dir: Path = options.run_dir / name
    if run_dir.exists() and not (run_dir / MARKER).exists():
        raise SystemExit(
            f"{run_dir} was not made by this bench, and is not deleted; choose another --run-dir, or remove "
            "the directory"
        )

    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir(parents=True)
    (run_dir / MARKER).touch()
    return run_dir


def stored_image_sizes(run_dir: Path) -> tuple[int, list[int]]:
    """Return the number of references to images in a run's store, and the bytes of each stored file."""
    with closing(RunReader.open(run_dir)) as reader:
        rows = reader.rows("SELECT segment, offset FROM frames WHERE kind > 'image:' AND kind < 'image;'")
    with closing(SegmentReader(run_dir / "segments")) as segments:
        locations = {FrameLocation(segment, offset) for segment, offset in rows}
        return len(rows), [len(segments.read_record(location)) for location in sorted(locations)]


def measure_bytes(options: argparse.Namespace) -> None:
    texts = play(fresh_directory(options, "texts"), "text", options.episodes)
    images_dir = fresh_directory(options, "images")
    images = play(images_dir, "small", options.episodes)
    wire = images.measured.wire
    text_wire = texts.measured.wire

    sent_files, sent_file_bytes = wire.sent_files
    received_files, received_file_bytes = wire.received_files
    sent_bytes = wire.sent - text_wire.sent
    lines = [
        [
            "sent by the worker",
            f"{sent_files:,}",
            f"{sent_file_bytes / sent_files:,.0f}",
            f"{sent_bytes / sent_files:,.0f}",
            f"{sent_bytes / sent_file_bytes:.3f}",
        ],
        [
            "received by the worker (of prompts)",
            f"{received_files:,}",
            f"{received_file_bytes / received_files:,.0f}",
            f"{wire.received / received_files:,.0f}",
            f"{wire.received / received_file_bytes:.3f}",
        ],
    ]
    reference_count, stored_sizes = stored_image_sizes(images_dir)
    file_count = len(stored_sizes)
    stored_bytes = images.store_bytes - texts.store_bytes
    lines.append(
        [
            f"in the store ({reference_count:,} references)",
            f"{file_count:,}",
            f"{sum(stored_sizes) / file_count:,.0f}",
            f"{stored_bytes / file_count:,.0f}",
            f"{stored_bytes / sum(stored_sizes):.3f}",
        ]
    )
    print(table(["", "files", "bytes of a file", "bytes with all that comes with it", "ratio"], lines))

    # The common figure of a group is sent GROUP_SIZE times, and stored once.
    episode_count = sent_files // (IMAGES - 1)
    print(
        f"\n{episode_count:,} episodes; {sent_files / file_count:.2f} files are sent for each one that is "
        "stored"
    )


def measure_delays(options: argparse.Namespace) -> None:
    """Print the delays of each kind: medians over the repeats, and the worst of all."""
    lines = []
    for kind in options.kinds:
        runs = [
            play(fresh_directory(options, kind), kind, options.screens * GROUP_SIZE // IMAGES)
            for _ in range(options.repeats)
        ]
        delays = [quantiles_ms(run.measured.delays_ms) for run in runs]
        medians = [statistics.median(column) for column in zip(*delays, strict=True)]
        worst = max(run_delays[-1] for run_delays in delays)
        coordinator = statistics.median(run.coordinator_ms[1] for run in runs)
        cells = [f"{value:.1f}" for value in (*medians[:-1], worst, coordinator)]
        seconds = statistics.median(run.seconds for run in runs)
        lines.append([kind, *cells, f"{seconds:.0f}"])
        print(" | ".join(lines[-1]), file=sys.stderr, flush=True)

    header = ["", "p50, ms", "p99 (goal 50)", "p99.9", "worst", "coordinator's pass, p99", "seconds"]
    print(table(header, lines))


def quantiles_ms(delays_ms: Sequence[float]) -> list[float]:
    return [float(value) for value in np.quantile(delays_ms, DELAY_QUANTILES)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, measure in (("bytes", measure_bytes), ("delays", measure_delays)):
        command = commands.add_parser(name)
        command.set_defaults(measure=measure)
        command.add_argument("--run-dir", type=Path, default=ROOT / "runs" / "images_bench")
        if name == "bytes":
            command.add_argument("--episodes", type=int, default=1000)
        else:
            command.add_argument("--repeats", type=int, default=3)
            command.add_argument("--screens", type=int, default=64, help="in each repeat")
            command.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    options = parser.parse_args()
    options.run_dir = options.run_dir.resolve()
    options.measure(options)


if __name__ == "__main__":
    main()
