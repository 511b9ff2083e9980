"""Data sets: prompts to train on, and demonstrations to imitate."""

from asyncrl.data.order import EpochOrder
from asyncrl.data.prepare import Room, check_same_data, prepare, samples_path
from asyncrl.data.samples import RowLayout, load_samples
from asyncrl.data.storage import Samples

__all__ = [
    "EpochOrder",
    "Room",
    "RowLayout",
    "Samples",
    "check_same_data",
    "load_samples",
    "prepare",
    "samples_path",
]
