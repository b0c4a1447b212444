"""API.md's canonical flows, as scripts written for Colossal-AI 0.5.0 have them, checked against one process."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from colossalai.testing import TINY_MODELS, TinyModel
from tests.harness import run_workers
from tests.harness.training import check_close, make_plugin, whole_params

MLP = TINY_MODELS["MLP"]
EPOCHS, SAMPLES, BATCH = 2, 40, 4


def dataset():
    batch = MLP.batch(0, rows=SAMPLES)
    return TensorDataset(batch["x"], batch["y"])


def data_parallel(rank, world_size, plugin, accumulation=1):
    """Flow 1, and flow 6 with accumulation: the plugin's loader, a criterion, a scheduler on the raw optimizer."""
    from colossalai.booster import Booster
    from colossalai.nn.lr_scheduler import CosineAnnealingWarmupLR

    torch.manual_seed(7)
    plugin = make_plugin(plugin)
    booster = Booster(plugin=plugin)
    loader = plugin.prepare_dataloader(dataset(), batch_size=BATCH, shuffle=True, drop_last=True, seed=42)
    model = MLP.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = CosineAnnealingWarmupLR(optimizer, total_steps=EPOCHS * len(loader), warmup_steps=2)
    model, optimizer, criterion, loader, scheduler = booster.boost(model, optimizer, nn.MSELoss(), loader, scheduler)
    seen, losses = [], []
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        model.train()
        for index, (x, y) in enumerate(loader):
            last = (index + 1) % accumulation == 0 or index + 1 == len(loader)
            with nullcontext() if last else booster.no_sync(model, optimizer):
                loss = criterion(model(x), y) / accumulation
                booster.backward(loss, optimizer)
            if last:
                optimizer.step()
                optimizer.zero_grad()
            scheduler.step()
            seen.append((x, y))
            losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        evaluated = model(MLP.batch(1)["x"])
    return seen, losses, whole_params(model), evaluated


def one_process(batches, accumulation):
    from colossalai.nn.lr_scheduler import CosineAnnealingWarmupLR

    model = MLP.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = CosineAnnealingWarmupLR(optimizer, total_steps=len(batches), warmup_steps=2)
    per_epoch = len(batches) // EPOCHS
    for number, (x, y) in enumerate(batches):
        (nn.functional.mse_loss(model(x), y) / accumulation).backward()
        index = number % per_epoch
        if (index + 1) % accumulation == 0 or index + 1 == per_epoch:
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
    return model


@pytest.mark.fast
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("plugin", ["ddp", "fsdp", "zero1", "zero2"])
def test_data_parallel_flow(plugin, accumulation):
    results = run_workers(2, data_parallel, plugin=plugin, accumulation=accumulation)
    by_step = zip(*(seen for seen, *_ in results), strict=True)
    steps = [tuple(torch.cat(parts) for parts in zip(*both, strict=True)) for both in by_step]
    assert len(steps) == EPOCHS * SAMPLES // (2 * BATCH)
    first_epoch = torch.cat([x for x, _ in steps[: len(steps) // 2]])
    assert len(first_epoch.unique(dim=0)) == SAMPLES  # no sample twice, none left out
    assert not torch.equal(first_epoch, torch.cat([x for x, _ in steps[len(steps) // 2 :]]))
    model = one_process(steps, accumulation)
    for _, losses, params, evaluated in results:
        check_close("parameters", params, {n: p.detach() for n, p in model.named_parameters()}, 1e-5)
        assert torch.allclose(evaluated, model(MLP.batch(1)["x"]).detach(), atol=1e-5)
        assert sum(losses[-3:]) < sum(losses[:3])


def lora_flow(rank, world_size, plugin, built):
    """Flow 3: adapters first, the optimizer built before or after them."""
    import peft

    from colossalai.booster import Booster

    tiny = TINY_MODELS["LLA"]
    booster = Booster(plugin=make_plugin(plugin))
    model = tiny.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5) if built == "before" else None
    model = booster.enable_lora(model, lora_config=lora_config(peft))
    fill_adapters(model)
    optimizer = optimizer or torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    model, optimizer, *_ = booster.boost(model, optimizer)
    for step in range(3):
        booster.backward(tiny.loss(model, TinyModel.part(tiny.batch(step), rank, world_size)), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.unwrap(unwrap_peft=False).named_parameters()}


def lora_config(peft):
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", lora_dropout=0.0)


def fill_adapters(model):
    """Both matrices of every adapter non-zero, so that both have gradients from the first step on."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".lora_" in name:
                p.copy_(torch.randn(p.shape, generator=generator) / 10)


@pytest.mark.parametrize("built", ["before", "after"])
@pytest.mark.parametrize("plugin", ["ddp", "zero1", "zero2"])
def test_lora_flow(plugin, built):
    peft = pytest.importorskip("peft")
    tiny = TINY_MODELS["LLA"]
    model = peft.get_peft_model(tiny.build(), lora_config(peft))
    fill_adapters(model)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    for step in range(3):
        tiny.loss(model, tiny.batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for params in run_workers(2, lora_flow, plugin=plugin, built=built):
        check_close("parameters", params, {n: p.detach() for n, p in model.named_parameters()}, 1e-5)
        changed = {name for name in params if not torch.equal(params[name], start[name])}
        assert changed == {name for name in params if ".lora_" in name}
