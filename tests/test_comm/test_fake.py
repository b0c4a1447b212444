"""The fake world: the same ledger as a real one, and nothing left behind."""

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from colossalai import comm
from colossalai.utils.errors import ConfigError
from tests.test_comm.verbs import run_every_verb

pytestmark = pytest.mark.fast


def record_every_verb(rank, world_size):
    with comm.record() as ledger:
        run_every_verb(rank, world_size)
    return ledger.rows()


@pytest.mark.parametrize("fake_tensors", [True, False])
def test_ledger_is_that_of_the_real_run(workers, fake_tensors):
    real = workers(3).run(record_every_verb)
    for rank in range(3):
        with comm.fake_world(rank, 3, fake_tensors):
            assert record_every_verb(rank, 3) == real[rank]
    assert not dist.is_initialized()


def test_large_worlds_cost_no_memory():
    with comm.fake_world(rank=511, world_size=1024), comm.record() as ledger:
        flat = torch.empty(1 << 40, dtype=torch.bfloat16)
        bounds = comm.even_bounds(flat.numel(), 1024)
        slice_, _ = comm.reduce_scatter(flat, bounds, op="mean", out_dtype=torch.float32)
        comm.all_gather_into(flat, bounds)
        assert isinstance(slice_, FakeTensor) and slice_.dtype == torch.float32 and slice_.numel() == 1 << 30
        group = comm.new_group(range(504, 512), name="tp")
        assert comm.rank(group) == 7 and comm.is_fake(group) and not comm.is_gloo(group)
        comm.all_reduce(slice_, group)
    assert ledger.bytes("reduce_scatter") == ledger.bytes("all_gather_into") == 2 << 40
    assert ledger.bytes("all_reduce", "tp") == 4 << 30


def test_a_training_step_and_a_mesh():
    with comm.fake_world(1, 4):
        with comm.real_tensors():
            mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            dp, tp = mesh["dp"].get_group(), mesh["tp"].get_group()
        assert comm.global_ranks(dp) == (1, 3) and comm.global_ranks(tp) == (0, 1)
        model = torch.nn.Linear(64, 32)
        optimizer = torch.optim.AdamW(model.parameters())
        with comm.record() as ledger:
            out = comm.autograd.reduce(model(comm.autograd.copy(torch.randn(8, 64, requires_grad=True), tp)), tp)
            out.square().mean().backward()
            for parameter in model.parameters():
                comm.all_reduce(parameter.grad, dp, op="mean")
            optimizer.step()
            assert comm.read_scalar(out.sum(), 1.5, "loss") == 1.5
            assert comm.read_scalar(out.sum(), 1.5, "loss") == 1.5
        assert ledger.elements("all_reduce", dp) == 64 * 32 + 32
        assert ledger.elements("all_reduce", tp) == 8 * 32 + 8 * 64
        assert ledger.stand_ins() == {"loss": (1.5, 2)} and "stand-in: loss = 1.5, read 2 times" in ledger.table()


def test_true_kernels_stay_finite():
    with comm.fake_world(2, 4, fake_tensors=False) as mode:
        assert mode is None
        flat = torch.arange(8.0)
        slice_, _ = comm.reduce_scatter(flat, comm.even_bounds(8, 4), op="mean")
        assert slice_.tolist() == [4.0, 5.0]
        for dtype, bounds in ((torch.float64, comm.even_bounds(8, 4)), (torch.float32, [0, 1, 1, 4, 8])):
            slice_, _ = comm.reduce_scatter(flat, bounds, out_dtype=dtype)
            assert torch.isfinite(slice_).all()
        gathered = comm.all_gather(torch.ones(2))
        assert torch.isfinite(gathered).all() and gathered.shape == (8,)
        assert torch.isfinite(comm.all_to_all(torch.ones(4, 2), 0, 1)).all()
        assert torch.isfinite(comm.all_to_all_uneven(torch.ones(4, 2), [1, 1, 1, 1], [2, 0, 1, 3])).all()
        assert torch.isfinite(comm.autograd.shift(torch.ones(2))).all()
        assert comm.gather_pieces(torch.ones(2), [2, 2, 2, 2], 2).isfinite().all()
        assert comm.read_scalar(slice_.sum(), None) == slice_.sum().item()


def test_state_is_restored_after_an_error():
    with pytest.raises(KeyError):
        with comm.fake_world(0, 2):
            raise KeyError("inside")
    assert not dist.is_initialized() and not isinstance(torch.ones(1), FakeTensor)
    assert comm.world_size() == 1


def test_wrong_use_is_named():
    with pytest.raises(ConfigError, match=r"rank=2 must be within 0\.\.1"):
        with comm.fake_world(2, 2):
            pass
    with comm.fake_world(0, 2):
        with pytest.raises(ConfigError, match="without a process group"):
            with comm.fake_world(0, 2):
                pass
    assert not dist.is_initialized()
