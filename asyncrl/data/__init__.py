"""Data sets of prompts."""

from asyncrl.data.parquet import load_samples

__all__ = ["load_samples"]
