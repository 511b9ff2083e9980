"""The experts that a server chose for its tokens, chosen again in the trainer (R3, arXiv 2510.11370).

A router takes the k largest of its scores; where two are nearly equal, the rounding of another kernel decides
otherwise, and the token's log-prob jumps. Given the server's choice, the scores of those experts are still
the trainer's own, with gradient.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from asyncrl.errors import ConfigError

ROUTER = re.compile(r"\.layers\.(\d+)\..*")  # of the module's name
UNKNOWN = -1  # in place of an expert: the trainer chooses


class ForcedRoutes:
    """The routers of a model, while it is on the meta device. Raises ConfigError for a model whose routers do
    not choose by one top-k, as those of Qwen3-MoE and Mixtral do."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._given: Tensor | None = None
        config = model.config.get_text_config()
        self._shape = (config.num_hidden_layers, getattr(config, "num_experts_per_tok", 0))
        routers = [
            (int(found[1]), module)
            for name, module in model.named_modules()
            if type(module).__name__.lower().endswith("topkrouter") and (found := ROUTER.search(name))
        ]
        if not routers or not all(_plain(router, self._shape[1]) for _, router in routers):
            raise ConfigError(
                f"trainer.router_replay: {type(model).__name__} does not select experts with a single top-k, "
                "so routes cannot be replayed; set trainer.router_replay=false"
            )
        for layer, router in routers:
            router.forward = self._wrapped(router.forward, layer, len(router.weight))

    @property
    def choices(self) -> int:
        """Return the number of experts for a token, in all layers."""
        layers, k = self._shape
        return layers * k

    def give(self, routes: Tensor | None) -> None:
        """[T, choices] for the tokens of the forwards from now on, recomputed ones included; or nothing."""
        self._given = None if routes is None else routes.unflatten(-1, self._shape)

    def _wrapped(self, run: Callable[..., Any], layer: int, experts: int) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._given is None:
                return run(*args, **kwargs)
            chosen = self._given[:, layer].long()
            with _Chosen(chosen.masked_fill(chosen >= experts, UNKNOWN)):  # of a server of another model
                return run(*args, **kwargs)

        return forward


class _Chosen(TorchFunctionMode):
    """Inside, top-k gives these experts, [T, k], with their own values. `calls` counts."""

    def __init__(self, given: Tensor | None = None) -> None:
        super().__init__()
        self.calls = list[Any]()
        self._given = given

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return found
        self.calls.append(found[1].shape[-1])
        if self._given is None:
            return found
        if found[1].shape != self._given.shape:
            raise ConfigError(
                f"trainer.router_replay: a router's selection has the shape {tuple(found[1].shape)}, "
                f"the recorded one {tuple(self._given.shape)}; set trainer.router_replay=false"
            )
        chosen = torch.where(self._given == UNKNOWN, found[1], self._given)
        return args[0].gather(-1, chosen), chosen


def _plain(router: nn.Module, k: int) -> bool:
    """True if the router takes the k largest, once."""
    weight = router.weight
    assert isinstance(weight, Tensor)
    with _Chosen() as mode:
        router(weight.new_empty(1, weight.shape[-1]))
    return mode.calls == [k]
