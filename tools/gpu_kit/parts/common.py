"""What a part is given, what it yields, and what several of them do. torch is imported where it is used,
for the driver does not need it."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import psutil
    import torch

TRACEBACK_LINES = 12
NEAR = 0.1  # of an estimate of memory
MB = 1e6
GB = 1e9
EXACT = 1e-4  # nats, by which log-probs in float32 may differ
FREED = 0.95  # of memory that is held, at least, when its holder sleeps or rests
# What a CPU computes in seconds, in the shape of the Qwen3 that it stands for. Layers of this width need
# larger weights for as much influence beside the embedding.
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 640,
    "initializer_range": 0.1,
}


@dataclass(frozen=True)
class Finding:
    """One thing that a part found. `ok`: whether it meets `goal`; None where there is nothing to judge."""

    name: str
    value: str
    goal: str = ""
    ok: bool | None = None
    note: str = ""


@dataclass(frozen=True)
class Context:
    """A part's circumstances. `kind`: cuda or cpu. `deadline`: of time.monotonic(), when the part is killed.
    `work`: a directory of its own, beside those that parts share; check.py removes it at the end, on a visit
    it stays until the step begins anew. `kit`: the folder that has site, asyncrl, configs, examples, models
    and tests."""

    kind: str
    deadline: float
    work: Path
    kit: Path

    @property
    def small(self) -> bool:
        """Sizes that take seconds on one core."""
        return self.kind == "cpu"

    @cached_property
    def device(self) -> torch.device:
        import torch

        return torch.device("cpu") if self.small else torch.device("cuda", 0)

    def left(self) -> float:
        """Seconds until the part is killed."""
        return self.deadline - time.monotonic()

    def judged(self, ok: bool) -> bool | None:
        """`ok` on a GPU, None on a CPU: for a goal that only a GPU can meet."""
        return None if self.small else ok

    def model_config(self, name: str, **config_fields: Any) -> Any:
        """The transformers configuration of `qwen3-0.6b`, `-1.7b` or `-4b`; `other` keys are replaced. On a
        CPU it is a small one of the same family."""
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(self.kit / "models" / name)
        for key, value in ((SMALL if self.small else {}) | config_fields).items():
            setattr(config, key, value)
        config.layer_types = ["full_attention"] * config.num_hidden_layers
        return config

    def random_model(
        self, name: str, *, dtype: str = "bfloat16", spread: float = 2.5, **config_fields: Any
    ) -> Path:
        """A directory with a model of that configuration, random weights, and the demo's tokenizer. It is
        written once for all parts. `spread`: standard deviation of its logits; by itself it is below 1, and
        log-probs would be almost flat."""
        changes = "".join(f"-{key}={value}" for key, value in sorted(config_fields.items()))
        model_directory = self.work.parent / "models" / f"{name}-{dtype}-{spread:g}{changes}"
        if model_directory.exists():
            return model_directory
        written = model_directory.with_name(f"{model_directory.name}.{os.getpid()}")
        self.write_random_model(self.model_config(name, **config_fields), written, dtype=dtype, spread=spread)
        for file in (self.kit / "examples/multiturn/calculator/model").glob("tokenizer*.json"):
            shutil.copy(file, written)
        written.rename(model_directory)
        return model_directory

    def write_random_model(
        self, config: Any, directory: Path, *, dtype: str = "bfloat16", spread: float = 2.5
    ) -> None:
        """Write a model of this configuration with random weights, see `random_model`."""
        import torch

        from asyncrl.model_class import auto_class_of

        torch.manual_seed(0)
        with self.device:
            model = auto_class_of(config).from_config(config, dtype=getattr(torch, dtype))
        text_config = config.get_text_config()
        norm_weight = spread / (text_config.initializer_range * text_config.hidden_size**0.5)
        with torch.no_grad():
            model.get_decoder().norm.weight.fill_(norm_weight)
        model.save_pretrained(directory)


class Timing(NamedTuple):
    """The median of `repeats` measurements."""

    seconds: float
    repeats: int

    def __str__(self) -> str:
        duration = f"{self.seconds:.3g} s" if self.seconds >= 1 else f"{self.seconds * 1000:.3g} ms"
        return f"{duration} (median of {self.repeats})"


def timed(work: Callable[[], object], context: Context, *, repeats: int = 3, warm_up: int = 1) -> Timing:
    """The time of `work`, on a GPU until it is idle again."""
    durations = []
    for number in range(warm_up + repeats):
        synchronize(context)
        began = time.perf_counter()
        work()
        synchronize(context)
        if number >= warm_up:
            durations.append(time.perf_counter() - began)
    return Timing(statistics.median(durations), repeats)


def synchronize(context: Context) -> None:
    if not context.small:
        import torch

        torch.cuda.synchronize(context.device)


def used_memory(context: Context, processes: Iterable[psutil.Process]) -> float:
    """Return the bytes of the GPU that are used, by whomever; on a CPU those that these processes have of
    main memory."""
    if context.small:
        return float(sum(process.memory_info().rss for process in processes))
    import torch

    synchronize(context)
    free, total = torch.cuda.mem_get_info()
    return float(total - free)


def attempt(name: str, measure: Callable[[], Finding], context: Context) -> Iterator[Finding]:
    """What `measure` finds, or its exception as a finding that is not ok; afterwards no memory is held."""
    try:
        yield measure()
    except Exception as error:
        yield failure(name, error)
    finally:
        release(context)


def stage(
    name: str, seconds: float, findings: Callable[[], Iterable[Finding]], context: Context
) -> Iterator[Finding]:
    """Yield what a stage of a part finds, or its exception; afterwards no memory is held. On a GPU a stage
    with fewer than `seconds` left is left out."""
    if not context.small and context.left() < seconds:
        yield Finding(name, f"left out: {context.left():.0f} s are left, of {seconds:.0f} s that it needs")
        return
    try:
        yield from findings()
    except Exception as error:
        yield failure(name, error)
    finally:
        release(context)


def memory(name: str, allocated: float, estimated: float, context: Context) -> Finding:
    """Compare bytes that torch has allocated at most with what the dry run estimates; `allocated`: 0 on a
    CPU."""
    memory_text = f"{allocated / GB:.3g} GB" if allocated else "nothing (CPU)"
    value = f"allocated {memory_text}, estimated {estimated / GB:.3g} GB"
    if not allocated:
        return Finding(f"{name}: memory", value, f"within {NEAR:.0%}")
    off = estimated / allocated - 1
    near = context.judged(abs(off) <= NEAR)
    return Finding(f"{name}: memory", f"{value}: {off:+.1%}", f"within {NEAR:.0%}", near)


def failure(name: str, error: BaseException) -> Finding:
    """An exception as a finding, with the last lines of its traceback."""
    lines = "".join(traceback.format_exception(error)).strip().splitlines()
    first = str(error).strip().splitlines()
    summary = f"{type(error).__name__}: {first[0] if first else ''}"[:300]
    return Finding(name, summary, ok=False, note="\n".join(lines[-TRACEBACK_LINES:]))


def release(context: Context) -> None:
    """Give the GPU's memory back, as far as nothing refers to it."""
    import gc

    gc.collect()
    if not context.small:
        import torch

        with suppress(RuntimeError):  # after an error of a kernel every call fails
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


@contextmanager
def exact_float32() -> Iterator[None]:
    """Matrix products and convolutions in float32 without TF32."""
    import torch

    matmul_precision = torch.get_float32_matmul_precision()
    convolutions_in_tf32 = torch.backends.cudnn.allow_tf32  # allowed by default
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matmul_precision)
        torch.backends.cudnn.allow_tf32 = convolutions_in_tf32


def append(file: Path, finding: Finding) -> None:
    """Add it to a JSON-lines file; it is there even if this process is killed next."""
    with file.open("a") as lines:
        lines.write(json.dumps(finding.__dict__) + "\n")
