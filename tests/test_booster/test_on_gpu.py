"""The parity cases with NCCL, in a world of one GPU."""

import pytest
import torch

from colossalai.testing import spawn
from tests.harness.training import Case, check_close, check_parity, reference, reference_16bit, train

PLUGINS = ("ddp", "fsdp", "zero1", "zero2")
MODELS = ("MLP", "LLA-T")


def fp32_case(plugin, model):
    return Case(plugin=plugin, model=model, optimizer="adamw", max_norm=0.05, micro=4, how="no_sync", read_grads=(0,))


def bf16_case(plugin, model, **args):
    args = tuple(args.items())
    return Case(plugin=plugin, model=model, optimizer="adamw", precision="bf16", read_grads=(0,), plugin_args=args)


def run_cases_on_gpu(rank, world_size, port, folder, cases):
    import colossalai

    colossalai.launch(rank, world_size, "localhost", port, backend="nccl")
    torch.save([train(rank, world_size, case) for case in cases], f"{folder}/{rank}.pt")


def on_gpu(cases, folder):
    spawn(run_cases_on_gpu, nprocs=1, folder=str(folder), cases=cases)
    return torch.load(folder / "0.pt")


@pytest.mark.gpu
@pytest.mark.parametrize("plugin", PLUGINS)
def test_parity_on_one_gpu(plugin, tmp_path):
    """Sums run in another order than on the CPU: 1e-4 (TF32, off by default for matrices, would give 1e-3)."""
    cases = [fp32_case(plugin, model) for model in MODELS]
    for case, result in zip(cases, on_gpu(cases, tmp_path), strict=True):
        check_parity([result], reference(case), 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("plugin", ["zero1", "zero2"])
def test_options_on_one_gpu(plugin, tmp_path):
    """bf16, offloaded masters, an overlapped all-gather, within 8 ulps: GPU kernels round 16-bit sums elsewhere."""
    cases = [
        bf16_case(plugin, "LLA-T"),
        bf16_case(plugin, "MLP", cpu_offload=True),
        bf16_case(plugin, "MLP", overlap_allgather=True),
    ]
    for case, result in zip(cases, on_gpu(cases, tmp_path), strict=True):
        wanted, ulp = reference_16bit(case, 1), torch.finfo(torch.bfloat16).eps
        check_close("gradients", result["grads"][0], wanted.grads[0], 8 * ulp)
        check_close("weights", result["params"], wanted.params, 8 * ulp)
