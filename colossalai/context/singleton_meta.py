"""Classes with one instance."""

import threading
from typing import Any, ClassVar

from ..utils.errors import ConfigError


class SingletonMeta(type):
    """A metaclass whose classes have one instance each, created by the first call, whichever thread makes it.

    A later call gives that instance back and takes no arguments: they could not be honoured (ConfigError).
    """

    _instances: ClassVar[dict[type, Any]] = {}
    _lock: ClassVar[threading.RLock] = threading.RLock()  # one singleton may create another in its __init__

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        with SingletonMeta._lock:
            if cls not in SingletonMeta._instances:
                SingletonMeta._instances[cls] = super().__call__(*args, **kwargs)
            elif args or kwargs:
                raise ConfigError(f"{cls.__name__} exists already and takes no arguments any more: call {cls.__name__}() to get it")
            return SingletonMeta._instances[cls]
