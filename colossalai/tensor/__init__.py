from colossalai.utils.pending import pending_names

from .layout import Interval, Layout, memory_order
from .pieces import assemble

__getattr__ = pending_names(__name__)

__all__ = ["Interval", "Layout", "assemble", "memory_order"]
