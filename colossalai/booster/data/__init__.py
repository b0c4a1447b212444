"""Data for the ranks: who gets which sample, in which order, and where a run stands in it."""

from .loader import StatefulDataLoader
from .prepare import prepare_dataloader
from .sampler import StatefulDistributedSampler
from .stream import SplitStream

__all__ = ["SplitStream", "StatefulDataLoader", "StatefulDistributedSampler", "prepare_dataloader"]
