"""The registries with every built-in component in them: whoever imports one from here knows all names."""

from asyncrl.algorithms import batch_losses, sequence_losses, token_losses
from asyncrl.algorithms.losses import losses

__all__ = ["batch_losses", "losses", "sequence_losses", "token_losses"]
