"""A mesh of ranks, and the process groups along its axes."""

import itertools
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch.distributed as dist

from ..utils.errors import ConfigError
from ..utils.limits import group_timeout
from .backend import resolve_backend

Axes = int | list[int]
Indices = list[int] | list[list[int]] | None


class ProcessGroupMesh:
    """The world laid out as an array, row by row: ranks along the last axis are neighbours.

    Making a group makes all its parallel ones, so every rank must do it, in the same order. Groups are kept: the same
    ranks with the same backend are one group. Each has the library's time limit (``colossalai.utils.limits``).

    Args:
        size: the length of every axis; their product is the world size (ConfigError otherwise).
    """

    def __init__(self, *size: int) -> None:
        if not size or any(not isinstance(n, int | np.integer) or n < 1 for n in size):
            raise ConfigError(f"ProcessGroupMesh{size}: give the length of every axis, each at least 1")
        if not dist.is_initialized():
            raise ConfigError("ProcessGroupMesh: this process has not joined a world; call colossalai.launch_from_torch() first")
        world_size = dist.get_world_size()
        if math.prod(size) != world_size:
            raise ConfigError(f"ProcessGroupMesh{size}: the axes hold {math.prod(size)} ranks, and the world has {world_size}")
        self._shape = tuple(int(n) for n in size)
        self._rank = dist.get_rank()
        self._coord = ProcessGroupMesh.unravel(self._rank, self._shape)
        self._groups: dict[tuple[tuple[int, ...], str | None], dist.ProcessGroup] = {}

    @property
    def shape(self) -> tuple[int, ...]:
        """The length of every axis."""
        return self._shape

    @property
    def rank(self) -> int:
        """The rank of this process in the world."""
        return self._rank

    def size(self, dim: int | None = None) -> int | tuple[int, ...]:
        """The length of one axis, or of all."""
        return self._shape if dim is None else self._shape[dim]

    def coordinate(self, dim: int | None = None) -> int | tuple[int, ...]:
        """The place of this process along one axis, or along all."""
        return self._coord if dim is None else self._coord[dim]

    @staticmethod
    def unravel(rank: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The place of a rank in a mesh of this shape. Raises ValueError for a rank outside it."""
        return tuple(int(place) for place in np.unravel_index(rank, shape))

    @staticmethod
    def ravel(coord: tuple[int, ...], shape: tuple[int, ...], mode: Literal["raise", "wrap", "clip"] = "raise") -> int:
        """The rank at a place of a mesh of this shape.

        Places outside raise ValueError, wrap around or are clipped, as ``mode`` says.
        """
        if mode not in ("raise", "wrap", "clip"):
            raise ConfigError(f"mode={mode!r} is unknown; the choices are raise, wrap, clip")
        return int(np.ravel_multi_index(coord, shape, mode))

    def get_ranks_in_group(self, group: dist.ProcessGroup) -> list[int]:
        """The world ranks of a group this mesh made, in the order of the group."""
        for (ranks, _), known in self._groups.items():
            if known is group:
                return list(ranks)
        raise ConfigError("get_ranks_in_group: this mesh did not make that group")

    def _new_group(self, ranks: Sequence[int], backend: str | None) -> dist.ProcessGroup:
        """The group of these ranks, made if it is not there yet. Collective."""
        key = (tuple(ranks), backend)
        if key not in self._groups:
            chosen = None if backend is None else resolve_backend(backend)
            self._groups[key] = dist.new_group(list(ranks), timeout=group_timeout(), backend=chosen)
        return self._groups[key]

    @staticmethod
    def get_coords_along_axis(base_coord: tuple[int, ...], axis: Axes, indices_at_axis: Indices) -> list[tuple[int, ...]]:
        """The places that differ from ``base_coord`` only along ``axis``, where they take the given indices.

        With several axes there is one list of indices for each, and the last axis runs fastest.
        """
        axes = [axis] if isinstance(axis, int) else list(axis)
        indices = [indices_at_axis] if isinstance(axis, int) else list(indices_at_axis)
        places = []
        for choice in itertools.product(*indices):
            place = list(base_coord)
            for one, index in zip(axes, choice, strict=True):
                place[one] = index
            places.append(tuple(place))
        return places

    def _along(self, axis: Axes, indices_at_axis: Indices) -> tuple[list[int], list[list[int]]]:
        """The axes as a list, none negative, and the indices taken along each."""
        given = [axis] if isinstance(axis, int) else list(axis)
        if not given or any(not -len(self._shape) <= one < len(self._shape) for one in given):
            raise ConfigError(f"axis={axis}: this mesh has the axes 0 to {len(self._shape) - 1}")
        axes = [one % len(self._shape) for one in given]
        if len(set(axes)) != len(axes):
            raise ConfigError(f"axis={axis}: an axis stands there twice")
        if indices_at_axis is None:
            return axes, [list(range(self._shape[one])) for one in axes]
        indices = [indices_at_axis] if isinstance(axis, int) else list(indices_at_axis)
        if len(indices) != len(axes):
            raise ConfigError(f"indices_at_axis={indices_at_axis}: give one list for each of the axes {axes}")
        for one, chosen in zip(axes, indices, strict=True):
            if not chosen or any(not 0 <= index < self._shape[one] for index in chosen):
                raise ConfigError(f"indices_at_axis={indices_at_axis}: axis {one} has the indices 0 to {self._shape[one] - 1}")
        return axes, indices

    def create_group_along_axis(
        self, axis: Axes, indices_at_axis: Indices = None, backend: str | None = None
    ) -> dist.ProcessGroup | None:
        """Make the groups along an axis, or along several, everywhere in the mesh, and give mine. Collective.

        Args:
            indices_at_axis: only these indices along the axis (one list for each of several axes); None takes all.
                A rank outside them is in none of the groups and gets None.
            backend: None is the world's own.
        """
        axes, indices = self._along(axis, indices_at_axis)
        others = [(0,) if one in axes else tuple(range(length)) for one, length in enumerate(self._shape)]
        mine = None
        for base in itertools.product(*others):
            places = self.get_coords_along_axis(base, axes, indices)
            group = self._new_group([self.ravel(place, self._shape) for place in places], backend)
            if self._coord in places:
                mine = group
        return mine

    def get_group_along_axis(
        self, axis: Axes, indices_at_axis: Indices = None, backend: str | None = None
    ) -> dist.ProcessGroup | None:
        """My group along an axis, or along several; made, with all its parallel ones, if it is not there yet."""
        axes, indices = self._along(axis, indices_at_axis)
        if any(self._coord[one] not in chosen for one, chosen in zip(axes, indices, strict=True)):
            return self.create_group_along_axis(axis, indices_at_axis, backend)
        ranks = tuple(self.ravel(p, self._shape) for p in self.get_coords_along_axis(self._coord, axes, indices))
        known = self._groups.get((ranks, backend))
        return self.create_group_along_axis(axis, indices_at_axis, backend) if known is None else known

    def destroy_mesh_process_groups(self) -> None:
        """Leave every group this mesh made. Later requests make new ones."""
        for group in self._groups.values():
            # A rank outside a group holds a marker in its place. After the world was left, all groups are gone.
            if dist.is_initialized() and group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)
        self._groups.clear()
