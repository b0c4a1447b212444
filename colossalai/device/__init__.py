"""Meshes of devices, as sharded layers take them."""

from ..utils.pending import pending_names
from .device_mesh import DeviceMesh

__getattr__ = pending_names(__name__)

__all__ = ["DeviceMesh"]
