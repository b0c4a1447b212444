"""Process groups by name."""

import torch.distributed as dist

from ..utils.errors import ConfigError
from ..utils.limits import group_timeout
from .backend import resolve_backend


class ProcessGroupManager:
    """Keeps process groups under names."""

    def __init__(self) -> None:
        self._groups: dict[str, dist.ProcessGroup] = {}

    def create_process_group(self, name: str, ranks: list[int], backend: str = "nccl") -> dist.ProcessGroup:
        """Make a group of these world ranks. Collective over the world.

        Args:
            backend: ``"nccl"`` means the accelerator's own, as in ``colossalai.launch``.
        """
        if name in self._groups:
            raise ConfigError(f"name={name!r}: there is such a group already; destroy it first or choose another name")
        group = dist.new_group(ranks, timeout=group_timeout(), backend=resolve_backend(backend))
        self._groups[name] = group
        return group

    def get(self, name: str) -> dist.ProcessGroup:
        """The group of this name."""
        if name not in self._groups:
            raise ConfigError(f"name={name!r}: no such group; there are {', '.join(self._groups) or 'none'}")
        return self._groups[name]

    def destroy(self, name: str) -> None:
        """Leave the group of this name."""
        group = self.get(name)
        del self._groups[name]
        if dist.is_initialized() and group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)

    def destroy_all(self) -> None:
        """Leave them all."""
        for name in list(self._groups):
            self.destroy(name)
