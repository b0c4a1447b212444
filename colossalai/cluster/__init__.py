"""Who is where: ranks, meshes of ranks and the process groups along their axes."""

from ..utils.pending import pending_names
from .dist_coordinator import DistCoordinator
from .process_group_manager import ProcessGroupManager
from .process_group_mesh import ProcessGroupMesh

__getattr__ = pending_names(__name__)

__all__ = ["DistCoordinator", "ProcessGroupManager", "ProcessGroupMesh"]
