"""Fully asynchronous off-policy reinforcement learning for language-model agents."""

__version__ = "0.1.0"
