"""An array of ranks with a process group along each axis."""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..utils.errors import ConfigError
from ..utils.limits import group_timeout


class DeviceMesh:
    """Ranks laid out as an array, row by row.

    Two arrays describe one mesh: the *physical* ids are world ranks, the *logical* ids the numbers of the same devices
    inside the mesh, both flat or in the shape of the mesh.

    Args:
        physical_mesh_id: world ranks, in the order in which they fill the mesh.
        mesh_shape: the length of every axis; needed unless ``logical_mesh_id`` is given.
        logical_mesh_id: world ranks in the shape of the mesh, a permutation of ``physical_mesh_id``.
        mesh_alpha: latency along each axis, kept for planners.
        mesh_beta: seconds a byte along each axis, kept for planners.
        init_process_group: make the groups along every axis now, which is collective over the world.
        device: the type of device, for its name only.
    """

    def __init__(
        self,
        physical_mesh_id: torch.Tensor,
        mesh_shape: torch.Size | Sequence[int] | None = None,
        logical_mesh_id: torch.Tensor | None = None,
        mesh_alpha: list[float] | None = None,
        mesh_beta: list[float] | None = None,
        init_process_group: bool = False,
        device: str = "cuda",
    ) -> None:
        if (mesh_shape is None) == (logical_mesh_id is None):
            raise ConfigError("DeviceMesh: give one of mesh_shape and logical_mesh_id")
        ranks = [int(rank) for rank in physical_mesh_id.reshape(-1).tolist()]
        if len(set(ranks)) != len(ranks) or any(rank < 0 for rank in ranks):
            raise ConfigError(f"physical_mesh_id={ranks}: give every world rank once")
        if logical_mesh_id is not None:
            laid_out = [int(rank) for rank in logical_mesh_id.reshape(-1).tolist()]
            if sorted(laid_out) != sorted(ranks):
                raise ConfigError(f"logical_mesh_id holds {laid_out}, and physical_mesh_id {ranks}: they must be the same")
            ranks, shape = laid_out, tuple(logical_mesh_id.shape)
        else:
            shape = tuple(int(n) for n in mesh_shape)
        if math.prod(shape) != len(ranks):
            raise ConfigError(f"mesh_shape={shape} holds {math.prod(shape)} devices, and there are {len(ranks)}")
        for name, given in (("mesh_alpha", mesh_alpha), ("mesh_beta", mesh_beta)):
            if given is not None and len(given) != len(shape):
                raise ConfigError(f"{name}={given}: give one number for each of the {len(shape)} axes")
        self._ranks = ranks  # world ranks in the order of the mesh
        self._shape = torch.Size(shape)
        self._device = device
        self.mesh_alpha, self.mesh_beta = mesh_alpha, mesh_beta
        self._axis_groups: dict[tuple[int, int], dist.ProcessGroup | None] = {}
        if init_process_group:
            self.init_logical_process_group()

    @staticmethod
    def from_process_group(process_group: dist.ProcessGroup | list[dist.ProcessGroup]) -> "DeviceMesh":
        """The mesh whose axes are these groups, the last one fastest. This process must be in each of them.

        A list of groups must be the axes of one mesh: their ranks are then those of the product of the axes, taken at
        equal distances, and are checked to be.
        """
        groups = process_group if isinstance(process_group, list) else [process_group]
        if not groups:
            raise ConfigError("process_group is an empty list: give a group for every axis")
        axes = [dist.get_process_group_ranks(group) for group in groups]
        me = dist.get_rank()
        for ranks in axes:
            if me not in ranks:
                raise ConfigError(f"process_group: rank {me} is not in the group of ranks {ranks}")
        # Every rank is mine plus its distance along each axis.
        ranks = torch.tensor(me)
        for along in axes:
            ranks = ranks.unsqueeze(-1) + (torch.tensor(along) - me)
        shape = tuple(len(along) for along in axes)
        flat = ranks.reshape(-1).tolist()
        if len(set(flat)) != len(flat) or min(flat) < 0:
            raise ConfigError(f"process_group: groups of ranks {axes} are not the axes of one mesh")
        mesh = DeviceMesh(ranks.reshape(-1), shape, device=_device_type(groups[0]))
        for axis, group in enumerate(groups):
            for rank in axes[axis]:
                mesh._axis_groups[axis, rank] = group
        return mesh

    @property
    def shape(self) -> torch.Size:
        """The length of every axis."""
        return self._shape

    @property
    def num_devices(self) -> int:
        """How many devices the mesh has."""
        return len(self._ranks)

    @property
    def logical_mesh_id(self) -> torch.Tensor:
        """The numbers 0, 1, ... of the devices inside the mesh, in its shape."""
        return torch.arange(self.num_devices).reshape(self._shape)

    @property
    def physical_mesh_id(self) -> torch.Tensor:
        """The world ranks of the mesh, in its shape."""
        return torch.tensor(self._ranks).reshape(self._shape)

    @property
    def is_initialized(self) -> bool:
        """Whether the groups along its axes have been made."""
        return bool(self._axis_groups)

    def __deepcopy__(self, memo: dict) -> "DeviceMesh":
        # Process groups cannot be copied; a copied model keeps talking over the same ones.
        copy = object.__new__(type(self))
        memo[id(self)] = copy
        copy.__dict__.update(self.__dict__)
        return copy

    def __repr__(self) -> str:
        return f"DeviceMesh(shape={tuple(self._shape)}, ranks={self._ranks}, device={self._device!r})"

    def _check_axis(self, axis: int) -> int:
        if not -len(self._shape) <= axis < len(self._shape):
            raise ConfigError(f"axis={axis}: this mesh has the axes 0 to {len(self._shape) - 1}")
        return axis % len(self._shape)

    def _place(self, global_rank: int | None) -> list[int]:
        """Where a world rank (None: mine) is in the mesh."""
        rank = dist.get_rank() if global_rank is None else global_rank
        if rank not in self._ranks:
            raise ConfigError(f"global_rank={rank} is not in this mesh, which holds the ranks {self._ranks}")
        index, place = self._ranks.index(rank), []
        for length in reversed(self._shape):
            index, along = divmod(index, length)
            place.append(along)
        return place[::-1]

    def get_ranks_in_process_group(self, axis: int, global_rank: int | None = None) -> list[int]:
        """The world ranks on the line along ``axis`` through a rank (None: mine)."""
        axis = self._check_axis(axis)
        line = [slice(None) if one == axis else at for one, at in enumerate(self._place(global_rank))]
        return self.physical_mesh_id[tuple(line)].tolist()

    def init_logical_process_group(self) -> None:
        """Make a group for every line along every axis. Collective over the world."""
        if self._axis_groups:
            raise ConfigError("DeviceMesh: its process groups have been made already")
        for axis in range(len(self._shape)):
            for rank in self._ranks:
                if (axis, rank) not in self._axis_groups:
                    line = self.get_ranks_in_process_group(axis, rank)
                    group = dist.new_group(line, timeout=group_timeout())
                    self._axis_groups.update({(axis, member): group for member in line})

    def get_process_group(self, axis: int, global_rank: int | None = None) -> dist.ProcessGroup:
        """The group along ``axis`` that holds a rank (None: mine)."""
        axis = self._check_axis(axis)
        rank = dist.get_rank() if global_rank is None else global_rank
        self._place(rank)
        if (axis, rank) not in self._axis_groups:
            raise ConfigError("DeviceMesh: no process group here; make the mesh with init_process_group=True")
        return self._axis_groups[axis, rank]

    def get_process_group_for_all_axes(self, global_rank: int | None = None) -> dict[int, dist.ProcessGroup]:
        """The groups that hold a rank (None: mine), by axis."""
        return {axis: self.get_process_group(axis, global_rank) for axis in range(len(self._shape))}

    def global_rank_to_local_rank(self, rank: int, axis: int | None = None) -> list[int] | int:
        """Where a world rank is in the mesh: along one axis, or along all."""
        place = self._place(rank)
        return place if axis is None else place[self._check_axis(axis)]

    def flatten(self) -> "DeviceMesh":
        """The same devices along one axis, without process groups."""
        return DeviceMesh(torch.tensor(self._ranks), (self.num_devices,), device=self._device)

    def destroy_process_groups(self) -> None:
        """Leave the groups along its axes."""
        groups = {id(group): group for group in self._axis_groups.values()}
        self._axis_groups.clear()
        for group in groups.values():
            if dist.is_initialized() and group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)


def _device_type(group: dist.ProcessGroup) -> str:
    return "cuda" if "nccl" in dist.get_backend(group) else "cpu"
