"""A time limit for every test, without an extra package.

At the limit the test fails where it stands, by an exception in the main thread. A test that sits in native code does
not notice; some time later every stack is printed and the whole run ends, so that nothing hangs for ever.
"""

import faulthandler
import signal
import sys
from contextlib import contextmanager

TEST_SECONDS = 300.0
NATIVE_SECONDS = 120.0


class TimeLimitExceeded(Exception):
    """A test ran longer than its ``limit`` marker, or the default, allows."""


@contextmanager
def time_limit(seconds: float, what: str):
    """Raise :class:`TimeLimitExceeded` in the block after ``seconds``."""

    def stop(signum, frame):
        raise TimeLimitExceeded(f"{what} ran longer than {seconds:g} s; raise it with @pytest.mark.limit(seconds)")

    has_alarm = hasattr(signal, "SIGALRM")
    faulthandler.dump_traceback_later(seconds + NATIVE_SECONDS, exit=True, file=sys.__stderr__)
    before = signal.signal(signal.SIGALRM, stop) if has_alarm else None
    if has_alarm:
        signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        if has_alarm:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        faulthandler.cancel_dump_traceback_later()
