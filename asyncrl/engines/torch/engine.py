"""The embedded engine: the trainer's own Hugging Face module, served from the caller's event loop.

One task steps the batcher in a thread: a step of a large model takes seconds, and tools, rewards and
heartbeats of the loop go on meanwhile. The thread computes steps until a turn ends or the loop has a change
to make: requests, aborts and weight swaps are done in the loop and in order, while no step runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel

from asyncrl.engines.base import NOTHING, Request, check_request, engines
from asyncrl.engines.torch.batch import Batcher, Run
from asyncrl.engines.torch.check import check_served
from asyncrl.errors import EngineError, one_line
from asyncrl.types import Generation, StopReason, TokenScores
from asyncrl.weights import disk
from asyncrl.weights.adapters import Adapters
from asyncrl.weights.checkpoint_match import load_pretrained
from asyncrl.weights.manifest import AdapterSpec, Manifest, WeightsError, WeightsRef
from asyncrl.weights.memory import Released, trim_heap
from asyncrl.weights.names import pieces

T = TypeVar("T")

PREFILL_TOKENS = 1024  # of prompts, at most, between two decode steps; on a CPU more is not faster

WIDENED = 512  # tokens whose logits are held in float32 at once


class TorchEngine:
    """An `Engine` in this process. The model's attention function is replaced, by one that still serves plain
    calls. `base` reads the model again, to wake for adapters alone."""

    def __init__(
        self,
        model: PreTrainedModel,
        base: Callable[[], PreTrainedModel],
        slots: int,
        max_len: int,
        max_batch_tokens: int,
        version: int = 0,
    ) -> None:
        self._model = model.eval()
        self._base = base
        self._vocabulary = _vocabulary(model)
        self._batcher = Batcher(model, slots, max_len, max_batch_tokens, version)
        self._futures: dict[Run, asyncio.Future[Generation]] = {}
        self._changes: list[Callable[[], None]] = []  # to be made after the step under way
        self._stepping = False
        self._thread = ThreadPoolExecutor(1, "torch-engine")
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._loading = asyncio.Lock()
        self._broken: EngineError | None = None
        self._adapters: Adapters | None = None  # from the first version of some on
        self._released = Released()
        self._awake = asyncio.Event()  # or broken
        self._awake.set()

    @property
    def version(self) -> int:
        return self._batcher.version

    @property
    def tokens(self) -> int:
        return self._batcher.generated

    @property
    def asleep(self) -> bool:
        return self._batcher.asleep

    async def generate(self, request: Request) -> Generation:
        if self._broken is not None:
            raise self._broken
        check_request(request, self._vocabulary, self._batcher.cache.max_len)
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._between_steps(lambda: self._enter(request, future))
        if self._task is None or self._task.done():
            self._wake = asyncio.Event()
            self._task = asyncio.create_task(self._serve(), name="torch-engine")
        self._wake.set()
        try:
            while not (await asyncio.wait([future], timeout=request.part_seconds))[0]:
                await request.on_part(await self._so_far(future))
            return await future
        finally:
            future.cancel()  # no effect once it is done
            if future.cancelled():
                self._between_steps(lambda: self._leave(future))

    async def _so_far(self, turn: asyncio.Future[Generation]) -> Generation:
        """Return what a turn has sampled; NOTHING if it ends meanwhile, or the engine breaks."""
        found: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()

        def read() -> None:
            run = next((run for run, other in self._futures.items() if other is turn), None)
            if not found.done():  # else its caller did not wait
                found.set_result(NOTHING if run is None else self._batcher.so_far(run))

        self._between_steps(read)
        await asyncio.wait([found, turn], return_when=asyncio.FIRST_COMPLETED)
        return found.result() if found.done() else NOTHING

    def release(self, session: str) -> None:
        self._between_steps(lambda: self._release(session))

    async def load(self, ref: WeightsRef) -> Manifest:
        async with self._loading:  # versions are applied in the order of the calls
            if self._broken is not None:
                raise self._broken
            manifest, tensors = await asyncio.to_thread(disk.read, ref)
            replace = partial(self._replace, manifest.adapters, tensors)
            if self.asleep:
                base = await asyncio.to_thread(self._base) if manifest.adapters else None
                replace = partial(self._waken, base, replace)
            await self._changed(lambda: self._swap(replace, ref.version.step))
        return manifest

    async def sleep(self) -> None:
        async with self._loading:
            if self._broken is not None:  # it may have broken while it fell asleep, and hold memory
                raise self._broken
            if not self.asleep:
                await self._changed(self._fall_asleep)

    async def score(self, ids: tuple[int, ...]) -> tuple[float, ...]:
        scores = await self._apart(partial(self._score, ids, len(ids) - 1))
        return tuple(np.frombuffer(scores.logprobs, "<f4").tolist())

    async def read(self, ids: tuple[int, ...], count: int, top: int) -> TokenScores:
        with EngineError.instead_of(RuntimeError, text="the engine cannot score"):
            return await self._apart(partial(self._score, ids, count, top, base=True))

    async def _apart(self, compute: Callable[[], T]) -> T:
        """Compute in the thread, after the step under way or the sleep, all of it under the same weights."""
        while True:
            await self._awake.wait()
            async with self._loading:
                if self._broken is not None:
                    raise self._broken
                if not self.asleep:
                    self._between_steps(lambda: None)
                    return await asyncio.get_running_loop().run_in_executor(self._thread, compute)

    @torch.inference_mode()
    def _score(self, ids: tuple[int, ...], count: int, top: int = 0, base: bool = False) -> TokenScores:
        """Score the last `count` ids with each adapter, or without any."""
        rows = len(self._adapters.agents) if self._adapters and not base else 1
        tokens = torch.tensor([ids] * rows, device=self._model.device)
        if self._adapters is not None:
            self._adapters.use(torch.arange(rows, device=tokens.device)[:, None].expand_as(tokens))
        with self._adapters.disabled() if self._adapters and base else nullcontext():
            output = self._model(tokens, use_cache=False, logits_to_keep=count + 1)
        logits = output.logits[:, :-1].flatten(0, 1)
        labels = tokens[:, len(ids) - count :].reshape(-1, 1)
        found = []
        for part, own in zip(logits.split(WIDENED), labels.split(WIDENED), strict=True):
            table = part.float().log_softmax(-1)
            found.append((table.gather(1, own), *table.topk(top)))
        logs, highest, likeliest = (torch.cat(column).cpu().numpy() for column in zip(*found, strict=True))
        kinds = (logs, "<f4"), (likeliest, "<i4"), (highest, "<f4")
        return TokenScores(*(values.astype(kind).tobytes() for values, kind in kinds))

    async def close(self) -> None:
        self._break(EngineError("the engine was closed"))
        self._wake.set()
        if self._task is not None:
            await self._task  # ends with the step under way
        self._thread.shutdown(cancel_futures=True)

    # -- between two steps -----------------------------------------------------------------------------

    def _between_steps(self, change: Callable[[], None]) -> None:
        """Make a change now, or, in order, after the step under way."""
        if self._stepping:
            self._changes.append(change)
        else:
            change()

    def _enter(self, request: Request, future: asyncio.Future[Generation]) -> None:
        if future.done():  # its caller did not wait
            return
        if self._broken is not None:
            future.set_exception(self._broken)
        elif request.session in self._batcher.runs:
            problem = f"session {request.session!r}: its previous turn is still running"
            future.set_exception(EngineError(problem))
        else:
            self._futures[self._batcher.add(request)] = future

    def _leave(self, future: asyncio.Future[Generation]) -> None:
        for run in [run for run, other in self._futures.items() if other is future]:
            self._end(run, StopReason.ABORT)

    def _release(self, session: str) -> None:
        run = self._batcher.runs.get(session)
        if run in self._futures:
            self._end(run, StopReason.ABORT)
        self._batcher.slots.release(session)

    def _replace(self, specs: Mapping[str, AdapterSpec], tensors: Mapping[str, torch.Tensor]) -> None:
        """Raises WeightsError, changing nothing."""
        if not specs:
            replace_weights(self._model, tensors)
            return
        if self._adapters is None:
            sizes = {agent: (spec.rank, spec.alpha) for agent, spec in specs.items()}
            self._adapters = Adapters(self._model, sizes)
            for piece in self._adapters.published:  # in case the version is refused
                torch.nn.init.zeros_(self._model.get_parameter(piece.parameter))
            self._batcher.adapt(self._adapters)
        if self._adapters.specs != specs:
            raise WeightsError(f"adapters are of {specs}, and not of {self._adapters.specs}")
        parameters = {
            piece.name: self._model.get_parameter(piece.parameter) for piece in self._adapters.published
        }
        if parameters.keys() != tensors.keys():
            raise WeightsError("the version's tensors are not those of its adapters")
        copy_all(parameters, tensors)

    def _swap(self, replace: Callable[[], None], version: int) -> None:
        replace()
        self._batcher.mark(version)
        self._wake.set()

    def _waken(self, base: PreTrainedModel | None, replace: Callable[[], None]) -> None:
        """Raises what `replace` does, or WeightsError where a GPU has too little memory, and sleeps on."""
        try:
            self._released.allocate()
            if base is not None:
                copy_all(dict(self._model.named_parameters()), dict(base.named_parameters()))
            replace()
        except Exception as error:
            self._free()
            if isinstance(error, torch.OutOfMemoryError):  # there may be enough when it is tried again
                raise WeightsError(one_line(error)) from error
            raise
        self._batcher.wake()
        self._awake.set()

    def _fall_asleep(self) -> None:
        self._awake.clear()
        self._batcher.sleep()
        self._free()

    def _free(self) -> None:
        """Give up all that every version brings, and the KV."""
        kept = self._model._keys_to_ignore_on_save or ()
        named = self._model.named_parameters()
        self._released.release(parameter for name, parameter in named if name not in kept)
        self._released.release(self._batcher.cache.pools)
        torch.cuda.empty_cache()
        trim_heap()

    async def _changed(self, change: Callable[[], None]) -> None:
        """Make a change between two steps. Raises its WeightsError, which says that nothing was changed; any
        other error breaks the engine."""
        made: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._between_steps(lambda: self._change(change, made))
        await made

    def _change(self, change: Callable[[], None], made: asyncio.Future[None]) -> None:
        if made.done():  # its caller did not wait
            return
        try:
            change()
        except WeightsError as error:
            made.set_exception(error)
        except Exception as error:
            self._break(_broke(error))
            made.set_exception(_broke(error))
        else:
            made.set_result(None)

    # -- steps -----------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        """The decode loop. It outlives every request and dies with the first error."""
        while self._broken is None:
            if self._futures and not self.asleep:
                try:
                    await self._steps()
                except Exception as error:
                    self._break(_broke(error))
            else:
                self._wake.clear()
                await self._wake.wait()

    async def _steps(self) -> None:
        """More ids for every running turn, until there is something to do here: answer the turns that end
        with them, tell watches, make changes."""
        self._stepping = True
        try:
            ended = await asyncio.get_running_loop().run_in_executor(self._thread, self._in_thread)
            done: dict[Run, StopReason | None] = dict.fromkeys(ended)
            done |= {run: StopReason.TEXT for run in self._futures if self._batcher.watched(run)}
            for run, stop in done.items():
                self._end(run, stop)
        finally:
            self._stepping = False
            changes = self._changes
            self._changes = []
            for change in changes:
                try:
                    change()
                except Exception as error:  # those after it are made: their callers wait for them
                    self._break(_broke(error))

    def _in_thread(self) -> list[Run]:
        """Compute steps until one needs the loop: each return to it costs as much as several rows of a step.
        Returns the turns that ended."""
        watched = any(run.request.watch for run in self._futures)
        while True:
            ended = self._batcher.step()
            if ended or watched or self._changes or self._broken:
                return ended

    def _end(self, run: Run, stop: StopReason | None = None) -> None:
        """Answer a request; its log-probs may make that an error."""
        try:
            generation = self._batcher.end(run, stop)
        except EngineError as error:
            future = self._futures.pop(run)
            if not future.done():
                future.set_exception(error)
        else:
            future = self._futures.pop(run)
            if not future.done():
                future.set_result(generation)

    def _break(self, error: EngineError) -> None:
        """Fail what is pending and everything to come."""
        self._broken = self._broken or error
        self._awake.set()
        futures = self._futures
        self._futures = {}
        for future in futures.values():
            if not future.done():
                future.set_exception(error)


def _broke(error: Exception) -> EngineError:
    return EngineError(f"the engine broke: {one_line(error)}")


def _vocabulary(model: PreTrainedModel) -> int:
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    return weight.shape[0]


def replace_weights(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy published tensors into the model, in place and cast to its types. Tied weights may be published
    under any of their names, or several. Raises WeightsError, changing nothing, if names or shapes differ."""
    state = model.state_dict()
    own = {piece.name: piece.within(state[piece.parameter]) for piece in pieces(model, state)}
    unknown = sorted(tensors.keys() - own.keys())
    given = {own[name].data_ptr() for name in tensors.keys() & own.keys()}
    unsaved = model._keys_to_ignore_on_save or ()
    missing = sorted(n for n, tensor in own.items() if tensor.data_ptr() not in given and n not in unsaved)
    if unknown or missing:
        raise WeightsError(f"weights are not this model's: unknown {unknown[:3]}, missing {missing[:3]}")
    copy_all(own, tensors)


def copy_all(own: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy tensors into those of the same names. Raises WeightsError, changing nothing, if shapes differ."""
    for name, tensor in tensors.items():
        if tensor.shape != own[name].shape:
            shapes = f"{tuple(tensor.shape)} instead of {tuple(own[name].shape)}"
            raise WeightsError(f"weights are not this model's: {name} has shape {shapes}")
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)


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
    """An engine with the weights in `model_path`, as version `version`. ConfigError if it cannot serve it."""
    check_served(model_path)
    options = {"label": f"model.path {model_path}", "dtype": getattr(torch, dtype)}
    base = partial(load_pretrained, "AutoModelForCausalLM", model_path, **options)
    model: Any = base()
    return TorchEngine(model.to(device), base, slots, max_len, max_batch_tokens, version)
