"""The embedded engine: the trainer's own Hugging Face module, served from the caller's event loop.

One task steps the batcher in a thread: a step of a large model takes seconds, and tools, rewards and
heartbeats of the loop go on meanwhile. The thread computes steps until a turn ends or the loop has a change
to make: requests, aborts and weight swaps are done in the loop and in order, while no step runs.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel

from asyncrl.engines.base import NOTHING, Request, Sampling, check_request, engines
from asyncrl.engines.torch.batch import Batcher, RunningRequest
from asyncrl.engines.torch.check import check_served
from asyncrl.engines.torch.images import NO_IMAGES, TEXT_ONLY, ImageReader, PromptImages
from asyncrl.errors import EngineError, one_line
from asyncrl.model_class import frozen_parts, is_within
from asyncrl.types import Generation, StopReason, TokenScores
from asyncrl.vision.image_ids import has_image_ids, with_placeholders
from asyncrl.vision.pixels import Pixels
from asyncrl.weights import disk
from asyncrl.weights.adapters import Adapters
from asyncrl.weights.checkpoint_match import load_pretrained
from asyncrl.weights.manifest import AdapterSpec, Manifest, WeightsError, WeightsRef
from asyncrl.weights.memory import ReleasedStorages, trim_heap
from asyncrl.weights.model_files import StoredTensor, stored_tensors
from asyncrl.weights.names import FilePiece, checkpoint_pieces, file_pieces

T = TypeVar("T")

# Prompt tokens at most between two decode steps; on a CPU more is not faster.
PREFILL_TOKENS = 1024
# Tokens whose logits are held in float32 at once.
LOGITS_CHUNK_TOKENS = 512


class TorchEngine:
    """An `Engine` in this process. The model's attention function is replaced; plain calls of the model still
    work. `read_base_model` reads the model again, to wake with a version that holds adapters only.
    `file_tensors`: the tensors of the files that the model was read from, by whose names versions come.
    `image_reader`: reads the images of requests, in a thread, before a request joins the batch."""

    def __init__(
        self,
        model: PreTrainedModel,
        read_base_model: Callable[[], PreTrainedModel],
        slots: int,
        max_len: int,
        max_batch_tokens: int,
        version: int = 0,
        file_tensors: Mapping[str, StoredTensor] = {},
        image_reader: ImageReader = TEXT_ONLY,
    ) -> None:
        self._model = model.eval()
        self._published_pieces = checkpoint_pieces(model, model.state_dict(), file_tensors)
        self._read_base_model = read_base_model
        embeddings = model.get_input_embeddings().weight
        assert isinstance(embeddings, torch.Tensor)
        self._vocabulary_size = embeddings.shape[0]
        self._batcher = Batcher(model, slots, max_len, max_batch_tokens, version, image_reader.layout)
        self._turn_futures: dict[RunningRequest, asyncio.Future[Generation]] = {}
        self._pending_changes: list[Callable[[], None]] = []  # to make after the step under way

        self._is_stepping = False
        self._step_thread = ThreadPoolExecutor(1, "torch-engine")
        self._image_reader = image_reader
        self._image_thread = ThreadPoolExecutor(1, "torch-engine-images")
        self._images_by_session: dict[str, asyncio.Future[PromptImages]] = {}  # being read
        self._scored_rows = itertools.count()
        self._serve_task: asyncio.Task[None] | None = None
        self._wake_event = asyncio.Event()
        self._load_lock = asyncio.Lock()
        self._break_error: EngineError | None = None

        self._adapters: Adapters | None = None  # set by the first version that holds adapters
        self._released_memory = ReleasedStorages()
        self._awake_event = asyncio.Event()  # set while the engine is awake or broken
        self._awake_event.set()

    @property
    def version(self) -> int:
        return self._batcher.version

    @property
    def tokens(self) -> int:
        return self._batcher.generated_tokens

    @property
    def reprefilled_tokens(self) -> int:
        """Return the prompt tokens that were prefilled again, as a layer's state behind them was not kept."""
        return self._batcher.reprefilled_tokens

    @property
    def asleep(self) -> bool:
        return self._batcher.asleep

    async def generate(self, request: Request) -> Generation:
        if self._break_error is not None:
            raise self._break_error

        check_request(request, self._vocabulary_size, self._batcher.cache.max_len)
        self._image_reader.check(request)
        images = await self._read_images(request) if has_image_ids(request.ids) else NO_IMAGES
        if images is None:  # the session was released
            return NOTHING

        loop = asyncio.get_running_loop()
        turn_future: asyncio.Future[Generation] = loop.create_future()
        run: RunningRequest | None = None

        def start_turn() -> None:
            nonlocal run
            if self._break_error is not None:
                _set_answer(turn_future, self._break_error)
            elif request.session in self._batcher.runs_by_session:
                problem = f"session {request.session!r}: its previous turn is still running"
                _set_answer(turn_future, EngineError(problem))
            elif not turn_future.done():  # else the caller did not wait
                run = self._batcher.add_request(request, images)
                self._turn_futures[run] = turn_future

        def read_part() -> None:
            is_running = run is not None and run in self._turn_futures
            _set_answer(part_future, self._batcher.sampled_so_far(run) if run and is_running else NOTHING)

        def abort_turn() -> None:
            if run is not None and run in self._turn_futures:
                self._answer_turn(run, StopReason.ABORT)

        self._between_steps(start_turn)
        if self._serve_task is None or self._serve_task.done():
            self._wake_event = asyncio.Event()
            self._serve_task = asyncio.create_task(self._serve_turns(), name="torch-engine")
        self._wake_event.set()

        try:
            # A part is NOTHING if the turn ends while the part is read, or the engine breaks.
            while not (await asyncio.wait([turn_future], timeout=request.part_seconds))[0]:
                part_future: asyncio.Future[Generation] = loop.create_future()
                self._between_steps(read_part)
                await asyncio.wait([part_future, turn_future], return_when=asyncio.FIRST_COMPLETED)
                await request.on_part(part_future.result() if part_future.done() else NOTHING)

            return await turn_future
        finally:
            turn_future.cancel()  # no effect on a finished future
            if turn_future.cancelled():
                self._between_steps(abort_turn)

    def release(self, session: str) -> None:
        def release_session() -> None:
            run = self._batcher.runs_by_session.get(session)
            if run in self._turn_futures:
                self._answer_turn(run, StopReason.ABORT)
            self._batcher.slots.release_session(session)

        if session in self._images_by_session:
            self._images_by_session[session].cancel()
        self._between_steps(release_session)

    async def _read_images(self, request: Request) -> PromptImages | None:
        """Read the images of a request in a thread; None if the session is released meanwhile."""
        session = request.session
        if session in self._images_by_session:
            raise EngineError(f"session {session!r}: its previous turn is still running")

        kept_length = self._batcher.kept_length(request)
        images_future = asyncio.get_running_loop().run_in_executor(
            self._image_thread, self._image_reader.read, request, kept_length
        )
        self._images_by_session[session] = images_future
        try:
            await asyncio.wait([images_future])
        finally:
            images_future.cancel()  # no effect on a finished future
            del self._images_by_session[session]

        if self._break_error is not None:
            raise self._break_error
        return None if images_future.cancelled() else images_future.result()

    async def load(self, ref: WeightsRef) -> Manifest:
        async with self._load_lock:  # versions are applied in the order of the calls
            if self._break_error is not None:
                raise self._break_error

            manifest, tensors = await asyncio.to_thread(disk.read_tensors, ref)
            wakes_up = self.asleep
            base_model = None
            if wakes_up and manifest.adapters:
                base_model = await asyncio.to_thread(self._read_base_model)

            def swap_weights() -> None:
                if not wakes_up:
                    self._apply_tensors(manifest.adapters, tensors)
                else:
                    try:
                        self._released_memory.allocate()
                        if base_model is not None:
                            base_tensors = dict(base_model.named_parameters())
                            copy_tensors(dict(self._model.named_parameters()), base_tensors)
                        self._apply_tensors(manifest.adapters, tensors)
                    except Exception as error:  # the engine sleeps on
                        self._free_memory()
                        if isinstance(error, torch.OutOfMemoryError):  # the next try may find enough memory
                            raise WeightsError(one_line(error)) from error
                        raise

                    self._batcher.wake()
                    self._awake_event.set()

                self._batcher.mark_version(ref.version.step)
                self._wake_event.set()

            await self._make_change(swap_weights)

        return manifest

    async def sleep(self) -> None:
        def fall_asleep() -> None:
            self._awake_event.clear()
            self._batcher.sleep()
            self._free_memory()

        async with self._load_lock:
            if self._break_error is not None:  # a break while falling asleep may have left memory in use
                raise self._break_error
            if not self.asleep:
                await self._make_change(fall_asleep)

    async def score(self, ids: tuple[int, ...], images: Mapping[str, bytes] = {}) -> tuple[float, ...]:
        prompt_images = await self._read_images_to_score(ids, images)
        scores = await self._compute_in_thread(partial(self._score, ids, len(ids) - 1, prompt_images))
        return tuple(np.frombuffer(scores.logprobs, "<f4").tolist())

    async def read(
        self, ids: tuple[int, ...], count: int, top: int, images: Mapping[str, bytes] = {}
    ) -> TokenScores:
        prompt_images = await self._read_images_to_score(ids, images)
        with EngineError.instead_of(RuntimeError, text="the engine cannot score"):
            return await self._compute_in_thread(
                partial(self._score, ids, count, prompt_images, top, base=True)
            )

    async def _read_images_to_score(self, ids: tuple[int, ...], files: Mapping[str, bytes]) -> PromptImages:
        """Read the images of a row. EngineRefused says what is wrong with an image."""
        if not has_image_ids(ids):
            return NO_IMAGES

        session = f"scored row {next(self._scored_rows)}"
        request = Request(session, ids, Sampling(0, ()), images=files)
        self._image_reader.check(request)
        prompt_images = await self._read_images(request)
        if prompt_images is None:
            raise EngineError(f"session {session!r} was released while its images were read")
        return prompt_images

    async def _compute_in_thread(self, compute: Callable[[], T]) -> T:
        """Compute in the thread, after the step under way or the sleep, under the same weights throughout."""
        while True:
            await self._awake_event.wait()
            async with self._load_lock:
                if self._break_error is not None:
                    raise self._break_error
                if not self.asleep:
                    self._between_steps(lambda: None)
                    return await asyncio.get_running_loop().run_in_executor(self._step_thread, compute)

    @torch.inference_mode()
    def _score(
        self,
        ids: tuple[int, ...],
        count: int,
        images: PromptImages,
        top: int = 0,
        base: bool = False,
    ) -> TokenScores:
        """Score the last `count` ids with each adapter, or without any. `images`: of the ids, with their
        patches."""
        row_count = len(self._adapters.agents) if self._adapters and not base else 1
        device = self._model.device
        row = np.array(ids)
        image_arguments: dict[str, torch.Tensor] = {}
        if images.runs:
            assert self._image_reader.layout is not None
            row = with_placeholders(row, self._image_reader.layout.placeholder)
            positions = torch.from_numpy(images.positions_within(0, len(ids)).astype(np.int64))
            pixels = Pixels.concatenate(images.pixels_within(0, len(ids)))
            image_arguments = {
                "position_ids": positions[:, None].expand(3, row_count, -1).to(device),
                "pixel_values": pixels.pixel_values.repeat(row_count, 1).to(device),
                "image_grid_thw": pixels.grids.repeat(row_count, 1).to(device),
            }

        tokens = torch.from_numpy(row).expand(row_count, -1).to(device)
        if self._adapters is not None:
            self._adapters.select_adapters(
                torch.arange(row_count, device=tokens.device)[:, None].expand_as(tokens)
            )

        with self._adapters.disabled() if self._adapters and base else nullcontext():
            output = self._model(tokens, use_cache=False, logits_to_keep=count + 1, **image_arguments)

        logits = output.logits[:, :-1].flatten(0, 1)
        labels = tokens[:, len(ids) - count :].reshape(-1, 1)
        chunk_scores = []
        for chunk_logits, chunk_labels in zip(
            logits.split(LOGITS_CHUNK_TOKENS), labels.split(LOGITS_CHUNK_TOKENS), strict=True
        ):
            logprobs = chunk_logits.float().log_softmax(-1)
            chunk_scores.append((logprobs.gather(1, chunk_labels), *logprobs.topk(top)))

        label_logprobs, top_logprobs, top_ids = (
            torch.cat(column).cpu().numpy() for column in zip(*chunk_scores, strict=True)
        )
        typed_columns = (label_logprobs, "<f4"), (top_ids, "<i4"), (top_logprobs, "<f4")
        return TokenScores(*(values.astype(dtype).tobytes() for values, dtype in typed_columns))

    async def close(self) -> None:
        self._break(EngineError("the engine was closed"))
        self._wake_event.set()
        if self._serve_task is not None:
            await self._serve_task  # the step under way is its last
        self._image_thread.shutdown(wait=False, cancel_futures=True)
        self._step_thread.shutdown(cancel_futures=True)

    # -- between two steps -----------------------------------------------------------------------------

    def _between_steps(self, change: Callable[[], None]) -> None:
        """Make a change now, or, in order, after the step under way."""
        if self._is_stepping:
            self._pending_changes.append(change)
        else:
            change()

    def _apply_tensors(self, specs: Mapping[str, AdapterSpec], tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy a version's tensors into the model or the adapters. Raises WeightsError, changing nothing."""
        if not specs:
            replace_weights(self._model, tensors, self._published_pieces)
            return

        if self._adapters is None:
            adapter_sizes = {agent: (spec.rank, spec.alpha) for agent, spec in specs.items()}
            adapted_kinds = {layer.rpartition(".")[2] for spec in specs.values() for layer in spec.layers}
            self._adapters = Adapters(self._model, adapter_sizes, adapted_kinds)
            for piece in self._adapters.published:  # in case the version is refused
                torch.nn.init.zeros_(self._model.get_parameter(piece.parameter))
            self._batcher.use_adapters(self._adapters)

        if self._adapters.specs != specs:
            raise WeightsError(f"the adapters are {specs} instead of {self._adapters.specs}")

        parameters = {
            piece.name: self._model.get_parameter(piece.parameter) for piece in self._adapters.published
        }
        if parameters.keys() != tensors.keys():
            raise WeightsError("the version's tensors do not match its adapters")

        copy_tensors(parameters, tensors)

    def _free_memory(self) -> None:
        """Give up the memory of the KV and of all tensors that every version brings."""
        kept_names = (*(self._model._keys_to_ignore_on_save or ()), *frozen_parts(self._model))
        self._released_memory.release(
            parameter for name, parameter in self._model.named_parameters() if not is_within(name, kept_names)
        )
        self._released_memory.release(self._batcher.cache.pools)
        torch.cuda.empty_cache()
        trim_heap()

    async def _make_change(self, change: Callable[[], None]) -> None:
        """Make a change between two steps. Raises WeightsError if the change raised this error and so changed
        nothing; any other error breaks the engine."""
        change_made: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def run_change() -> None:
            if change_made.done():  # the caller did not wait
                return

            try:
                change()
            except WeightsError as error:
                change_made.set_exception(error)
            except Exception as error:
                self._break(_breaking_error(error))
                change_made.set_exception(_breaking_error(error))
            else:
                change_made.set_result(None)

        self._between_steps(run_change)
        await change_made

    # -- steps -----------------------------------------------------------------------------------------

    async def _serve_turns(self) -> None:
        """Run the decode loop, which outlives every request and ends with the first error."""
        while self._break_error is None:
            if self._turn_futures and not self.asleep:
                try:
                    await self._run_steps()
                except Exception as error:
                    self._break(_breaking_error(error))
            else:
                self._wake_event.clear()
                await self._wake_event.wait()

    async def _run_steps(self) -> None:
        """Sample more ids for every running turn until the event loop is needed: to answer turns that end, to
        call stop checks, and to make changes."""
        self._is_stepping = True
        try:
            ended_runs = await asyncio.get_running_loop().run_in_executor(
                self._step_thread, self._step_until_needed
            )
            stop_reasons: dict[RunningRequest, StopReason | None] = dict.fromkeys(ended_runs)
            stop_reasons |= {
                run: StopReason.TEXT for run in self._turn_futures if self._batcher.ends_by_check(run)
            }
            for run, stop in stop_reasons.items():
                self._answer_turn(run, stop)
        finally:
            self._is_stepping = False
            changes = self._pending_changes
            self._pending_changes = []

            for change in changes:
                try:
                    change()
                except Exception as error:  # later changes are still made: their callers wait
                    self._break(_breaking_error(error))

    def _step_until_needed(self) -> list[RunningRequest]:
        """Compute steps until the event loop is needed: each return to the loop costs as much as several
        sequences of a step. Returns the turns that ended."""
        any_stop_check = any(run.request.stop_check for run in self._turn_futures)
        while True:
            ended_runs = self._batcher.step()
            if ended_runs or any_stop_check or self._pending_changes or self._break_error:
                return ended_runs

    def _answer_turn(self, run: RunningRequest, stop: StopReason | None = None) -> None:
        """Answer a request, with an error if the log-probs are not finite."""
        answer: Generation | EngineError
        try:
            answer = self._batcher.end_run(run, stop)
        except EngineError as error:
            answer = error

        _set_answer(self._turn_futures.pop(run), answer)

    def _break(self, error: EngineError) -> None:
        """Fail all pending and future requests."""
        self._break_error = self._break_error or error
        self._awake_event.set()
        futures = self._turn_futures.values()
        self._turn_futures = {}
        for future in futures:
            _set_answer(future, error)


def _set_answer(future: asyncio.Future[Generation], answer: Generation | EngineError) -> None:
    if future.done():  # the caller did not wait
        return
    if isinstance(answer, EngineError):
        future.set_exception(answer)
    else:
        future.set_result(answer)


def _breaking_error(error: Exception) -> EngineError:
    return EngineError(f"the engine failed: {one_line(error)}")


def replace_weights(
    model: PreTrainedModel,
    tensors: Mapping[str, torch.Tensor],
    published_pieces: Sequence[FilePiece] | None = None,
) -> None:
    """Copy published tensors into the model, in place and cast to the model's types. Tied weights may be
    published under one or several of the tied names. `published_pieces`: the tensors of a version, by default
    as `save_pretrained` names them; those of frozen parts are not published. Raises WeightsError, changing
    nothing, if names or shapes differ."""
    model_state = model.state_dict()
    if published_pieces is None:
        published_pieces = file_pieces(model, model_state)
    model_tensors = model_state | {
        piece.name: piece.view_in(model_state[piece.parameter]) for piece in published_pieces
    }
    unknown = sorted(tensors.keys() - model_tensors.keys())
    given_pointers = {model_tensors[name].data_ptr() for name in tensors.keys() & model_tensors.keys()}

    unpublished_parts = (*(model._keys_to_ignore_on_save or ()), *frozen_parts(model))
    missing = sorted(
        piece.name
        for piece in published_pieces
        if model_tensors[piece.name].data_ptr() not in given_pointers
        and not is_within(piece.parameter, unpublished_parts)
    )
    if unknown or missing:
        raise WeightsError(
            f"weights do not match this model: unknown tensors {unknown[:3]}, missing tensors {missing[:3]}"
        )

    copy_tensors(model_tensors, tensors)


def copy_tensors(targets: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy tensors into the targets of the same names. Raises WeightsError, changing nothing, if shapes
    differ."""
    for name, tensor in tensors.items():
        if tensor.shape != targets[name].shape:
            shapes = f"{tuple(tensor.shape)} instead of {tuple(targets[name].shape)}"
            raise WeightsError(f"weights do not match this model: {name} has shape {shapes}")
    with torch.no_grad():
        for name, tensor in tensors.items():
            targets[name].copy_(tensor)


@engines.register("torch")
def build(
    model_path: str,
    dtype: str,
    slots: int,
    max_len: int,
    max_batch_tokens: int = PREFILL_TOKENS,
    version: int = 0,
    device: str = "cpu",
) -> TorchEngine:
    """Build an engine with the weights in `model_path` as version `version`. Raises ConfigError for a model
    that the engine cannot serve."""
    check_served(model_path)
    options = {"label": f"model.path {model_path}", "dtype": getattr(torch, dtype)}
    base = partial(load_pretrained, "language model", model_path, **options)
    model: Any = base()

    return TorchEngine(
        model.to(device),
        base,
        slots,
        max_len,
        max_batch_tokens,
        version,
        stored_tensors(model_path),
        ImageReader.of_model(model_path),
    )
