"""Data sets of prompts."""

from asyncrl.data.parquet import check_same_data, load_samples

__all__ = ["check_same_data", "load_samples"]
