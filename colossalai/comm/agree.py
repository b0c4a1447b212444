"""Agreement between ranks, through the job's key-value store and never through a collective.

A collective in which ranks disagree hangs, aborts a process or hands out wrong data. The store can be waited on with a
limit and asked who is missing, and a failed agreement leaves every group usable.

[Note: one round]
Each rank of the group writes what it has. The group's rank 0 waits for all, compares, and writes one verdict, which all
read. That is O(N) traffic. Who arrives after the round has failed reads the same verdict. The last reader deletes the
keys of a round that succeeded; those of a failed round stay for the late.
"""

import hashlib
import json
import weakref
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from colossalai.comm.groups import (
    AGREEMENT_SECONDS,
    default_timeout,
    global_ranks,
    group_label,
    is_fake,
    timeout_seconds,
    world_size,
)
from colossalai.utils.errors import ConfigError, DisagreementError

__all__ = ["agree", "barrier"]

# How much longer than rank 0 the others wait, so that its verdict, which names everyone, comes first.
_GRACE = timedelta(seconds=2)
_SHOWN = 200

# Rounds so far by group object, so that a world made anew counts from 0 on all ranks.
_rounds: "weakref.WeakKeyDictionary[dist.ProcessGroup, Counter]" = weakref.WeakKeyDictionary()


def agree(
    tag: str,
    values: Mapping[str, Any],
    group: dist.ProcessGroup | None = None,
    timeout: None | float | timedelta = None,
    hint: str = "",
) -> None:
    """Return once all ranks of the group have called with equal ``values``; raise the same error on all of them if not.

    Args:
        tag: what is agreed on; calls with one tag must come in the same order on all ranks.
        values: argument name -> value. Values are compared by their ``repr``, dictionaries and sets in sorted order.
        group: who must agree. Nothing happens in a group of one rank, or in a fake world.
        timeout: seconds (or a timedelta) to wait for the others; None for COLOSSALAI_TIMEOUT, else 300.
        hint: appended to the error about ranks that did not come, to say what they should have done.

    Raises:
        DisagreementError: naming each argument that differs and who has which value, or the ranks that did not arrive.
    """
    if world_size(group) == 1 or is_fake(group):
        return
    limit = _limit(timeout)
    round_ = _Round(tag, group)
    ranks, me = round_.ranks, round_.me
    try:
        round_.store.set(round_.key(me), json.dumps({name: _text(value) for name, value in values.items()}))
        error = round_.judge(limit, hint) if me == ranks[0] else round_.await_verdict(limit + _GRACE, hint)
    except RuntimeError as failure:
        error = (
            f"{round_.title}: the store is out of reach. The process that hosts it (rank 0, or the launcher) has most "
            f"likely ended, and its own error says why. ({failure})"
        )
    if error:
        raise DisagreementError(error)
    round_.leave()


def barrier(group: dist.ProcessGroup | None = None, timeout: None | float | timedelta = None) -> None:
    """Return once all ranks of the group are here. Host side: it does not wait for work queued on a device.

    ``timeout`` in seconds, None for the limit of a collective; DisagreementError names the ranks that did not arrive.
    """
    agree("barrier", {}, group, default_timeout() if timeout is None else timeout)


class _Round:
    def __init__(self, tag: str, group: dist.ProcessGroup | None) -> None:
        self.ranks, self.me = global_ranks(group), dist.get_rank()
        self.title = f"agreement {tag!r} in {group_label(group) or f'ranks {_listed(self.ranks)}'}"
        group = group or dist.group.WORLD
        rounds = _rounds.setdefault(group, Counter())
        # torch gives a group one name on all of its ranks, and uses it the same way.
        prefix = f"colossalai/agree/{group.group_name}/{tag}/{rounds[tag]}"
        rounds[tag] += 1
        self.store = dist.PrefixStore(prefix, _default_store())

    def key(self, rank: int) -> str:
        return str(rank)

    def judge(self, limit: timedelta, hint: str) -> str:
        """On the first rank: the error, empty if all agree; written as the verdict."""
        error = ""
        if not self._wait([self.key(rank) for rank in self.ranks], limit):
            error = self._missing(limit, hint)
        if not error:
            given = {rank: json.loads(self.store.get(self.key(rank))) for rank in self.ranks}
            gone = [rank for rank, values in given.items() if values is None]
            if gone:
                error = f"{self.title}: {_ranks(gone)} waited, gave up and left before rank {self.me} arrived. {hint}"
            else:
                error = _compare(self.title, given)
        self.store.set("verdict", json.dumps(error))
        return error

    def await_verdict(self, limit: timedelta, hint: str) -> str:
        if not self._wait(["verdict"], limit):
            # Tells the first rank, should it come after all, that this one no longer takes part.
            self.store.set(self.key(self.me), json.dumps(None))
            if not self.store.check(["verdict"]):
                return self._missing(limit - _GRACE, hint)
        return json.loads(self.store.get("verdict"))

    def leave(self) -> None:
        if self.me == self.ranks[0]:
            for rank in self.ranks:
                self._delete(self.key(rank))
        if self.store.add("readers", 1) == len(self.ranks):
            self._delete("verdict")
            self._delete("readers")

    def _wait(self, keys: list[str], limit: timedelta) -> bool:
        try:
            self.store.wait(keys, limit)
        except RuntimeError:
            # Over the limit, unless the store itself is gone: then this raises.
            return self.store.check(keys)
        return True

    def _missing(self, limit: timedelta, hint: str) -> str:
        seconds = limit.total_seconds()
        missing = [rank for rank in self.ranks if not self.store.check([self.key(rank)])]
        if not missing:
            return f"{self.title}: rank {self.ranks[0]} gave no verdict within {seconds:g} s. {hint}".rstrip()
        text = (
            f"{self.title}: {_ranks(missing)} of {len(self.ranks)} did not arrive within {seconds:g} s. "
            f"All ranks of the group must make this call. {hint}"
        )
        return text.rstrip()

    def _delete(self, key: str) -> None:
        try:
            self.store.delete_key(key)
        except (RuntimeError, NotImplementedError):
            pass  # A store that cannot delete keeps a few bytes a round.


def _compare(title: str, given: dict[int, dict[str, str]]) -> str:
    names = list(dict.fromkeys(name for values in given.values() for name in values))
    lines = []
    for name in names:
        holders: dict[str, list[int]] = {}
        for rank, values in given.items():
            holders.setdefault(values.get(name, "(not given)"), []).append(rank)
        if len(holders) > 1:
            lines.append(f"{name} is " + ", but ".join(f"{text} on {_ranks(who)}" for text, who in holders.items()))
    if not lines:
        return ""
    return f"{title}: ranks disagree. " + "; ".join(lines) + ". Give all ranks the same."


def _text(value: Any) -> str:
    text = _canonical(value)
    if len(text) <= _SHOWN:
        return text
    return f"{text[:_SHOWN]}... (sha1 {hashlib.sha1(text.encode()).hexdigest()[:12]})"


def _canonical(value: Any) -> str:
    if isinstance(value, Mapping):
        entries = sorted((_canonical(key), _canonical(entry)) for key, entry in value.items())
        return "{" + ", ".join(f"{key}: {entry}" for key, entry in entries) + "}"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(map(_canonical, value))) + "}"
    if isinstance(value, (list, tuple)):
        inner = ", ".join(map(_canonical, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    return repr(value)


def _listed(ranks) -> str:
    return ", ".join(map(str, ranks))


def _ranks(ranks) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {_listed(ranks)}"


def _limit(timeout: None | float | timedelta) -> timedelta:
    if timeout is None:
        return timedelta(seconds=timeout_seconds(AGREEMENT_SECONDS))
    limit = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    if limit <= timedelta(0):
        raise ConfigError(f"timeout={timeout!r} must be positive")
    return limit


def _default_store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()
