"""The ledger of communication: what every verb moved, by verb and group.

[Note: what is counted]
A row counts the *logical operation*, not how a backend composes it, so that a run on gloo, on NCCL and in a fake world
give the same ledger. Payload bytes of one call on one rank:

    all_reduce, broadcast               the tensor
    reduce_scatter, all_gather_into     the flat buffer, all slices together
    all_gather                          the gathered result
    reduce_scatter_dim                  the whole input
    all_to_all, all_to_all_uneven       the input
    send, recv                          the message
    gather_pieces, scatter_pieces       the assembled tensor
    *_object                            the pickled objects of all ranks (a fake world counts its own once per rank)

*Wire bytes* are what a rank must send at least, by the ring formulas (Patarasu and Yuan, 2009), n payload bytes and N
ranks: all_reduce 2n(N-1)/N; reduce_scatter, all-gather, all-to-all and broadcast n(N-1)/N; send n; recv 0.
A verb on a group of one rank moves nothing and is not recorded. Barriers and agreements use the store and are not
recorded.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist

from colossalai.comm.groups import global_ranks, group_label, world_size

__all__ = ["Ledger", "LedgerRow", "record"]

GroupFilter = str | Sequence[int] | dist.ProcessGroup | None


@dataclass
class LedgerRow:
    """Totals of one verb in one group on this rank."""

    calls: int = 0
    elements: int = 0
    bytes: int = 0
    wire_bytes: float = 0.0


class Ledger:
    """What `record` hands out: totals by (verb, group), and the scalars a fake world answered with a stand-in."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, tuple[int, ...], str], LedgerRow] = {}
        self._stand_ins: dict[str, tuple[object, int]] = {}

    def rows(self) -> dict[tuple[str, tuple[int, ...], str], LedgerRow]:
        """Totals by (verb, global ranks, group name)."""
        return dict(self._rows)

    def stand_ins(self) -> dict[str, tuple[object, int]]:
        """Scalar reads answered without data, by name: (the value given, how often). Empty in a real run."""
        return dict(self._stand_ins)

    def calls(self, verb: str | None = None, group: GroupFilter = None) -> int:
        """Number of calls, of one verb or all; ``group`` is a process group, its global ranks, or its name."""
        return sum(row.calls for row in self._select(verb, group))

    def elements(self, verb: str | None = None, group: GroupFilter = None) -> int:
        """Payload in elements; arguments as for `calls`."""
        return sum(row.elements for row in self._select(verb, group))

    def bytes(self, verb: str | None = None, group: GroupFilter = None) -> int:
        """Payload in bytes; arguments as for `calls`."""
        return sum(row.bytes for row in self._select(verb, group))

    def wire_bytes(self, verb: str | None = None, group: GroupFilter = None) -> float:
        """Bytes this rank sends at the theoretical figure; arguments as for `calls`."""
        return sum(row.wire_bytes for row in self._select(verb, group))

    def table(self) -> str:
        """The ledger as text: one line a (verb, group), then the stand-ins."""
        head = ("verb", "group", "calls", "elements", "payload bytes", "wire bytes")
        lines = [head]
        for (verb, ranks, label), row in sorted(self._rows.items()):
            group = f"{label} {_short(ranks)}".strip()
            lines.append((verb, group, f"{row.calls:,}", f"{row.elements:,}", f"{row.bytes:,}", f"{row.wire_bytes:,.0f}"))
        widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
        text = []
        for line in lines:
            cells = [c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))]
            text.append("  ".join(cells).rstrip())
        for what, (value, count) in sorted(self._stand_ins.items()):
            text.append(f"stand-in: {what} = {value!r}, read {count} times")
        return "\n".join(text)

    def _select(self, verb: str | None, group: GroupFilter) -> list[LedgerRow]:
        label = group if isinstance(group, str) else None
        ranks = None
        if group is not None and label is None:
            ranks = tuple(group) if isinstance(group, (list, tuple, range)) else global_ranks(group)
        return [
            row
            for (row_verb, row_ranks, row_label), row in self._rows.items()
            if verb in (None, row_verb) and ranks in (None, row_ranks) and label in (None, row_label)
        ]


def _short(ranks: tuple[int, ...]) -> str:
    if len(ranks) > 2:
        step = ranks[1] - ranks[0]
        if step > 0 and ranks == tuple(range(ranks[0], ranks[-1] + 1, step)):
            return f"[{ranks[0]}..{ranks[-1]}" + (f" step {step}]" if step > 1 else "]")
    return "[" + ",".join(map(str, ranks)) + "]"


# Module state, not thread-local: on an accelerator the backward runs in autograd's own threads.
_active: list[Ledger] = []


@contextmanager
def record() -> Iterator[Ledger]:
    """Count everything `colossalai.comm` moves in the block. Blocks nest: each ledger sees all inside its own."""
    ledger = Ledger()
    _active.append(ledger)
    try:
        yield ledger
    finally:
        # By identity: two ledgers may be open in any order of closing (generators, fixtures).
        _active[:] = [other for other in _active if other is not ledger]


def note(
    verb: str,
    group: dist.ProcessGroup | None,
    elements: int,
    itemsize: int,
    wire_elements: float | None = None,
) -> None:
    """Count one call in every open ledger; ``wire_elements`` defaults to the ring's share, elements * (N-1)/N."""
    if not _active:
        return
    if wire_elements is None:
        size = world_size(group)
        wire_elements = elements * (size - 1) / size
    key = (verb, global_ranks(group), group_label(group))
    for ledger in _active:
        row = ledger._rows.setdefault(key, LedgerRow())
        row.calls += 1
        row.elements += elements
        row.bytes += elements * itemsize
        row.wire_bytes += wire_elements * itemsize


def note_stand_in(what: str, value: object) -> None:
    """List a scalar that was answered without data."""
    for ledger in _active:
        _, count = ledger._stand_ins.get(what, (value, 0))
        ledger._stand_ins[what] = (value, count + 1)
