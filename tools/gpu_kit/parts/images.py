"""Do the embedded engine and the trainer read images as transformers does, and how long does that take?

The model is a Qwen3-VL of random weights: the layers of Qwen3 0.6B, the vision tower of Qwen3-VL 2B. Pictures
have 1024 x 768 pixels, which are 768 ids. Four sessions of three turns are sampled together by the embedded
engine. The first and the second begin with the same picture, the third with another one; the first gets one
more in a reply; the fourth has text alone. Reference: a forward of transformers for each session. In bfloat16
the floor is the rounding of that forward: its distance from float32 with the same weights.

The trainer then computes such rows packed and as a tree; reference: transformers, row by row, in float32.
At last come steps of a run in bfloat16 with a frozen tower: pairs of rows with a common prompt, whose picture
is encoded once. Each step has new pictures. A rank decodes them before it trains, which is timed by itself.
"""

from __future__ import annotations

import asyncio
import importlib.util
import io
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from asyncrl.config import ModelConfig, Packing, parse
from asyncrl.engines.base import Request, Sampling
from asyncrl.engines.torch.engine import TorchEngine, build
from asyncrl.model_class import freeze_parts, frozen_parts
from asyncrl.trainer.attention import use_forest_attention
from asyncrl.trainer.footprint import footprint, with_recomputation
from asyncrl.trainer.images import ImagePixels
from asyncrl.trainer.learner import Learner
from asyncrl.trainer.model import load_policy
from asyncrl.trainer.scores import Selected
from asyncrl.trainer.world import World, join_ranks, leave_ranks
from asyncrl.types import EpisodeResult, Generation, StopReason, Turn, VersionSpan
from asyncrl.vision.files import StoredImage, prepare_image
from asyncrl.vision.image_ids import FIRST_IMAGE_ID, find_runs, image_ids, with_placeholders
from asyncrl.vision.layout import ImageLayout, read_image_layout
from asyncrl.vision.pixels import PixelReader, Pixels
from asyncrl.wire.messages.trainer import PlannedTrajectory
from parts.common import EXACT, Context, Finding, exact_float32, memory, stage, synchronize, timed
from parts.rows import distances, formatted, measured
from parts.steps import Episode, without_gradient_check

SECONDS = 150
OPTIONAL = True
GOAL = "engine: float32 1e-4 nats, bfloat16 twice its floor; trainer: float32 1e-4; memory within 10%"

FLOORS = 2.0
GRADIENT_LIMIT = 1e-4
INFLUENCE = 10 * EXACT  # nats, at least, by which log-probs change with the picture
PAIRS = 8  # of rows in a step
STEPS = 3

Sizes = dict[str, Any]
Ids = tuple[int, ...]

TEXT: Sizes = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 262_144,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 5e6,
        "mrope_section": [24, 20, 20],
        "mrope_interleaved": True,
    },
    "tie_word_embeddings": True,
}
VISION: Sizes = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_heads": 16,
    "out_hidden_size": 1024,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [5, 11, 17],
}
SMALL_TEXT = TEXT | {
    "vocab_size": 640,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_parameters": TEXT["rope_parameters"] | {"mrope_section": [4, 2, 2]},
    "initializer_range": 0.1,
}
SMALL_VISION = VISION | {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "deepstack_visual_indexes": [0],
    "initializer_range": 0.1,
}
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}


@dataclass(frozen=True)
class Case:
    """The model in a directory, and sizes. `width`, `height`: of a picture, in pixels. `new_tokens`: of a
    turn; a row of a step has as many after its prompt of seven times as many."""

    path: Path
    layout: ImageLayout
    text_ids: int  # smaller ids stand for text
    width: int
    height: int
    new_tokens: int
    row_tokens: int

    def text(self, count: int, seed: int) -> Ids:
        return tuple(np.random.default_rng(seed).integers(0, self.text_ids, count).tolist())

    def picture(self, seed: int, file_format: str = "JPEG") -> StoredImage:
        """Draw a picture of smooth colours, as those of a photo are, with a little noise."""
        import PIL.Image

        rng = np.random.default_rng(seed)
        coarse = PIL.Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
        smooth = np.array(coarse.resize((self.width, self.height), PIL.Image.Resampling.BICUBIC), np.int16)
        noisy = np.clip(smooth + rng.integers(-6, 7, smooth.shape, dtype=np.int16), 0, 255).astype(np.uint8)
        file = io.BytesIO()
        PIL.Image.fromarray(noisy).save(file, file_format)
        return prepare_image(file.getvalue(), self.layout)

    def ids_of(self, picture: StoredImage) -> Ids:
        ref = picture.ref
        return image_ids(ref.digest, self.layout.run_length(ref.height, ref.width))

    def plain_model(self, dtype: str, context: Context) -> Any:
        model = AutoModelForImageTextToText.from_pretrained(self.path, dtype=getattr(torch, dtype))
        return model.eval().to(context.device)


@dataclass(frozen=True)
class Row:
    """A session's ids. `sampled`: the positions of those that are scored. `logprobs`: by the engine."""

    ids: np.ndarray
    sampled: np.ndarray
    logprobs: torch.Tensor


def run(context: Context) -> Iterator[Finding]:
    if importlib.util.find_spec("PIL") is None:
        yield Finding("images", "left out: Pillow is missing; pip install pillow")
        return

    world = join_ranks(0, 1, device=context.kind)
    try:
        case = write_model(context)
        pictures = [case.picture(seed) for seed in range(3)]
        yield from stage("decoding", 10.0, lambda: decoding_times(context, case), context)
        with exact_float32():
            for dtype in ("float32", "bfloat16"):
                yield from stage(
                    f"engine, {dtype}",
                    15.0,
                    lambda dtype=dtype: engine(context, case, pictures, dtype),
                    context,
                )
            yield from stage("gradients", 25.0, lambda: gradients(context, world, case, pictures), context)
        yield from stage("steps", 25.0, lambda: steps(context, world, case), context)
    finally:
        leave_ranks()


def write_model(context: Context) -> Case:
    text = SMALL_TEXT if context.small else TEXT
    special_ids = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    first_special_id = text["vocab_size"] - len(special_ids)
    config = AutoConfig.for_model(
        "qwen3_vl",
        text_config=text,
        vision_config=SMALL_VISION if context.small else VISION,
        tie_word_embeddings=True,
        **{name: first_special_id + index for index, name in enumerate(special_ids)},
    )
    path = context.work / "qwen3-vl"
    context.write_random_model(config, path)
    (path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))

    layout = read_image_layout(str(path))
    if context.small:
        return Case(path, layout, first_special_id, width=288, height=256, new_tokens=8, row_tokens=16)
    return Case(path, layout, first_special_id, width=1024, height=768, new_tokens=64, row_tokens=128)


def decoding_times(context: Context, case: Case) -> Iterator[Finding]:
    """Time the decoding of files: by the engine's thread, one by one, and by the trainer's threads."""
    count = 4 if context.small else 8
    for file_format in ("JPEG", "PNG"):
        stored = [case.picture(seed, file_format) for seed in range(count)]
        files = {picture.ref.digest: picture.file for picture in stored}
        reader = PixelReader(str(case.path))
        spent = timed(partial(reader.read, stored[0].file), context)

        image_pixels = ImagePixels(str(case.path), case.layout)
        image_pixels.add_files(files)
        began = time.perf_counter()
        image_pixels.pixels_of(files)
        together = (time.perf_counter() - began) / count
        yield Finding(
            f"decoding a {file_format} file of {case.width} x {case.height}",
            f"{spent} in a thread; {1e3 * together:.3g} ms a file in the trainer's threads",
            note=f"{count} files of about {len(stored[0].file):,} bytes",
        )


# -- the embedded engine -----------------------------------------------------------------------------------


def engine(context: Context, case: Case, pictures: Sequence[StoredImage], dtype: str) -> Iterator[Finding]:
    slot_tokens = 2 * len(case.ids_of(pictures[0])) + 12 * case.new_tokens
    served = build(str(case.path), dtype, 4, slot_tokens, device=str(context.device))
    tower: Any = served._model.get_submodule("model.visual")
    encoded: list[int] = []
    counting = tower.register_forward_pre_hook(
        lambda _module, _args, arguments: encoded.append(len(arguments["grid_thw"])), with_kwargs=True
    )

    async def measure() -> tuple[list[Row], str]:
        try:
            rows = await play(served, case, pictures)
            counting.remove()
            return rows, await first_token_times(served, case) if dtype == "bfloat16" else ""
        finally:
            await served.close()

    rows, first_tokens = asyncio.run(measure())
    yield compare(context, case, pictures, rows, dtype)
    value = f"{sum(encoded)} pictures"
    note = "two of the sessions begin with the same picture"
    yield Finding(f"engine, {dtype}: encoded", value, f"{len(pictures)}", sum(encoded) == len(pictures), note)
    if dtype == "float32":
        return

    yield Finding("engine, bfloat16: from a request to its first token", first_tokens)
    pixels = PixelReader(str(case.path)).read(pictures[0].file).to(context.device)
    with torch.inference_mode():
        encoding = timed(lambda: tower(pixels.pixel_values, grid_thw=pixels.grids), context)
        convolution = timed(lambda: tower.patch_embed(pixels.pixel_values), context)
    yield Finding(
        f"engine, bfloat16: encoding {case.width} x {case.height}",
        f"{encoding}; of which the convolution that reads patches {convolution}",
    )


def sessions(case: Case, pictures: Sequence[StoredImage]) -> list[list[Ids]]:
    """Return what each session reads before each of its turns."""
    first, reply, other = map(case.ids_of, pictures)
    count = case.new_tokens
    before, after, *texts = (case.text(count, seed) for seed in range(6))
    return [
        [before + first + after, texts[0] + reply + texts[1], texts[2]],
        [before + first + after, texts[1], texts[3]],
        [before + other + after, texts[1], texts[3]],
        [before + after, texts[0], texts[2]],
    ]


async def play(served: TorchEngine, case: Case, pictures: Sequence[StoredImage]) -> list[Row]:
    """Sample the turns of all sessions, together."""
    files = {picture.ref.digest: picture.file for picture in pictures}
    sampling = Sampling(case.new_tokens, stop_ids=(case.layout.placeholder,))

    async def play_session(number: int, messages: Sequence[Ids]) -> Row:
        ids: Ids = ()
        positions: list[int] = []
        logprobs: list[float] = []
        for message in messages:
            ids += message
            turn = await served.generate(Request(f"session {number}", ids, sampling, number, images=files))
            count = len(turn.ids) - (turn.ids[-1] == case.layout.placeholder)  # which stands for no image
            positions += range(len(ids), len(ids) + count)
            logprobs += turn.logprobs[:count]
            ids += turn.ids[:count]
        return Row(np.array(ids, np.int32), np.array(positions), torch.tensor(logprobs))

    return await asyncio.gather(
        *(play_session(number, messages) for number, messages in enumerate(sessions(case, pictures)))
    )


async def first_token_times(served: TorchEngine, case: Case) -> str:
    """Describe the median time of prompts with a new picture, and of text of the same length."""
    prompts: dict[str, list[tuple[Ids, dict[str, bytes]]]] = {"a new picture": [], "as much text": []}
    for seed in range(100, 104):  # the first warms up
        picture = case.picture(seed)
        ids = case.ids_of(picture)
        prompts["a new picture"].append((ids + case.text(4, seed), {picture.ref.digest: picture.file}))
        prompts["as much text"].append((case.text(len(ids) + 4, seed), {}))

    medians: list[str] = []
    for kind, requests in prompts.items():
        seconds: list[float] = []
        for index, (ids, files) in enumerate(requests):
            began = time.perf_counter()
            await served.generate(Request(f"{kind} {index}", ids, Sampling(1, ()), images=files))
            seconds.append(time.perf_counter() - began)
        medians.append(f"{kind} {1e3 * float(np.median(seconds[1:])):.3g} ms")
    return "; ".join(medians)


def compare(
    context: Context, case: Case, pictures: Sequence[StoredImage], rows: Sequence[Row], dtype: str
) -> Finding:
    """Compare the engine's log-probs with those of transformers."""
    exact = case.plain_model("float32", context)
    with torch.no_grad():
        exact_logprobs = torch.cat([plain_logprobs(exact, case, row, pictures) for row in rows]).cpu()
        if dtype == "float32":
            expected = exact_logprobs
            largest_goal = mean_goal = EXACT
        else:
            rounded = case.plain_model(dtype, context)
            expected = torch.cat([plain_logprobs(rounded, case, row, pictures) for row in rows]).cpu()
            floor = (expected - exact_logprobs).abs()
            largest_goal = FLOORS * float(floor.max())
            mean_goal = FLOORS * float(floor.mean())

        # If the picture did not matter, the comparison would say nothing of images.
        third = rows[2]
        start, end, _ = find_runs(third.ids)[0]
        changed_ids = np.concatenate([third.ids[:start], case.ids_of(pictures[0]), third.ids[end:]])
        changed = Row(changed_ids, third.sampled, third.logprobs)
        read_logprobs = plain_logprobs(exact, case, third, pictures)
        influence = float((read_logprobs - plain_logprobs(exact, case, changed, pictures)).abs().max())

    gap = (torch.cat([row.logprobs for row in rows]) - expected).abs()
    meets_goals = float(gap.max()) <= largest_goal and float(gap.mean()) <= mean_goal
    return Finding(
        f"engine, {dtype}: log-probs",
        f"largest {gap.max():.1e}, mean {gap.mean():.1e}",
        f"largest ≤ {largest_goal:.1e}, mean ≤ {mean_goal:.1e}",
        meets_goals and influence >= INFLUENCE,
        f"{len(gap)} tokens of {len(rows)} sessions, log-probs from {expected.min():.1f} to "
        f"{expected.max():.2f}; another picture changes them by up to {influence:.1e}",
    )


def plain_logprobs(model: Any, case: Case, row: Row, pictures: Sequence[StoredImage]) -> torch.Tensor:
    """Return the log-probs of a row's sampled tokens by one forward of transformers."""
    device = model.device
    files = {picture.ref.digest: picture.file for picture in pictures}
    ids = torch.from_numpy(with_placeholders(row.ids, case.layout.placeholder)).long().to(device)
    arguments = {
        "input_ids": ids[None],
        "mm_token_type_ids": torch.from_numpy((row.ids >= FIRST_IMAGE_ID).astype(np.int64))[None].to(device),
    }
    if runs := find_runs(row.ids):
        reader = PixelReader(str(case.path))
        pixels = Pixels.concatenate([reader.read(files[run.digest]) for run in runs]).to(device)
        arguments |= {"pixel_values": pixels.pixel_values, "image_grid_thw": pixels.grids}

    sampled = torch.from_numpy(row.sampled).to(device)
    logits = model(**arguments, use_cache=False, logits_to_keep=sampled - 1).logits[0]
    return logits.float().log_softmax(-1).gather(1, ids[sampled][:, None])[:, 0]


# -- the trainer -------------------------------------------------------------------------------------------


def gradients(
    context: Context, world: World, case: Case, pictures: Sequence[StoredImage]
) -> Iterator[Finding]:
    """Compare log-probs and gradients of packed rows and trees with those of transformers."""
    rows = [random_row(case, messages, seed) for seed, messages in enumerate(sessions(case, pictures), 200)]
    plain = case.plain_model("float32", context)
    freeze_parts(plain, frozen_parts(plain))
    expected_logprobs = []
    for row in rows:
        logprobs = plain_logprobs(plain, case, row, pictures)
        logprobs.sum().backward()
        expected_logprobs.append(logprobs.detach())
    expected = measured(plain, expected_logprobs)

    image_pixels = ImagePixels(str(case.path), case.layout)
    image_pixels.add_files({picture.ref.digest: picture.file for picture in pictures})
    policy = load_policy(ModelConfig(path=str(case.path), dtype="float32"), world)
    use_forest_attention(policy.lm)
    ways: tuple[Packing, ...] = ("packed", "tree")
    for way in ways:
        sampled = np.concatenate([row.sampled for row in rows])
        row_of = np.repeat(np.arange(len(rows)), [len(row.sampled) for row in rows])
        selected = Selected.lay_out(
            [row.ids for row in rows],
            row_of,
            sampled,
            torch.ones(len(sampled)),
            way,
            image_pixels=image_pixels,
        )
        assert selected.images is not None
        policy.packing = way
        policy.zero_grad()
        logprobs = policy(selected.to(world.device)).logp
        logprobs.sum().backward()

        values = measured(policy.lm, [logprobs.detach()])
        relative = distances(values, expected)
        finite = all(bool(gradient.isfinite().all()) for gradient in values[1].values())
        yield Finding(
            f"trainer, float32: {way}",
            f"{formatted(relative)}; {'all finite' if finite else 'some are not finite'}",
            f"<= {GRADIENT_LIMIT:.0e}, finite",
            finite and max(relative) <= GRADIENT_LIMIT,
            f"{len(selected.images.pixels.grids)} pictures encoded, {selected.ids.numel():,} tokens computed",
        )


def random_row(case: Case, messages: Sequence[Ids], seed: int) -> Row:
    """Return a session with random ids in the place of sampled ones."""
    ids: Ids = ()
    positions: list[int] = []
    for number, message in enumerate(messages):
        ids += message
        positions += range(len(ids), len(ids) + case.new_tokens)
        ids += case.text(case.new_tokens, 10 * seed + number)
    return Row(np.array(ids, np.int32), np.array(positions), torch.empty(0))


def steps(context: Context, world: World, case: Case) -> Iterator[Finding]:
    """Time steps of a run, with pictures and with as much text; compare memory with the estimate."""
    length = 8 * case.row_tokens
    tokens = PAIRS * 9 * case.row_tokens  # that a tree computes: nine of the longest rows, as is estimated
    config = parse(
        {
            "name": "check",
            "model": {"path": str(case.path), "dtype": "bfloat16", "device": context.kind},
            "data": {"train": "none"},
            "rollout": {"max_tokens": length, "max_new_tokens": case.row_tokens},
            "algorithm": {"correction": {"truncate": {}}},  # the log-probs are made up
            "trainer": {"packing": "tree", "micro_batch_tokens": tokens},
        }
    )
    with without_gradient_check():
        learner = Learner(config, world)
    yield Finding("trainer.packing=tree in a run", learner.packing, "tree", learner.packing == "tree")

    picture_ids = 0
    for kind, count in {"pictures": PAIRS, "text alone": 0}.items():
        if not context.small:
            torch.cuda.reset_peak_memory_stats()
        decoding_durations: list[float] = []
        durations: list[float] = []
        metrics: dict[str, float] = {}
        for _ in range(STEPS):
            seeds = range(PAIRS * learner.step, PAIRS * learner.step + count)
            pictures = [case.picture(seed) for seed in seeds]
            step_episodes = episodes(case, pictures, learner.step)
            if pictures:
                picture_ids = len(case.ids_of(pictures[0]))
                files = {picture.ref.digest: picture.file for picture in pictures}
                began = time.perf_counter()
                readable_episodes = list(learner.read_images(step_episodes, files))
                decoding_durations.append(time.perf_counter() - began)
                assert len(readable_episodes) == len(step_episodes)

            synchronize(context)
            began = time.perf_counter()
            learner.accumulate(step_episodes)
            metrics = learner.finish()
            synchronize(context)
            durations.append(time.perf_counter() - began)

        spent = float(np.median(durations[1:]))
        norm = metrics["actor/grad_norm"]
        value = f"{spent:.3g} s a step; {2 * PAIRS * length / spent:,.0f} tokens/s of rows, "
        value += f"{tokens / spent:,.0f} computed"
        note = f"{2 * PAIRS} rows of {length:,} tokens, {count} new pictures; the first {durations[0]:.3g} s"
        yield Finding(
            f"trainer, bfloat16: a step of {kind}",
            value,
            "a finite gradient",
            bool(np.isfinite(norm) and norm > 0),
            note,
        )
        if decoding_durations:
            decoding = float(np.median(decoding_durations))
            yield Finding(
                f"trainer: decoding the {count} pictures of a step",
                f"{1e3 * decoding:.3g} ms (median of {STEPS})",
            )
            recomputed_config = with_recomputation(config, learner.recomputation.every)
            estimate = footprint(recomputed_config, sequence_image_ids=picture_ids).total
            allocated = 0.0 if context.small else float(torch.cuda.max_memory_allocated())
            yield memory(f"trainer, bfloat16: a step of {kind}", allocated, float(estimate), context)


def episodes(case: Case, pictures: Sequence[StoredImage], step: int) -> list[Episode]:
    """Return pairs of rows whose prompts have a picture, or text alone; one of each pair was right."""
    count = case.row_tokens
    spans = (VersionSpan(0, count, step, step),)
    results = tuple(EpisodeResult(reward, count) for reward in (1.0, 0.0))
    planned_episodes = []
    for pair in range(PAIRS):
        prompt = case.ids_of(pictures[pair]) if pictures else ()
        prompt = (*case.text(4, pair), *prompt)
        prompt += case.text(7 * count - len(prompt), 1000 * (step + 1) + pair)
        for member, result in enumerate(results):
            answer = case.text(count, 10_000 * (step + 1) + 2 * pair + member)
            turn = Turn(0, prompt, Generation(answer, (-10.0,) * count, spans, StopReason.STOP))
            planned = PlannedTrajectory(
                f"{step}/{2 * pair + member}", f"{step}/{pair}", 1, result, results, member, 2, 1.0
            )
            planned_episodes.append((planned, [turn]))
    return planned_episodes
