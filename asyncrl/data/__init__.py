"""Reads data sets: prompts to train on, and demonstrations to imitate."""

from asyncrl.data.order import EpochOrder
from asyncrl.data.samples import RowLayout, load_samples
from asyncrl.data.storage import Samples, StoredImages, check_same_data, open_images, samples_path
