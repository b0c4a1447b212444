"""When gradients are reduced. What is sent is in ``bucket.py``, how in ``comm/``.

[Note: the life of a gradient]

    collect    autograd has accumulated a gradient: it moves from ``param.grad`` into its bucket's ``local``
    launch     a bucket's ``local`` is sent: the mean over the ranks, each rank's slice (stage 0: all of it)
    land       what arrived becomes (stage 1), or is added to (stage 2), ``reduced``; stage 0: ``param.grad``

Every rank launches the buckets in the same order whatever order its gradients come in, so that collectives always meet. Each
backward that reduces launches each bucket exactly once; what comes too late for that (a layer used twice under reentrant
checkpointing fires its hook twice) waits in ``local`` for the next launch, at the latest the one in :meth:`finish`, where the
ranks first agree which buckets have such a rest anywhere.

Stage 1 keeps ``local`` whole until the step and sends it once a step: on the backward that was the last one of the step before,
overlapped with it, else in :meth:`finish`. If it turns out that the guess was wrong, the sum is simply sent again; results never
depend on it. Stage 2 sends on each backward outside ``no_sync`` and holds only slices in between.

Nothing that is communicated follows from what this rank alone has seen: a rank may use parameters that another does not. The
dtype a bucket is sent in hence comes from the calls so far, or is agreed on. A backward that the user starts by hand
(``loss.backward()``, or another optimizer's on the same model) is reduced in :meth:`finish` only, which all ranks reach in the
order of their steps.
"""

from collections import deque
from functools import partial

import torch
from torch import Tensor, nn

from colossalai import comm
from colossalai.logging import get_dist_logger
from colossalai.utils.errors import ConfigError

from .bucket import FlatBucket, Slot

MAX_IN_FLIGHT = 2


class BufferPool:
    """Gradient buffers that live on from bucket to bucket and from step to step: fresh pages are what a CPU is slow at."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._used: set[int] = set()

    def take(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised ``(size,)`` tensor."""
        fits = [t for t in self._free if t.numel() >= size and t.dtype == dtype and t.device == device]
        if fits:
            base = min(fits, key=Tensor.numel)
            self._free = [t for t in self._free if t is not base]
        else:
            base = torch.empty(size, dtype=dtype, device=device)
        self._used.add(id(base))
        piece = base[:size]
        piece.pool_base = base
        return piece

    def give(self, piece: Tensor) -> None:
        self._free.append(piece.pool_base)

    def trim(self) -> None:
        """Drop what nobody took since the last call."""
        self._free = [t for t in self._free if id(t) in self._used]
        self._used = set()


class GradReducer:
    """Collects, launches and lands the gradients of ``buckets``, which share one process group.

    Args:
        buckets: in launch order.
        stage: 0 all-reduce, 1 and 2 reduce-scatter.
        overlap: launch while the backward still runs.
        communication_dtype: what gradients are sent in; None sends them in the dtype they were accumulated in.
        extra_group: a second group to average over after the first (replicas of the shard group).
    """

    def __init__(
        self,
        buckets: list[FlatBucket],
        stage: int,
        overlap: bool = True,
        communication_dtype: torch.dtype | None = None,
        extra_group=None,
    ) -> None:
        self.buckets, self.stage, self.overlap = buckets, stage, overlap
        self.communication_dtype, self.extra_group = communication_dtype, extra_group
        self.group = buckets[0].group if buckets else None
        self.slots = [slot for bucket in buckets for slot in bucket.slots]
        self.calls = 0
        """Backward calls since the last step."""
        self.foreign = False
        """Whether the user called ``loss.backward()`` and not the optimizer."""
        self._expected_calls: int | None = None
        self._running = self._eager = self._sync = self._told = False
        self._held = 0
        self._wide = False
        self._next = 0
        self._in_flight: deque = deque()
        self._pool = BufferPool()
        for slot in self.slots:
            slot.param.register_post_accumulate_grad_hook(partial(self._collect, slot))

    def begin(self, sync: bool) -> None:
        """A backward starts; ``sync`` is False inside ``no_sync``."""
        self._running, self._next = True, 0
        self._sync = sync
        last = self.stage != 1 or self._expected_calls == self.calls + 1
        self._eager = sync and last and (self.overlap or self.stage != 1)
        adds_up = self._held > 0 or ((self.stage == 1 or not sync) and (self._expected_calls or 1) > 1)
        self._wide = self.stage != 0 and adds_up
        for bucket in self.buckets:
            bucket.pending = sum(slot.param.requires_grad for slot in bucket.slots)
            for slot in bucket.slots:
                slot.seen = False
        if self.stage == 2 and not sync and not self._told:
            self._told = True
            get_dist_logger().warning(
                "backward inside no_sync under ZeRO stage 2 keeps whole gradients until the next backward outside: "
                "leave no_sync away to keep only slices",
                ranks=[0],
            )

    def _collect(self, slot: Slot, param: nn.Parameter) -> None:
        if not self._running:
            self.begin(sync=True)
            self.foreign = True
            self._eager = self.stage == 0
        if param.grad is None:
            raise ConfigError(f"parameter {slot.name!r} is trained by two optimizers: boost each parameter with one")
        grad, bucket = param.grad.detach(), slot.bucket  # under create_graph it has a history
        if grad.layout != torch.strided:
            raise ConfigError(f"parameter {slot.name!r} has a sparse gradient: build its Embedding with sparse=False")
        if self.stage == 0 and slot.seen:
            self._land_all()  # a late contribution must not be added to what is being reduced in place
        if self.stage != 0 or not self._is_in_bucket(bucket, grad):
            self._make_room(bucket, again=slot.touched)
            bucket.add_gradient(slot, grad)
        param.grad = None
        slot.used = bucket.dirty = True
        if not slot.seen:
            slot.seen = True
            bucket.pending -= 1
            if self._eager:
                self._launch_full()

    @staticmethod
    def _is_in_bucket(bucket: FlatBucket, grad: Tensor) -> bool:
        """Whether autograd already accumulated in place into the bucket, through the view that ``param.grad`` was."""
        return bucket.local is not None and grad.untyped_storage()._cdata == bucket.local.untyped_storage()._cdata

    def _make_room(self, bucket: FlatBucket, again: bool) -> None:
        """See that ``bucket.local`` exists, in fp32 where 16 bits would lose small contributions of a second backward."""
        low, wide = bucket.dtype.itemsize < 4, again or self._wide
        dtype = torch.float32 if low and wide and self.stage != 0 else bucket.dtype
        if bucket.local is None:
            bucket.local = self._pool.take(bucket.bounds[-1], dtype, bucket.device)
        elif low and wide and bucket.local.dtype != dtype:
            narrow, bucket.local = bucket.local, self._pool.take(bucket.bounds[-1], dtype, bucket.device)
            bucket.local.copy_(narrow)
            self._pool.give(narrow)

    def _launch_full(self) -> None:
        """Launch, in order, every bucket that has all its gradients."""
        while self._next < len(self.buckets) and self.buckets[self._next].pending <= 0:
            self._launch(self.buckets[self._next], self._wide)
            self._next += 1
            if not self.overlap:
                self._land_all()

    def _launch(self, bucket: FlatBucket, wide: bool) -> None:
        """Send ``bucket``, its 16 bits as fp32 if ``wide``; the same on all ranks, whatever ``local`` is here."""
        if bucket.local is None:  # nothing arrived on this rank, others may have something
            bucket.local = self._pool.take(bucket.bounds[-1], bucket.dtype, bucket.device)
        bucket.zero_untouched()
        bucket.dirty = False
        local = bucket.local
        own_dtype = torch.float32 if wide and bucket.dtype.itemsize < 4 else bucket.dtype
        payload = local.to(self.communication_dtype or own_dtype)
        if self.stage == 0:
            out, work = payload, comm.all_reduce(payload, group=bucket.group, op="mean", async_op=True)
        else:
            # gloo's composed sum runs in fp32 anyway; NCCL's own kernel answers in what it was sent, and _land widens that.
            wide = comm.is_gloo(bucket.group, bucket.device.type) and payload.dtype.itemsize < 4
            out, work = comm.reduce_scatter(
                payload,
                bucket.bounds,
                bucket.group,
                op="mean",
                out_dtype=torch.float32 if wide else None,
                async_op=True,
            )
        if self.stage == 2:
            bucket.local = None
            bucket.forget_local()
        self._in_flight.append((bucket, local, out, work))
        while len(self._in_flight) > MAX_IN_FLIGHT:
            self._land()

    def _land(self) -> None:
        bucket, local, out, work = self._in_flight.popleft()
        work.wait()
        if self.stage != 0 and out.dtype.itemsize < 4:
            out = out.float()
        if self.extra_group is not None:
            comm.all_reduce(out, group=self.extra_group, op="mean")
        if self.stage == 0:
            if out is not local:
                local.copy_(out)
        elif self.stage == 1:
            bucket.reduced = out if bucket.base is None else out.add_(bucket.base)
        elif bucket.reduced is None:
            bucket.reduced = out
        else:
            bucket.reduced.add_(out)
        if self.stage == 2:
            self._pool.give(local)

    def _land_all(self) -> None:
        while self._in_flight:
            self._land()

    def flush(self) -> None:
        """A backward has ended: launch the buckets that some parameter's gradient never reached."""
        self._running = False
        self.calls += 1
        self._held = self._held + 1 if self.stage == 1 or not self._sync else 0
        if self._eager:
            for bucket in self.buckets[self._next :]:
                self._launch(bucket, self._wide)
            self._land_all()
        if self.stage == 0 and self._sync:
            self._show()

    def close(self) -> None:
        """Stage 0: end a backward that the user started by hand."""
        if self._running:
            self.flush()

    def _show(self) -> None:
        """Stage 0: the reduced gradients become ``param.grad``, of used parameters only."""
        used, *_ = self._agree()
        for slot, anywhere in zip(self.slots, used):
            slot.param.grad = slot.view(slot.bucket.local) if anywhere else None

    def finish(self) -> list[bool]:
        """Reduce whatever is not yet; returns for each slot whether any rank met a gradient of it since the last step."""
        self._running = False  # it still is after loss.backward(), which is no call of ours and not every rank's
        used, rest, wide = self._agree()
        for bucket, anywhere, as_wide in zip(self.buckets, rest, wide):
            if anywhere:
                self._launch(bucket, as_wide)
        self._land_all()
        return used

    def anything(self) -> bool:
        """Whether any rank met a gradient since the last step. Collective."""
        return any(self._agree()[0])

    def settle(self, bucket: FlatBucket) -> None:
        """Stage 1: what ``bucket`` has reduced stands as it is, since the user edits it; later gradients add to it."""
        if self.stage == 1:
            bucket.base = bucket.reduced
            if bucket.local is not None:
                self._pool.give(bucket.local)
            bucket.local = None
            bucket.forget_local()

    def _agree(self) -> tuple[list[bool], list[bool], list[bool]]:
        """Over all ranks: which parameters have a gradient; which buckets hold something unsent; which are wide somewhere."""
        flags = [slot.used for slot in self.slots] + [bucket.dirty for bucket in self.buckets]
        flags += [b.local is not None and b.local.dtype.itemsize > b.dtype.itemsize for b in self.buckets]
        on_host = comm.backend_name(self.group) != ""  # a pure NCCL world carries no host tensors
        agreed = torch.tensor(flags, dtype=torch.uint8, device="cpu" if on_host else self.buckets[0].device)
        comm.all_reduce(agreed, group=self.group, op="max")
        if self.extra_group is not None:
            comm.all_reduce(agreed, group=self.extra_group, op="max")
        if not comm.is_fake(self.group):  # in the fake world the other ranks do as this one
            flags = [bool(flag) for flag in agreed.tolist()]
        end = len(self.slots) + len(self.buckets)
        return flags[: len(self.slots)], flags[len(self.slots) : end], flags[end:]

    def reset(self, stepped: bool) -> None:
        """Forget all gradients; after a step also remember how many backward calls it took."""
        if stepped:
            self._expected_calls = self.calls
        self.calls = self._held = 0
        self._running = self.foreign = False
        self._land_all()
        for bucket in self.buckets:
            if bucket.local is not None:
                self._pool.give(bucket.local)
            bucket.local = bucket.reduced = bucket.base = None
            bucket.dirty = False
            bucket.forget_local()
            for slot in bucket.slots:
                slot.used = False
        if stepped:
            self._pool.trim()
