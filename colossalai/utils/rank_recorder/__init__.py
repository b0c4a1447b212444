"""What each rank did, and when."""

from .recorder import Event, Recorder, recorder

__all__ = ["Event", "Recorder", "recorder"]
