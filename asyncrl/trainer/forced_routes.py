"""The experts that a server chose for its tokens, chosen again in the trainer (R3, arXiv 2510.11370).

A router takes the k largest of its scores; where two are nearly equal, the rounding of another kernel decides
otherwise, and the token's log-prob jumps. Given the server's choice, the scores of those experts are still
the trainer's own, with gradient.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from asyncrl.errors import ConfigError

ROUTER_NAME = re.compile(r"\.layers\.(\d+)\..*")  # matches a router's module name
UNKNOWN_EXPERT = -1  # instead of an expert's index: the trainer chooses
NO_ROUTES = np.empty((0, 0), dtype=np.int32)  # of a sequence


class ForcedRoutes:
    """Wraps the routers of a model, while the model is on the meta device. Raises ConfigError for a model
    whose routers do not choose by a single top-k, as in Qwen3-MoE and Mixtral."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._routes: Tensor | None = None
        config = model.config.get_text_config()
        self._layers_and_choices = (config.num_hidden_layers, getattr(config, "num_experts_per_tok", 0))
        routers = [
            (int(match[1]), module)
            for name, module in model.named_modules()
            if type(module).__name__.lower().endswith("topkrouter") and (match := ROUTER_NAME.search(name))
        ]

        if not routers or not all(
            _takes_one_top_k(router, self._layers_and_choices[1]) for _, router in routers
        ):
            raise ConfigError(
                f"trainer.router_replay: {type(model).__name__} does not select experts with a single top-k, "
                "so routes cannot be replayed; set trainer.router_replay=false"
            )

        for layer, router in routers:
            router.forward = self._wrap_router(router.forward, layer, len(router.weight))

    @property
    def choices_per_token(self) -> int:
        """Return the number of experts for a token, in all layers."""
        return math.prod(self._layers_and_choices)

    def use_routes(self, routes: Tensor | None) -> None:
        """Use these routes [T, choices] in all following forwards, including recomputed ones; None: the
        routers choose."""
        self._routes = None if routes is None else routes.unflatten(-1, self._layers_and_choices)

    def _wrap_router(
        self, router_forward: Callable[..., Any], layer: int, experts: int
    ) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._routes is None:
                return router_forward(*args, **kwargs)
            chosen = self._routes[:, layer].long()
            # Servers of another model may report experts that this model lacks.
            with _ForcedTopK(chosen.masked_fill(chosen >= experts, UNKNOWN_EXPERT)):
                return router_forward(*args, **kwargs)

        return forward


class _ForcedTopK(TorchFunctionMode):
    """Makes top-k return these experts, [T, k], with their own scores. `selection_sizes`: k of each call."""

    def __init__(self, experts: Tensor | None = None) -> None:
        super().__init__()
        self.selection_sizes = list[Any]()
        self._experts = experts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        selection = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return selection
        self.selection_sizes.append(selection[1].shape[-1])
        if self._experts is None:
            return selection

        if selection[1].shape != self._experts.shape:
            raise ConfigError(
                f"trainer.router_replay: a router's selection has shape {tuple(selection[1].shape)}, "
                f"but the recorded selection has shape {tuple(self._experts.shape)}; set "
                "trainer.router_replay=false"
            )

        chosen_experts = torch.where(self._experts == UNKNOWN_EXPERT, selection[1], self._experts)
        return args[0].gather(-1, chosen_experts), chosen_experts


def _takes_one_top_k(router: nn.Module, k: int) -> bool:
    """True if the router takes the k largest scores, once."""
    weight = router.weight
    assert isinstance(weight, Tensor)
    with _ForcedTopK() as mode:
        router(weight.new_empty(1, weight.shape[-1]))
    return mode.selection_sizes == [k]
