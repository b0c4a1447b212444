"""C7: the whole plugin API on a CPU with gloo, started as a user starts it."""

import os

import torch

from colossalai.testing import spawn
from tests.harness.training import Case, check_parity, reference, train

PLUGINS = ("ddp", "fsdp", "zero1", "zero2")


def run_all(rank, world_size, port, folder):
    import torch.distributed as dist

    import colossalai

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    colossalai.launch_from_torch(backend="gloo")
    results = {"backend": dist.get_backend()}
    for plugin in PLUGINS:
        for model in ("MLP", "LLA"):
            results[plugin, model] = train(rank, world_size, Case(plugin=plugin, model=model, optimizer="sgd"))
    torch.save(results, f"{folder}/{rank}.pt")


def test_c7_every_plugin_on_gloo_in_fp32(tmp_path):
    spawn(run_all, nprocs=2, folder=str(tmp_path))
    results = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert all("gloo" in result["backend"] for result in results)
    for plugin in PLUGINS:
        for model in ("MLP", "LLA"):
            case = Case(plugin=plugin, model=model, optimizer="sgd")
            check_parity([result[plugin, model] for result in results], reference(case), 1e-6)
