"""Configuration as a dictionary with attribute access."""

import runpy
from pathlib import Path
from types import ModuleType
from typing import Any

from ..utils.errors import ConfigError


class ConfigException(ConfigError):
    """A configuration that cannot be read."""


class Config(dict):
    """A dictionary whose keys are attributes too, at every depth: ``Config({"a": {"b": 1}}).a.b == 1``."""

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        super().__init__()
        if config is not None:
            self.update(config)

    def __getattr__(self, key: str) -> Any:
        try:
            return self[key]
        except KeyError:
            raise AttributeError(f"the config has no entry {key!r}; it has {', '.join(map(str, self)) or 'none'}") from None

    def __setattr__(self, key: str, value: Any) -> None:
        self._add_item(key, value)

    def __delattr__(self, key: str) -> None:
        try:
            del self[key]
        except KeyError:
            raise AttributeError(f"the config has no entry {key!r}") from None

    def __missing__(self, key: str) -> Any:
        raise KeyError(key)

    def _add_item(self, key: str, value: Any) -> None:
        self[key] = Config(value) if isinstance(value, dict) and not isinstance(value, Config) else value

    def update(self, config: dict[str, Any]) -> None:
        """Take over every entry of ``config``; dictionaries in it become configs."""
        if not isinstance(config, dict):
            raise ConfigException(f"config must be a dictionary, not {type(config).__name__}")
        for key, value in config.items():
            self._add_item(key, value)

    @staticmethod
    def from_file(filename: str | Path) -> "Config":
        """The public variables of a Python file, which is executed. Modules it imports are left out.

        Raises FileNotFoundError if there is no such file, ConfigException if it is no ``.py`` file.
        """
        path = Path(filename).absolute()
        if not path.is_file():
            raise FileNotFoundError(f"filename={str(path)!r}: there is no such file")
        if path.suffix != ".py":
            raise ConfigException(f"filename={str(path)!r}: only .py files can be read as a config")
        variables = runpy.run_path(str(path))
        return Config({k: v for k, v in variables.items() if not k.startswith("_") and not isinstance(v, ModuleType)})
