"""Configuration files and singletons."""

from ..utils.pending import pending_names
from .config import Config, ConfigException
from .singleton_meta import SingletonMeta

__getattr__ = pending_names(__name__)

__all__ = ["Config", "ConfigException", "SingletonMeta"]
