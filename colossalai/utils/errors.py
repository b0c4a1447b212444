"""Every error type the library raises on purpose.

A message says what was given, what is allowed and what to change. Each type also is the builtin that Colossal-AI 0.5.0
raised in the same place, so that an ``except AssertionError`` written for it keeps working.
"""


class ColossalError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(ColossalError, AssertionError, ValueError):
    """An argument, or a combination of arguments, that is not supported."""


class LayoutError(ColossalError, RuntimeError):
    """A tensor is not where its layout says: a parameter left its bucket, or a shape does not fit."""


class CheckpointError(ColossalError, RuntimeError):
    """A checkpoint is missing, unreadable or does not fit the model."""


class DisagreementError(ColossalError, RuntimeError):
    """Ranks that must agree do not, or one of them did not arrive within the time limit."""


class GradientOverflowError(ColossalError, RuntimeError):
    """Training cannot go on: the loss scale is at its floor and gradients still overflow."""


class NotBuiltError(ColossalError, NotImplementedError):
    """A public name whose capability has not been built yet."""
