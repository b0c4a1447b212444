"""Process groups: who is in one, which backend carries its tensors, and the time limit every wait has.

``group=None`` means the whole world everywhere in `colossalai.comm`. Where ``torch.distributed`` was never initialised
the world is this one process, so a script runs unchanged without a launcher. *Ranks* are positions within the group;
a rank of the world is called a *global rank*.
"""

import os
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from colossalai.utils.errors import ConfigError

__all__ = [
    "backend_name",
    "default_timeout",
    "global_ranks",
    "group_label",
    "is_fake",
    "is_gloo",
    "is_member",
    "new_group",
    "rank",
    "world_size",
]

TIMEOUT_VARIABLE = "COLOSSALAI_TIMEOUT"
COLLECTIVE_SECONDS = 1800.0
AGREEMENT_SECONDS = 300.0


def timeout_seconds(default: float) -> float:
    """Seconds that COLOSSALAI_TIMEOUT in the environment says, else ``default``; ConfigError unless positive."""
    text = os.environ.get(TIMEOUT_VARIABLE, "").strip()
    if not text:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.0 < seconds < float("inf"):
        raise ConfigError(f"{TIMEOUT_VARIABLE}={text!r} must be a positive number of seconds, or unset for {default:g}")
    return seconds


def default_timeout() -> timedelta:
    """The limit of one collective: COLOSSALAI_TIMEOUT seconds, else 30 minutes."""
    return timedelta(seconds=timeout_seconds(COLLECTIVE_SECONDS))


def is_member(group: dist.ProcessGroup | None = None) -> bool:
    """Whether this process belongs to ``group``."""
    return not dist.is_initialized() or dist.get_rank(group) >= 0


def world_size(group: dist.ProcessGroup | None = None) -> int:
    """Number of ranks in ``group``; 1 without ``torch.distributed``. ConfigError if this process is not in it."""
    if not dist.is_initialized():
        return 1
    size = dist.get_world_size(group)
    if size < 1:
        raise ConfigError(
            f"global rank {dist.get_rank()} is not a member of the given group; "
            "only the ranks a group was created with may communicate through it"
        )
    return size


def rank(group: dist.ProcessGroup | None = None) -> int:
    """This process's position within ``group``, 0 without ``torch.distributed``, -1 outside the group."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def global_ranks(group: dist.ProcessGroup | None = None) -> tuple[int, ...]:
    """The global ranks of ``group``, in group order."""
    if not dist.is_initialized():
        return (0,)
    if group is None:
        return tuple(range(dist.get_world_size()))
    return tuple(dist.get_process_group_ranks(group))


def group_label(group: dist.ProcessGroup | None = None) -> str:
    """The name a group was created with (``new_group(name=)``); ``"world"`` for the whole world, else empty."""
    if group is None or not dist.is_initialized() or group is dist.group.WORLD:
        return "world"
    description = getattr(group, "group_desc", "") or ""
    return "" if description == "undefined" else description


def backend_name(group: dist.ProcessGroup | None = None, device_type: str = "cpu") -> str:
    """The backend that carries tensors of ``device_type`` in ``group``: ``"gloo"``, ``"nccl"``, ``"fake"``...

    Empty without ``torch.distributed``, or where the group carries no such tensors (a pure NCCL group and ``"cpu"``).
    """
    if not dist.is_initialized():
        return ""
    devices = dict(entry.split(":") for entry in dist.get_backend_config(group).split(",") if ":" in entry)
    if not devices:
        return dist.get_backend(group)
    return devices.get(device_type, "")


def is_fake(group: dist.ProcessGroup | None = None) -> bool:
    """Whether the group belongs to a fake world (`fake_world`), where nothing travels."""
    return dist.is_initialized() and dist.get_backend(group) == "fake"


def is_gloo(group: dist.ProcessGroup | None = None, device_type: str = "cpu") -> bool:
    """Whether gloo carries tensors of ``device_type`` in ``group``."""
    return backend_name(group, device_type) == "gloo"


def new_group(
    ranks: Sequence[int] | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    name: str | None = None,
) -> dist.ProcessGroup | None:
    """Create a group of the given global ranks. Every process of the world must call it, in the same order.

    The time limit is always passed on, because torch does not let a group inherit the world's.

    Args:
        ranks: ascending global ranks; None for all.
        timeout: limit of one collective; None for `default_timeout`.
        backend: None for the world's.
        name: shown by ledgers and errors, such as a mesh axis.

    Returns the group; for a process outside it torch's non-member marker, on which `rank` is -1 and every verb raises.
    Without ``torch.distributed`` the only possible group is the one process, and None stands for it.
    """
    if not dist.is_initialized():
        if ranks is not None and list(ranks) != [0]:
            raise ConfigError(f"ranks={list(ranks)} but this process runs alone: call colossalai.launch first")
        return None
    members = None if ranks is None else list(ranks)
    if members is not None and members != sorted(set(members)):
        raise ConfigError(f"ranks={members} must ascend: torch sorts them, so another order would not be kept")
    limit = timeout if timeout is not None else default_timeout()
    return dist.new_group(ranks=members, timeout=limit, backend=backend, group_desc=name)
