"""Publishing a fine-tuned model: bytes and seconds whole and as deltas, and what the trainer waits.

    python tools/bench/weights.py [--hidden 768] [--layers 12] [--steps 4] [--tokens 512] [--lora RANK]

A random Qwen2 (138M parameters with the defaults) takes AdamW steps on random text under FSDP2, on one rank
and one thread, in float32; every step is published from a copy in host memory, as in a run. It is exported
as bfloat16 (from float32 masters) and as float32. Adam's first steps are its largest, a whole learning rate
for every weight; later ones change less, and their deltas are smaller. `--lora`: adapters are trained, at ten
times those rates, and merged into what is published, as in a run. Files are in shared memory, or in
`--directory DIR`. Medians over the steps, of CPU time: other jobs on the machine then disturb it less.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.types import PolicyVersion

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from common import table
from transformers import Qwen2Config, Qwen2ForCausalLM

from asyncrl.config import ModelConfig
from asyncrl.trainer.model import Policy, PublishedShards, Selected, load_policy
from asyncrl.trainer.world import World, join_ranks, leave_ranks
from asyncrl.weights import disk
from asyncrl.weights.delta import VersionWriter, materialise
from asyncrl.weights.manifest import WeightsRef
from asyncrl.weights.shards import HostShards
from asyncrl.weights.snapshot import Snapshot

VOCABULARY = 32_000
DTYPES = ("bfloat16", "float32")
RATES = (1e-6, 1e-5)
BUCKET_BYTES = 64 << 20


@dataclass
class Times:
    """CPU seconds of each kind of work, by name; a value per step."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    bytes: list[int] = field(default_factory=list)  # bytes of each delta

    def measured(self, name: str, begin: float) -> None:
        self.seconds.setdefault(name, []).append(time.process_time() - begin)

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])


def build(directory: Path, hidden: int, layers: int) -> str:
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        tie_word_embeddings=True,
    )

    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(directory)
    return str(directory)


def random_text(tokens: int, step: int) -> Selected:
    """Return four rows, of which every token but the first is trained."""
    ids = torch.randint(VOCABULARY, (4, tokens // 4), generator=torch.Generator().manual_seed(step))
    row, position = torch.ones(4, ids.shape[1] - 1).nonzero(as_tuple=True)
    return Selected.lay_out(list(ids.numpy()), row.numpy(), position.numpy() + 1, torch.ones(len(row)))


def train_step(policy: Policy, optimizer: torch.optim.Optimizer, tokens: int, step: int) -> None:
    optimizer.zero_grad()
    scores = policy(random_text(tokens, step))
    advantage = torch.randn(len(scores.logp), generator=torch.Generator().manual_seed(step))
    (-(advantage * scores.logp).mean()).backward()
    optimizer.step()


class Bench:
    """One model, published three ways after every step: whole, as a delta, and into a reader's cache."""

    def __init__(self, model: str, dtype: str, rate: float, lora: int, world: World, directory: Path) -> None:
        self.policy = load_policy(ModelConfig(path=model, dtype="float32", lora_rank=lora), world)
        self.policy.export_dtype = getattr(torch, dtype)

        self.optimizer = torch.optim.AdamW(
            [parameter for parameter in self.policy.parameters() if parameter.requires_grad],
            lr=rate,
            betas=(0.9, 0.95),
            weight_decay=0.0,
        )

        self.host = HostShards(
            PublishedShards(self.policy), self.policy.published, self.policy.export_dtype, 60.0
        )
        self.whole_versions = VersionWriter(directory / "whole", BUCKET_BYTES)
        self.deltas = VersionWriter(directory / "deltas", BUCKET_BYTES, full_every=1 << 30)
        self.world = world
        self.directory = directory
        self.times = Times()
        self.whole_bytes = sum(spec.nbytes for spec in self.host.layout)

    def run(self, steps: int, tokens: int) -> Times:
        for step in range(-2, steps):  # two for page faults: both host buffers, the base, the cache
            if step == 0:
                self.times = Times()
            begin = time.process_time()
            train_step(self.policy, self.optimizer, tokens, step + 2)
            self.times.measured("step", begin)
            self.publish(self.snapshot(step + 2))
        return self.times

    def snapshot(self, version: int) -> Snapshot:
        begin = time.process_time()
        snapshot = self.host.copy_version(
            PolicyVersion(0, version), PublishedShards(self.policy), lambda busy: [busy]
        )
        self.times.measured("copy", begin)
        return snapshot

    def publish(self, snapshot: Snapshot) -> None:
        whole_version = self.timed("write whole", lambda: self.whole_versions.write_version(snapshot))
        self.timed("read whole", lambda: materialise(whole_version, self.directory / "copies"))
        delta = self.timed("write delta", lambda: self.deltas.write_version(snapshot))
        self.timed("apply delta", lambda: materialise(delta, self.directory / "cache"))
        if (payload := Path(delta.path) / disk.DELTA).exists():
            self.times.bytes.append(payload.stat().st_size)
        disk.prune(self.directory / "whole", 1)

    def timed(self, name: str, work: Callable[[], WeightsRef]) -> WeightsRef:
        begin = time.process_time()
        ref = work()
        self.times.measured(name, begin)
        return ref


def line(dtype: str, rate: float, bench: Bench, times: Times) -> list[str]:
    delta = statistics.median(times.bytes)
    median = times.median
    return [
        *(dtype, f"{rate:g}", f"{bench.whole_bytes / 1e6:.0f}", f"{delta / 1e6:.1f}"),
        f"{bench.whole_bytes / delta:.1f}",
        *(f"{median(name):.2f}" for name in ("write whole", "write delta", "read whole", "apply delta")),
        *(f"{1e3 * median('copy'):.0f}", f"{median('step'):.2f}", f"{median('copy') / median('step'):.1%}"),
    ]


HEADER = ["exported as", "lr", "whole MB", "delta MB", "ratio", "write whole s", "write delta s"]
HEADER += ["read whole s", "apply delta s", "copy ms", "step s", "copy / step"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in {"hidden": 768, "layers": 12, "steps": 4, "tokens": 512}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lora", type=int, default=0)
    parser.add_argument("--directory", type=Path, default=disk.SHARED_MEMORY)
    args = parser.parse_args()

    torch.set_num_threads(1)
    directory = Path(tempfile.mkdtemp(prefix="bench-weights-", dir=args.directory))

    lines = []
    world = join_ranks(0, 1, device="cpu")
    try:
        model = build(directory / "model", args.hidden, args.layers)
        for dtype in DTYPES:
            for rate in (10 * rate if args.lora else rate for rate in RATES):
                bench = Bench(model, dtype, rate, args.lora, world, directory / f"{dtype}-{rate:g}")
                lines.append(line(dtype, rate, bench, bench.run(args.steps, args.tokens)))
                shutil.rmtree(bench.directory)
    finally:
        leave_ranks()
        shutil.rmtree(directory)

    print(f"Steps of {args.tokens} tokens; the trainer waits for the copy.")
    trained = sum(parameter.numel() for parameter in bench.policy.parameters() if parameter.requires_grad)
    print(f"{trained} parameters are trained: {2 * trained / 1e6:.1f} MB in bfloat16.\n")
    print(table(HEADER, lines))


if __name__ == "__main__":
    main()
