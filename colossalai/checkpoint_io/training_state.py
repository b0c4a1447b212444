"""What a resumed run needs beside model, optimizer and scheduler: random numbers, the place in the data, and counters.

Sources of the random states: ``torch`` (CPU), the current device's default generator, Python's ``random``, numpy's
global one.
"""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from colossalai import comm
from colossalai.accelerator import get_accelerator
from colossalai.utils.errors import CheckpointError, ConfigError

from .reading import read_torch
from .staging import SingleFile
from .team import Team
from .writing import plain, save_torch

FORMAT = 1


def random_state() -> dict[str, Any]:
    """This rank's random states, as tensors and plain values."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    accelerator = get_accelerator()
    state = {
        "torch": torch.get_rng_state(),
        "python": [version, list(words), gauss],
        "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)],
    }
    if accelerator.name != "cpu":
        state["device"] = accelerator.get_rng_state(accelerator.get_current_device()).cpu()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Go on with the random numbers of :func:`random_state`; a device that either side lacks is left alone."""
    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    accelerator = get_accelerator()
    if accelerator.name != "cpu" and "device" in state:
        accelerator.set_rng_state(state["device"], accelerator.get_current_device())


def save_training_state(team: Team, path: Path, dataloader: Any = None, extra: dict | None = None) -> None:
    """Write the random states of every rank, the data position and ``extra`` to one file. Collective.

    Args:
        dataloader: with ``state_dict()``; None for none.
        extra: plain values and tensors, the first rank's is kept: step and epoch counters and the like.
    """
    _check_loader(dataloader)
    mine = {"random": random_state(), "data": None if dataloader is None else plain(dataloader.state_dict())}
    everyone = [mine] if team.alone else comm.gather_object(mine, dst=0, group=team.group)
    with team.on_writer() as writes:
        if writes:
            content = {"format": FORMAT, "world_size": team.size, "ranks": everyone, "extra": plain(extra or {})}
            file = SingleFile(path)
            try:
                save_torch(content, file.path(path.name))
                file.publish()
            except BaseException:
                file.discard()
                raise


def load_training_state(team: Team, path: Path, dataloader: Any = None) -> dict[str, Any]:
    """Set random states and data position to the saved ones; returns ``extra``. Collective.

    With more ranks than were saved, the new ones take the first rank's random states; with any other number of ranks
    the data position is the first rank's, which a loader that counts samples of the whole world turns into its own.
    """
    _check_loader(dataloader)
    error, content = None, None
    try:
        content = read_torch(path, map_memory=False)
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise CheckpointError(f"{path} is no training state of save_training_state")
        if dataloader is not None and content["ranks"][0]["data"] is None:
            raise CheckpointError(f"{path} was saved without a dataloader: load it with dataloader=None")
    except Exception as caught:
        error = caught
    team.share_all(error)
    ranks, same_size = content["ranks"], content["world_size"] == team.size
    mine = ranks[team.rank] if team.rank < len(ranks) else ranks[0]
    try:
        if dataloader is not None:
            dataloader.load_state_dict((mine if same_size else ranks[0])["data"])
        set_random_state(mine["random"])
    except Exception as caught:
        error = caught
    team.share_all(error)
    if not same_size:
        team.warn(f"{path} was saved by {content['world_size']} ranks and is loaded by {team.size}: random numbers differ")
    return content["extra"]


def _check_loader(dataloader: Any) -> None:
    if dataloader is not None and not (hasattr(dataloader, "state_dict") and hasattr(dataloader, "load_state_dict")):
        raise ConfigError(
            f"dataloader={type(dataloader).__name__} cannot say where it is: build it with plugin.prepare_dataloader, or pass None"
        )
