"""Weighing losses by their number of labels: ``loss_reduction="token"``.

By default a step's gradient is the plain mean, over ranks and micro-batches, of the gradients of the losses that the user
passed to ``backward``. Where those losses are means over different numbers of labels, a token in a short micro-batch then counts
more than one in a long one. With ``"token"`` each loss is weighed by its number of labels ``n``, relative to the average ``n``
over all backward calls and ranks of the window::

    gradient = sum_i n_i * grad_i / mean_i(n_i)          i over ranks and backward calls, mean over ranks as always

A loop that divides its loss by the number of accumulation steps hence gets the gradient of the mean over all tokens of the
global batch, as one process on the whole batch would; the losses the user sees stay the ordinary local means.
"""

import torch
from torch import nn

from colossalai import comm
from colossalai.utils.errors import ConfigError

IGNORE_INDEX = -100
# Weights are counted in thousands of labels, so that a loss scaled for fp16 stays in range.
_UNIT = 1024.0


def check_loss_reduction(loss_reduction: str) -> None:
    """Raise unless ``loss_reduction`` is one of the two known ways."""
    if loss_reduction not in ("mean", "token"):
        raise ConfigError(f'loss_reduction={loss_reduction!r}: use "mean" (mean of the losses) or "token" (weighed by labels)')


class TokenWeight:
    """Counts the labels of each forward and weighs the loss of the backward that follows it."""

    def __init__(self, model: nn.Module, inner: nn.Module) -> None:
        # Hugging Face's causal heads compare position t with label t + 1: the first label of a row is never used.
        name = type(inner).__name__
        self._shifted = name.endswith(("ForCausalLM", "LMHeadModel"))
        self._count: torch.Tensor | None = None
        self._total: torch.Tensor | None = None
        self._calls = self._forwards = 0
        model.register_forward_pre_hook(self._read_labels, with_kwargs=True)

    def _read_labels(self, module: nn.Module, args, kwargs) -> None:
        labels = kwargs.get("labels")
        if labels is None or not torch.is_grad_enabled():
            return
        if kwargs.get("num_items_in_batch") is not None:
            raise ConfigError('num_items_in_batch together with loss_reduction="token" would weigh twice: drop one of them')
        used = labels[..., 1:] if self._shifted else labels
        self._count = (used != IGNORE_INDEX).sum()
        self._forwards += 1

    def weigh(self, loss: torch.Tensor) -> torch.Tensor:
        """``loss`` times the labels it is a mean of."""
        if self._count is None:
            raise ConfigError(
                'loss_reduction="token" needs a forward with labels= before each backward: pass labels= to the model, '
                'or use loss_reduction="mean" with your own weights'
            )
        if self._forwards > 1:
            raise ConfigError(
                f'loss_reduction="token": {self._forwards} forwards with labels before one backward, whose labels should weigh? Call '
                'backward after each, put those that are not trained on under torch.no_grad(), or use loss_reduction="mean"'
            )
        weight, self._count, self._forwards = self._count / _UNIT, None, 0
        self._total = weight if self._total is None else self._total + weight
        self._calls += 1
        return loss * weight.to(loss.dtype if loss.dtype.is_floating_point else torch.float32)

    def factor(self, group=None) -> torch.Tensor:
        """What the gradients gathered so far are multiplied by, 1 / mean(n): (1,) on the device. Collective."""
        if self._total is None:
            raise ConfigError('loss_reduction="token": step without a backward through optimizer.backward')
        mean = self._total.float().reshape(1) / self._calls
        comm.all_reduce(mean, group=group, op="mean")
        return torch.where(mean > 0, 1.0 / mean, torch.zeros_like(mean))

    def reset(self) -> None:
        """A new window begins: the gradients so far were used, or are forgotten."""
        self._total, self._calls = None, 0

    @property
    def active(self) -> bool:
        """Whether the window holds weighed gradients."""
        return self._calls > 0
