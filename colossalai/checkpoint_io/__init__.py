"""Checkpoints: one reader and writer for every plugin."""

from colossalai.utils.pending import pending_names

from .checkpoint_io_base import CheckpointIO
from .general_checkpoint_io import GeneralCheckpointIO
from .index_file import CheckpointIndexFile

__getattr__ = pending_names(__name__)

__all__ = ["CheckpointIO", "CheckpointIndexFile", "GeneralCheckpointIO"]
