from colossalai.utils.pending import pending_names

from .low_level_zero_plugin import LowLevelZeroPlugin
from .plugin_base import Plugin
from .torch_ddp_plugin import TorchDDPPlugin
from .torch_fsdp_plugin import TorchFSDPPlugin

__getattr__ = pending_names(__name__)

__all__ = ["LowLevelZeroPlugin", "Plugin", "TorchDDPPlugin", "TorchFSDPPlugin"]
