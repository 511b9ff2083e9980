"""Prompts with images for SGLang servers: one placeholder and one file for each image.

    ids of asyncrl   293  [image ids: 6, digest f4a288b1…]  223
    input_ids        293  568                               223     image_data: the stored file

The server's own processor puts in as many placeholders as the image has patches. It must leave the size of a
stored image alone, or its prompt would be longer or shorter than the row that the trainer reads: clients
compare the number of tokens that the server reports.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from asyncrl.engines.base import EngineRefused
from asyncrl.errors import ConfigError
from asyncrl.vision.image_ids import collapse_runs, find_whole_runs
from asyncrl.vision.layout import ImageLayout, difference_of_servers, layout_or_refusal, read_image_layout


class PromptWriter:
    """Writes prompts for servers of one model. `layout`: how the model reads images; None if it reads none,
    for the reason in `refusal`."""

    def __init__(self, layout: ImageLayout | None, refusal: str = "the model reads text only") -> None:
        self.layout = layout
        self._refusal = refusal

    @classmethod
    def of_model(cls, model_directory: str) -> PromptWriter:
        """Return the writer for the model in a directory, which may be a model of text alone, or of a family
        whose images servers do not read as asyncrl does."""
        layout, refusal = layout_or_refusal(partial(read_served_layout, model_directory))
        return cls(layout, refusal)

    def write_prompt(self, ids: tuple[int, ...], files: Mapping[str, bytes]) -> dict[str, Any]:
        """Return the fields of a request for the prompt `ids`. `files`: the stored file of each image, by
        digest. JSON has the files in base64. EngineRefused says what is wrong with the prompt."""
        with EngineRefused.instead_of(ValueError, text="the prompt has invalid ids"):
            runs = find_whole_runs(ids)
        if not runs:
            return {"input_ids": ids}

        if self.layout is None:
            raise EngineRefused(f"the prompt has images: {self._refusal}")
        if complaint := self.layout.placeholder_complaint(ids):
            raise EngineRefused(complaint)
        # A server looks for images behind other tokens; its request handler fails where there is none.
        image_ends = {0, *(run.end for run in runs)}
        if any(run.start in image_ends for run in runs):
            raise EngineRefused(
                "the prompt has an image right at the beginning or right after another image, where servers "
                "do not find it; use a chat template that writes a token before each image"
            )
        missing_digests = [run.digest for run in runs if run.digest not in files]
        if missing_digests:
            raise EngineRefused(f"the request does not bring the file of image {missing_digests[0]}")

        return {
            "input_ids": collapse_runs(ids, self.layout.placeholder),
            "image_data": [files[run.digest] for run in runs],
        }


def read_served_layout(model_directory: str) -> ImageLayout:
    """Return how SGLang servers of the model in a directory read images. ConfigError as `read_image_layout`,
    and for a model whose images servers read differently from the trainer."""
    layout = read_image_layout(model_directory)
    if difference := difference_of_servers(model_directory, layout):
        raise ConfigError(f"{model_directory}: {difference}; use another model")
    return layout


TEXT_ONLY = PromptWriter(layout=None)
