"""Device meshes by name."""

from dataclasses import dataclass

import torch

from ..device.device_mesh import DeviceMesh
from ..utils.errors import ConfigError


@dataclass
class DeviceMeshInfo:
    """What a mesh is made of.

    Attributes:
        physical_ids: the world ranks in it.
        mesh_shape: the length of every axis; None lays them out along one.
    """

    physical_ids: list[int]
    mesh_shape: torch.Size | list[int] | tuple[int, ...] | None = None


class DeviceMeshManager:
    """Keeps device meshes under names."""

    def __init__(self) -> None:
        self._meshes: dict[str, DeviceMesh] = {}

    def create_device_mesh(self, name: str, device_mesh_info: DeviceMeshInfo) -> DeviceMesh:
        """Make a mesh with its process groups. Collective over the world."""
        if name in self._meshes:
            raise ConfigError(f"name={name!r}: there is such a mesh already; destroy it first or choose another name")
        ranks = device_mesh_info.physical_ids
        shape = device_mesh_info.mesh_shape
        mesh = DeviceMesh(torch.tensor(ranks), torch.Size(shape or (len(ranks),)), init_process_group=True)
        self._meshes[name] = mesh
        return mesh

    def get(self, name: str) -> DeviceMesh:
        """The mesh of this name."""
        if name not in self._meshes:
            raise ConfigError(f"name={name!r}: no such mesh; there are {', '.join(self._meshes) or 'none'}")
        return self._meshes[name]

    def destroy(self, name: str) -> None:
        """Forget the mesh of this name and leave its groups."""
        mesh = self.get(name)
        del self._meshes[name]
        mesh.destroy_process_groups()

    def destroy_all(self) -> None:
        """Forget them all."""
        for name in list(self._meshes):
            self.destroy(name)
