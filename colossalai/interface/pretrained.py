"""Where the weights of a lazily built model lie: the mark that ``from_pretrained`` leaves and ``boost`` reads."""

from torch import nn

_MARK = "_pretrained"


def get_pretrained_path(model: nn.Module) -> str | None:
    """Checkpoint that ``model`` is still to be loaded from, or None."""
    return getattr(model, _MARK, None)


def set_pretrained_path(model: nn.Module, path: str | None) -> None:
    """Note, or with None clear, the checkpoint that ``model`` is still to be loaded from."""
    setattr(model, _MARK, path)
