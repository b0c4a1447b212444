"""What is left of the API before Booster: compatibility aliases, and errors that say what took the place of the rest."""

from ..utils.pending import pending_names

__getattr__ = pending_names(__name__)
