"""The registries with all built-in components: import them from here, so that every name is registered."""

from asyncrl.algorithms import batch_losses, sequence_losses, token_losses
from asyncrl.algorithms.losses import losses

__all__ = ["batch_losses", "losses", "sequence_losses", "token_losses"]
