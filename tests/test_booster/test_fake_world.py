"""World (b): each plugin's step runs as rank r of N in this one process, and its ledger is that of a real run."""

import pytest
import torch

from colossalai.testing import TINY_MODELS
from tests.harness import run_workers
from tests.harness.training import make_optimizer, make_plugin

PLUGINS = {
    "ddp": ("ddp", {}),
    "fsdp": ("fsdp", {}),
    "zero1": ("zero1", {}),
    "zero2": ("zero2", {}),
    "zero1-bf16": ("zero1", {"precision": "bf16"}),
    "zero2-fp16": ("zero2", {"precision": "fp16", "initial_scale": 2.0**10}),
    "zero1-clip": ("zero1", {"max_norm": 0.05}),
    "zero2-overlap": ("zero2", {"overlap_allgather": True, "reduce_bucket_size_in_m": 4096 / 2**20}),
    "zero1-whole": ("zero1", {}),
    "zero1-unknown": ("zero1", {}),
    "zero1-extra": ("zero1", {"extra_dp_size": 2}),
    "zero1-token": ("zero1", {"loss_reduction": "token"}),
}
MODELS = ("MLP", "LLA-T")
STEPS, MICRO = 2, 2


class Unknown(torch.optim.Optimizer):
    """The library has to try it to learn how it works."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=0.1)


def adamw(model):
    return make_optimizer("adamw", model)


def muon(model):
    """Needs whole tensors, and unlike torch's Adafactor reads no number back."""
    return torch.optim.Muon([p for p in model.parameters() if p.dim() == 2])


OPTIMIZERS = {"zero1-whole": muon, "zero1-unknown": lambda model: Unknown(model.parameters())}


def ledger_of(rank, world_size, variant, model):
    """Two steps of two micro-batches; rows of the ledger without group names: {(verb, ranks): (calls, bytes)}."""
    from colossalai import comm
    from colossalai.booster import Booster

    name, args = PLUGINS[variant]
    tiny = TINY_MODELS[model]
    booster = Booster(plugin=make_plugin(name, **args))
    inner = tiny.build()
    inner, optimizer, *_ = booster.boost(inner, OPTIMIZERS.get(variant, adamw)(inner))
    with comm.record() as ledger:
        for step in range(STEPS):
            for micro in range(MICRO):
                part = tiny.part(tiny.batch(step * MICRO + micro), rank, world_size)
                booster.backward(tiny.loss(inner, part), optimizer)
            if name in ("ddp", "fsdp"):
                optimizer.clip_grad_by_norm(1.0)
            optimizer.step()
            optimizer.zero_grad()
    rows: dict = {}
    for (verb, ranks, _), row in ledger.rows().items():
        calls, size = rows.get((verb, ranks), (0, 0))
        rows[verb, ranks] = calls + row.calls, size + row.bytes
    return rows


def in_fake_world(rank, world_size, variant, model):
    from colossalai import comm

    with comm.fake_world(rank, world_size):
        return ledger_of(rank, world_size, variant, model)


def variants(*skip):
    return [(v, m) for v in PLUGINS for m in MODELS if v not in skip and (v != "zero1-token" or m != "MLP")]


@pytest.mark.parametrize("variant, model", variants("ddp", "fsdp"))
def test_the_ledger_is_that_of_a_real_run(variant, model):
    world_size = 4 if variant == "zero1-extra" else 2
    real = run_workers(world_size, ledger_of, variant=variant, model=model)
    for rank in (0, world_size - 1):
        assert in_fake_world(rank, world_size, variant, model) == real[rank]


@pytest.mark.parametrize("variant, model", variants())
def test_every_plugin_steps_as_one_rank_of_many(variant, model):
    rows = in_fake_world(3, 8, variant, model)
    if variant != "fsdp":  # torch's FSDP2 communicates on its own, the ledger does not see it
        assert sum(size for _, size in rows.values()) > 0
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("model", MODELS)
def test_stage_0_in_place_of_ddp_moves_what_ddp_moves(model):
    """One all-reduce of the gradients a backward, beside flags: torch's own reducer is invisible to the ledger."""
    params = list(TINY_MODELS[model].build().parameters())
    total, padding = 4 * sum(p.numel() for p in params), 128 * len(params)
    rows = in_fake_world(0, 2, "ddp", model)
    assert {verb for verb, _ in rows} == {"all_reduce"}
    moved = sum(size for _, size in rows.values())
    assert STEPS * MICRO * total <= moved <= STEPS * MICRO * (total + padding + 64)


def stage_0_against_ddp(rank, world_size, model, how):
    """The stand-in trained for real beside torch's DDP, from the same weights on the same data."""
    from contextlib import nullcontext

    from colossalai.zero.data_parallel import DataParallelModel, DataParallelOptimizer

    tiny, found = TINY_MODELS[model], []
    for stand_in in (False, True):
        module = tiny.build()
        optimizer = make_optimizer("adamw", module)
        if stand_in:
            wrapped = DataParallelModel(module, bucket_bytes=4096)
            optimizer = DataParallelOptimizer(optimizer, wrapped)
        else:
            wrapped = torch.nn.parallel.DistributedDataParallel(module)
        for step in range(3):
            for micro in range(2):
                inside = how == "no_sync" and micro == 0
                with wrapped.no_sync() if inside else nullcontext():
                    loss = tiny.loss(wrapped, tiny.part(tiny.batch(2 * step + micro), rank, world_size)) / 2
                    optimizer.backward(loss) if stand_in else loss.backward()
            if stand_in:
                optimizer.clip_grad_by_norm(0.05)
            else:
                torch.nn.utils.clip_grad_norm_(module.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
        found.append({name: p.detach().clone() for name, p in module.named_parameters()})
    return found


@pytest.mark.parametrize("how", ["plain", "no_sync"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_stage_0_equals_torch_ddp(world_size, model, how):
    from tests.harness.training import check_close

    for ddp, stand_in in run_workers(world_size, stage_0_against_ddp, model=model, how=how):
        check_close("parameters", stand_in, ddp, 1e-5)
