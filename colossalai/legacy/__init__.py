"""What is left of the API before Booster: compatibility aliases, and errors that name what took its place."""

from ..utils.pending import pending_names

__getattr__ = pending_names(__name__)
