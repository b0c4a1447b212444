"""Markers for tests that run only where somebody asked for them."""

import os

_OFF = ("", "0", "false", "no", "off")


def run_on_environment_flag(name: str):
    """A pytest marker: skip the test unless the environment variable ``name`` is set, and not to 0, false, no or off.

    The variable is read when the test module is imported. ConfigError for an empty name.
    """
    import pytest

    from ..utils.errors import ConfigError

    if not isinstance(name, str) or not name:
        raise ConfigError(f"name={name!r}: give the name of an environment variable")
    asked = os.environ.get(name, "").strip().lower() not in _OFF
    return pytest.mark.skipif(not asked, reason=f"set the environment variable {name}=1 to run it")
