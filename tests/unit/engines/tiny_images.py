"""Tiny vision-language models, rows of text and images, and what a full forward of transformers says."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from transformers import PreTrainedModel

from asyncrl.engines.base import Request
from asyncrl.engines.torch.engine import TorchEngine
from asyncrl.engines.torch.images import ImageReader
from asyncrl.types import Generation
from asyncrl.vision.image_ids import FIRST_IMAGE_ID, find_runs, image_ids, with_placeholders
from asyncrl.vision.layout import ImageLayout, read_image_layout
from asyncrl.vision.pixels import PixelReader, Pixels
from tests.fakes.image_data import noise_image
from tests.fakes.tiny_families import EARLIER_VISION_FAMILIES, FAMILIES, random_model

from .tiny import ROUNDING, ask

Ids = tuple[int, ...]
VISION_FAMILIES = FAMILIES | EARLIER_VISION_FAMILIES


@dataclass
class TinyVision:
    """A random vision-language model, which computes as transformers does, and pictures for it."""

    directory: Path
    model: PreTrainedModel
    layout: ImageLayout = field(init=False)
    files: dict[str, bytes] = field(default_factory=dict)  # of all pictures so far

    def __post_init__(self) -> None:
        self.layout = read_image_layout(str(self.directory))
        self._reader = PixelReader(str(self.directory))

    def serve(
        self, slots: int = 4, max_len: int = 192, budget: int = 256, stepwise: bool = False
    ) -> TorchEngine:
        engine = TorchEngine(
            copy.deepcopy(self.model),
            lambda: copy.deepcopy(self.model),
            slots,
            max_len,
            budget,
            image_reader=ImageReader.of_model(str(self.directory)),
        )
        if stepwise:
            engine._step_until_needed = engine._batcher.step  # type: ignore[method-assign]
        return engine

    def picture(self, rows: int, columns: int, seed: int = 0) -> Ids:
        """The ids of a picture of so many merged patches, in noise."""
        stored = noise_image(self.layout, rows, columns, seed)
        self.files[stored.ref.digest] = stored.file
        return image_ids(stored.ref.digest, self.layout.run_length(stored.ref.height, stored.ref.width))

    def ask(self, ids: Ids, new: int = 6, session: str = "s", key: int = 0, **knobs: object) -> Request:
        return msgspec.structs.replace(ask(ids, new, session, key, **knobs), images=self.files)

    def changed(self, seed: int) -> TinyVision:
        """The same tower before another text part."""
        model = copy.deepcopy(self.model)
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "visual" not in name and parameter.dim() > 1:
                    parameter.mul_(1 + 0.5 * torch.rand(parameter.shape, generator=draw))
        return replace(self, model=model)

    def arguments(self, ids: Ids) -> dict[str, Any]:
        """The arguments of a forward, as transformers' own processors make them."""
        row = np.array(ids)
        pixels = [self._reader.read(self.files[run.digest]) for run in find_runs(row)]
        arguments = {
            "input_ids": torch.from_numpy(with_placeholders(row, self.layout.placeholder))[None],
            "mm_token_type_ids": torch.from_numpy((row >= FIRST_IMAGE_ID).astype(np.int64))[None],
        }
        if pixels:
            joined = Pixels.concatenate(pixels)
            arguments |= {"pixel_values": joined.pixel_values, "image_grid_thw": joined.grids}
        return arguments

    @torch.no_grad()
    def assert_logprobs(self, request: Request, generation: Generation) -> None:
        """The recorded log-probs are those of one full forward."""
        assert generation.ids
        ids = request.ids + generation.ids[:-1]  # the last may be a placeholder
        logits = self.model(**self.arguments(ids), use_cache=False).logits[0, len(request.ids) - 1 :]
        logprobs = (logits / request.sampling.temperature).log_softmax(-1)
        expected = logprobs.gather(1, torch.tensor(generation.ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(generation.logprobs), expected, **ROUNDING)


@cache
def _model(family: str) -> PreTrainedModel:
    return random_model(VISION_FAMILIES[family], VISION_FAMILIES[family].configuration(), seed=0).eval()


def tiny_vision(family: str, directory: Path, **processor: object) -> TinyVision:
    """Write the configuration of a family's model and processor. `processor`: settings that differ."""
    model = _model(family)
    model.config.save_pretrained(directory)
    settings: Mapping[str, object] = (VISION_FAMILIES[family].preprocessor or {}) | processor
    (directory / "preprocessor_config.json").write_text(json.dumps(settings))
    return TinyVision(directory, copy.deepcopy(model))


class Encoded:
    """Counts the images that pass through the vision tower of an engine's model."""

    def __init__(self, engine: TorchEngine) -> None:
        self.images = 0
        tower = engine._model.model.visual
        assert isinstance(tower, torch.nn.Module)
        tower.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, _module: object, _args: object, kwargs: dict[str, torch.Tensor]) -> None:
        self.images += len(kwargs["grid_thw"])
