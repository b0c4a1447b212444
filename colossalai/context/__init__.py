"""Configuration files and singletons."""

from .config import Config, ConfigException
from .singleton_meta import SingletonMeta

__all__ = ["Config", "ConfigException", "SingletonMeta"]
