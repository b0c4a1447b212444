"""How long the library waits, in one place: no wait is unbounded."""

import os
from datetime import timedelta

from .errors import ConfigError

ENV_TIMEOUT = "COLOSSALAI_TIMEOUT"
GROUP_SECONDS = 600.0
RENDEZVOUS_SECONDS = 50.0
ELASTIC_RENDEZVOUS_SECONDS = 300.0


def _asked() -> float | None:
    """The seconds in ``COLOSSALAI_TIMEOUT``, or None where it is not set."""
    text = os.environ.get(ENV_TIMEOUT, "").strip()
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < float("inf"):
        raise ConfigError(f"{ENV_TIMEOUT}={text!r}: give a positive number of seconds, or unset it")
    return seconds


def group_timeout() -> timedelta:
    """How long a collective waits for the other ranks: ``COLOSSALAI_TIMEOUT`` seconds, else 10 minutes.

    Pass it to every ``new_group``: torch does not hand the limit of the default group on to new ones.
    """
    return timedelta(seconds=_asked() or GROUP_SECONDS)


def rendezvous_timeout() -> timedelta:
    """How long a start waits for the other ranks: ``COLOSSALAI_TIMEOUT`` seconds, else 50 seconds.

    Under torch's elastic launcher it is 5 minutes: there every process is known to have been started, and a slow
    import on a cold node is no fault.
    """
    started_by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
    return timedelta(seconds=_asked() or (ELASTIC_RENDEZVOUS_SECONDS if started_by_agent else RENDEZVOUS_SECONDS))
