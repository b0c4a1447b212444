"""What a backend's name means, by accelerator."""

import pytest
import torch.distributed as dist

from colossalai.accelerator import CpuAccelerator, CudaAccelerator, NpuAccelerator
from colossalai.cluster import backend as module
from colossalai.cluster.backend import resolve_backend
from colossalai.utils.errors import ConfigError

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("accelerator", "own"),
    [
        (CpuAccelerator(), "gloo"),
        (CudaAccelerator(), "cpu:gloo,cuda:nccl"),
        (NpuAccelerator(), "cpu:gloo,npu:hccl"),
    ],
)
def test_nccl_and_none_mean_the_accelerators_own(monkeypatch, accelerator, own):
    monkeypatch.setattr(module, "get_accelerator", lambda: accelerator)
    assert [resolve_backend(name) for name in ("nccl", "NCCL", None)] == [own] * 3
    assert resolve_backend(accelerator.communication_backend) == own


def test_others_are_taken_at_their_word():
    assert resolve_backend("gloo") == "gloo" and resolve_backend("cpu:gloo") == "cpu:gloo"


def test_unknown_and_missing_backends_are_named():
    with pytest.raises(ConfigError, match="backend='smoke': torch.distributed knows no 'smoke', only .*gloo"):
        resolve_backend("smoke")
    if not dist.is_mpi_available():
        with pytest.raises(ConfigError, match="backend='mpi': this torch was built without mpi; leave backend out"):
            resolve_backend("mpi")
