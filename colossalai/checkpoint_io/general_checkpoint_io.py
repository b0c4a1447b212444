"""Saving and loading without a plugin."""

from .checkpoint_io_base import CheckpointIO


class GeneralCheckpointIO(CheckpointIO):
    """For plain modules and optimizers: every process that calls saves and loads for itself."""

    def __init__(self) -> None:
        super().__init__(alone=True, boosted=False)
