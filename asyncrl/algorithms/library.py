"""The registries with all built-in components: import them from here, so that every name is registered."""

from asyncrl.algorithms import batch_losses, sequence_losses, token_losses
from asyncrl.algorithms.losses import losses
from asyncrl.config import RunConfig

__all__ = ["batch_losses", "imitates", "losses", "sequence_losses", "token_losses"]


def imitates(config: RunConfig) -> bool:
    """The run learns from conversations of its data instead of sampled ones: its loss says so."""
    return losses.load(config.algorithm.loss, "algorithm.loss").demonstrations
