"""LAMB's arithmetic (You et al. 2020, arXiv:1904.00962), shared by its two forms.

The length of a tensor's update is known only when all of it was computed. Instead of keeping the updates, a second pass
computes them again from the moments, batch by batch: as many bytes are read as storing them would write, and no memory
is taken.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .flat import Row, Wide, batch_limit, batches, columns, flattened, scaled_grads
from .segments import squared_norms


@dataclass(frozen=True)
class LambRule:
    """One step of LAMB on a tensor::

        g = grad * clip   (+ weight_decay * p where not decoupled)
        m = beta1 * m + beta3 * g              v = beta2 * v + (1 - beta2) * g^2
        u = (m / c1) / (sqrt(v / c2) + eps)    (+ weight_decay * p where decoupled)
        p = p - lr * ratio * u

    with ``ratio = |p| / |u|`` of the whole tensor, 1 where either is 0.
    """

    lr: float
    beta1: float
    beta2: float
    beta3: float
    eps: float
    weight_decay: float
    decoupled: bool = True
    c1: float = 1.0
    c2: float = 1.0

    def moments(self, grads, params, exp_avgs, exp_avg_sqs: list[Tensor]) -> None:
        if self.weight_decay != 0 and not self.decoupled:
            grads = torch._foreach_add(grads, params, alpha=self.weight_decay)
        torch._foreach_mul_(exp_avgs, self.beta1)
        torch._foreach_add_(exp_avgs, grads, alpha=self.beta3)
        torch._foreach_mul_(exp_avg_sqs, self.beta2)
        torch._foreach_addcmul_(exp_avg_sqs, grads, grads, value=1 - self.beta2)

    def direction(self, params, exp_avgs, exp_avg_sqs: list[Tensor]) -> list[Tensor]:
        out = torch._foreach_sqrt(exp_avg_sqs)
        if self.c2 != 1.0:
            torch._foreach_div_(out, self.c2**0.5)
        torch._foreach_add_(out, self.eps)
        out = torch._foreach_div(exp_avgs, out)
        if self.c1 != 1.0:
            torch._foreach_div_(out, self.c1)
        if self.weight_decay != 0 and self.decoupled:
            torch._foreach_add_(out, params, alpha=self.weight_decay)
        return out


class LambGroup:
    """The rows ``(param, grad, exp_avg, exp_avg_sq)`` of one param group under one rule."""

    def __init__(self, rule: LambRule, rows: list[Row]) -> None:
        self.rule = rule
        kinds: dict[torch.device | None, list[tuple[int, Row]]] = {}
        for index, row in enumerate(rows):
            flat = flattened(row)
            kinds.setdefault(None if flat is None else row[0].device, []).append((index, row if flat is None else flat))
        self._kinds, self.count = kinds, len(rows)
        self._device = rows[0][0].device if rows else torch.device("cpu")

    def _batches(self):
        """(indices of the rows, pieces) for all rows; those that cannot be laid flat come whole, one by one."""
        for device, members in self._kinds.items():
            places, rows = [index for index, _ in members], [row for _, row in members]
            if device is None:
                yield from (([place], [row]) for place, row in zip(places, rows, strict=True))
                continue
            for batch in batches(rows, batch_limit(device)):
                yield [places[index] for index, _ in batch], [piece for _, piece in batch]

    def first_pass(self, clip: Tensor | None, norms: bool) -> Tensor | None:
        """Update the moments; with ``norms`` return squared norms of parameters and updates, (2, number of rows)."""
        sums: list[list[list[Tensor]]] = [[[] for _ in range(self.count)] for _ in range(2)]
        for places, pieces in self._batches():
            params, grads, exp_avgs, exp_avg_sqs = columns(pieces)
            wide = Wide()
            params = wide(params, write=False)
            exp_avgs, exp_avg_sqs = wide(exp_avgs), wide(exp_avg_sqs)
            grads = scaled_grads(grads, params, -1 if clip is None else 1 / clip)
            self.rule.moments(grads, params, exp_avgs, exp_avg_sqs)
            if norms:
                for kind, tensors in enumerate((params, self.rule.direction(params, exp_avgs, exp_avg_sqs))):
                    for place, square in zip(places, squared_norms(tensors).unbind(), strict=True):
                        sums[kind][place].append(square)
            wide.close()
        if not norms or self.count == 0:
            return None
        return torch.stack([_added(parts, self._device) for parts in sums[0] + sums[1]]).view(2, -1)

    def second_pass(self, ratios: Tensor | None) -> None:
        """Move the parameters by ``lr * ratios`` (one a row; None for 1) along the updates."""
        ratios = None if ratios is None else list(ratios.unbind())
        for places, pieces in self._batches():
            params, _, exp_avgs, exp_avg_sqs = columns(pieces)
            wide = Wide()
            params = wide(params)
            updates = self.rule.direction(params, wide(exp_avgs, write=False), wide(exp_avg_sqs, write=False))
            if ratios is not None:
                torch._foreach_mul_(updates, [ratios[place].to(u) for place, u in zip(places, updates, strict=True)])
            torch._foreach_add_(params, updates, alpha=-self.rule.lr)
            wide.close()


def _added(parts: list[Tensor], device: torch.device) -> Tensor:
    """The sum of scalars; an empty tensor has none, and norm 0."""
    if len(parts) == 1:
        return parts[0].to(device)
    return torch.stack(parts).sum().to(device) if parts else torch.zeros((), device=device)


def trust_ratios(weights: Tensor, updates: Tensor) -> Tensor:
    """``sqrt(weights / updates)`` of squared norms, 1 where either is 0: (n,), (n,) -> (n,)."""
    return torch.where((weights > 0) & (updates > 0), (weights / updates).sqrt(), torch.ones_like(weights))
