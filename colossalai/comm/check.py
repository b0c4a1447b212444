"""The debugging aid against collectives that do not match: COLOSSALAI_COMM_CHECK=1.

gloo does not check: a size or dtype that differs aborts one rank without an exception and can hand another wrong data.
With the variable set, every collective first compares its verb, shape, dtype and arguments through the store, and all
ranks raise the same DisagreementError. That costs about a millisecond a call, so it is off by default.
"""

import os
from typing import Any

import torch
import torch.distributed as dist

from colossalai.comm.agree import agree
from colossalai.utils.errors import ConfigError

CHECK_VARIABLE = "COLOSSALAI_COMM_CHECK"
_ON, _OFF = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


def compare(verb: str, tensor: torch.Tensor, group: dist.ProcessGroup | None, **arguments: Any) -> None:
    """Where the check is on: DisagreementError unless all ranks of the group start the same collective."""
    text = os.environ.get(CHECK_VARIABLE)
    if not text or text.lower() in _OFF:
        return
    if text.lower() not in _ON:
        raise ConfigError(f"{CHECK_VARIABLE}={text!r} must be one of {', '.join(_ON)} or {', '.join(_OFF[1:])}")
    facts = {"verb": verb, "shape": tuple(tensor.shape), "dtype": str(tensor.dtype), **arguments}
    agree("collective", facts, group, hint=f"This rank was about to start {verb} on {tuple(tensor.shape)}.")
