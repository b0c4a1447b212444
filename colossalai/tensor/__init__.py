from .layout import Interval, Layout, memory_order
from .pieces import assemble

__all__ = ["Interval", "Layout", "assemble", "memory_order"]
