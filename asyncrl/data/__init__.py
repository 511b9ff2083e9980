"""Data sets: prompts to train on, and demonstrations to imitate."""

from asyncrl.data.samples import check_same_data, load_demonstrations, load_samples

__all__ = ["check_same_data", "load_demonstrations", "load_samples"]
