"""Checks that gradients of rows that are laid out together, or cut at the output layer, are those of rows one
by one: a model is asked, usually a small copy of it (shrunk.py)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from asyncrl.config import Packing
from asyncrl.errors import one_line
from asyncrl.shrunk import AGREE, RESERVED, UNIMPORTANT, passes, versions
from asyncrl.trainer.attention import NAME
from asyncrl.trainer.scores import Scores, Selected
from asyncrl.trainer.world import World
from asyncrl.user_cache import keep_result, read_result

# Distance / norm of log-probs, and of gradients: of a small copy, whose recurrent layers round more, and of a
# loaded model by the type of its forward.
LIMITS = {
    "copy": {"log-probs": AGREE, "gradients": 1e-2},
    **{
        dtype: dict.fromkeys(("log-probs", "gradients"), limit)
        for dtype, limit in (("float64", 1e-5), ("float32", 1e-3), ("bfloat16", 0.1))
    },
}
WAYS: tuple[Packing, ...] = ("padded", "packed", "tree")


def transformer(root: nn.Module) -> PreTrainedModel:
    return next(module for module in root.modules() if isinstance(module, PreTrainedModel))


def examine(
    root: nn.Module, ways: Sequence[Packing] = WAYS, kind: str = "copy", world: World | None = None
) -> dict[str, str]:
    """Says what is wrong with each way to compute gradients, '' for nothing: `cut` at the output layer, and
    `ways` to lay out rows. `root`: a policy or a critic, with weights. `kind`: of LIMITS. `world`: of the
    ranks that share it. A collective. No gradients are left."""
    model = transformer(root)
    rng = np.random.default_rng(0)
    own = model.config._attn_implementation
    size = model.config.get_text_config().vocab_size
    start, *ends = (rng.integers(min(RESERVED, size - 1), size, n) for n in (24, 9, 14, 30))
    rows = [np.concatenate([start, ends[0]]), np.concatenate([start, ends[1]]), ends[2]]
    alone = [_all_tokens([row], "padded") for row in rows]
    cuts: list[Any] = [] if getattr(root, "whole", True) else ["cut"]
    found = dict.fromkeys(("cut", *WAYS), "")
    for way in (*cuts, *ways):
        laid = alone if way == "cut" else [_all_tokens(rows, way)]
        forest = laid[0].forest
        try:
            _set_whole(root, True)
            expected = _run(root, alone, world)
            sizes = _norms(root, expected, world)
            for gradient in _gradients(root):
                gradient.neg_()  # the next are added to it: no second set is held
            _set_whole(root, not cuts or bool(found["cut"]))
            if forest is not None:
                model.set_attn_implementation(NAME)
            distances = _norms(root, _run(root, laid, world) - expected, world)
            for what, limit in LIMITS[kind].items():
                if not (share := distances[what] / max(sizes[what], 1e-30)) < limit:
                    found[way] = (
                        f"has {what} that differ from those of rows one by one by {share:.1e} of their norm "
                        f"(limit {limit:.0e})"
                    )
                    break
            if forest is not None and forest.unknown:
                found[way] = f"has attention with {', '.join(sorted(forest.unknown))}"
        except Exception as error:
            if passes(error):
                raise
            found[way] = f"fails with {one_line(error)}"
        root.zero_grad()
        if forest is not None:
            model.set_attn_implementation(own)
    _set_whole(root, not cuts)
    return found


def examined(
    root: nn.Module, ways: Sequence[Packing], dtype: str, world: World, compiled: bool = False
) -> dict[str, str]:
    """Return what `examine` says of a loaded model. That all is well is kept in the user's cache, by what
    decides it: classes, configuration, names of trained tensors, `dtype` of a forward, kind of device, ranks
    that share a sequence, whether layers are `compiled`, and versions of the code. A collective."""
    key = ""
    kept = None
    if world.rank == 0:
        key = _cache_key(root, ways, dtype, world, compiled)
        kept = read_result(key, dict[str, str])
    kind: Any = dict[str, str] | None
    answer = world.gather(kept, kind)[0]
    if answer is None:
        answer = examine(root, ways, dtype, world)
        if world.rank == 0 and not any(answer.values()):  # a failure may be the machine's: it is asked again
            keep_result(key, answer)
    return answer


def _cache_key(root: nn.Module, ways: Sequence[Packing], dtype: str, world: World, compiled: bool) -> str:
    model = transformer(root)
    device = world.device
    settings = sorted((model.config.to_dict() | dict.fromkeys(UNIMPORTANT)).items())
    trained = sorted(name for name, parameter in root.named_parameters() if parameter.requires_grad)
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    sharing = world.sequence.count if world.sequence else 1
    classes = type(root).__name__, type(model).__name__
    parts = "examined", *classes, settings, trained, *ways, dtype, device_name, sharing, compiled, *versions()
    return repr(parts)


def _all_tokens(rows: Sequence[np.ndarray], packing: Packing) -> Selected:
    """Return all tokens but the first of each row."""
    row = np.repeat(np.arange(len(rows)), [len(one) - 1 for one in rows])
    position = np.concatenate([np.arange(1, len(one)) for one in rows])
    return Selected.of(rows, row, position, torch.ones(len(row)), packing)


def _set_whole(root: Any, whole: bool) -> None:
    """A critic has no output layer to be cut at."""
    if hasattr(root, "whole"):
        root.whole = whole


def _run(root: nn.Module, parts: Sequence[Selected], world: World | None) -> Tensor:
    """The values of all tokens, [N]; after a backward of their sum, in which each has a weight of its own, if
    the model learns."""
    counts = [len(part.labels) for part in parts]
    found = []
    learns = any(p.requires_grad for p in root.parameters())
    for part, weights in zip(parts, torch.linspace(0.5, 1.5, sum(counts)).split(counts), strict=True):
        with torch.set_grad_enabled(learns):
            scores = root(part if world is None else part.to(world.device))
            values = scores.logp if isinstance(scores, Scores) else scores
        if learns:
            (values * weights.to(values.device)).sum().backward()
        elif isinstance(root, FSDPModule):
            root.reshard()
        found.append(values.detach())
    if world is not None:
        world.average_gradients(root.parameters())
    return torch.cat(found)


def _gradients(root: nn.Module) -> list[Tensor]:
    """Return gradients of this rank's shards."""
    given = (p.grad for p in root.parameters() if p.grad is not None)
    return [grad.to_local() if isinstance(grad, DTensor) else grad for grad in given]


def _norms(root: nn.Module, values: Tensor, world: World | None) -> dict[str, float]:
    """Norms of `values`, which all ranks have, and of gradients, over all ranks."""

    def norm(tensors: Sequence[Tensor]) -> float:
        square = sum(float(t.double().square().sum()) for t in tensors)
        return math.sqrt(square if world is None else sum(world.gather(square, float)))

    return {"log-probs": norm([values]), "gradients": norm(_gradients(root))}
