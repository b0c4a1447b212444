"""Training runs of the plugins, as workers do them, and the reference runs they are compared with.

A :class:`Case` says everything about a run in plain values, so that it can be sent to workers and used as a key: the
reference of equal cases is computed once.
"""

import hashlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from colossalai.testing import TINY_MODELS, Run, TinyModel, reference_run, reference_run_16bit, tensor_errors
from colossalai.zero import LowLevelZeroOptimizer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STEPS = 3
ADAM_EPS = 1e-3  # at the default, plain torch on two halves already differs from itself by up to 3e-4


@dataclass(frozen=True)
class Case:
    """One training run; ``how`` is "plain" (repeated backward) or "no_sync" (all but the last backward inside it)."""

    plugin: str = "zero1"
    model: str = "MLP"
    optimizer: str = "sgd"
    max_norm: float = 0.0
    micro: int = 1
    how: str = "plain"
    precision: str = "fp32"
    steps: int = STEPS
    rows: int = 0
    read_grads: tuple[int, ...] = ()
    """Steps after whose backward every gradient is read; that is collective, so it changes when things are reduced."""
    plugin_args: tuple[tuple[str, object], ...] = ()

    @property
    def id(self) -> str:
        clip = f"clip{self.max_norm:g}" if self.max_norm else "noclip"
        micro = f"{self.how}{self.micro}" if self.micro > 1 else "single"
        args = "".join(f"-{key}={value}" for key, value in self.plugin_args)
        precision = "" if self.precision == "fp32" else f"-{self.precision}"
        return f"{self.model}-{self.optimizer}-{clip}-{micro}{precision}{args}"


def with_args(case: Case, **plugin_args) -> Case:
    """``case`` with more plugin arguments."""
    return replace(case, plugin_args=case.plugin_args + tuple(plugin_args.items()))


def make_optimizer(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimizer called ``name`` on the model's trainable parameters."""
    params = [p for p in model.parameters() if p.requires_grad]
    if name == "sgd":
        return torch.optim.SGD(params, lr=0.1)
    if name == "sgd1":
        return torch.optim.SGD(params, lr=1.0)
    if name == "momentum":
        return torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)
    if name == "adamw":
        return torch.optim.AdamW(params, lr=2e-3, eps=ADAM_EPS, weight_decay=0.1)
    raise KeyError(name)


def make_plugin(name: str, max_norm: float = 0.0, precision: str = "fp32", **kwargs):
    """The plugin called ddp, fsdp, zero1 or zero2."""
    from colossalai.booster.plugin import LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin

    if name == "ddp":
        return TorchDDPPlugin(**kwargs)
    if name == "fsdp":
        return TorchFSDPPlugin(**kwargs)
    stage = int(name.removeprefix("zero"))
    return LowLevelZeroPlugin(**{"stage": stage, "precision": precision, "max_norm": max_norm} | kwargs)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU of a tensor that may be sharded; collective then."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().cpu().clone()


def whole_params(model) -> dict[str, torch.Tensor]:
    """The working weights of a boosted model by name."""
    if hasattr(model, "_force_wait_all_gather"):
        model._force_wait_all_gather()
    return {name: whole(p) for name, p in model.unwrap().named_parameters()}


def whole_grads(model, optimizer) -> dict[str, torch.Tensor]:
    """What ``get_param_grad`` gives for each parameter that has a gradient."""
    found = {name: optimizer.get_param_grad(p) for name, p in model.unwrap().named_parameters()}
    return {name: grad.float().cpu() for name, grad in found.items() if grad is not None}


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """Equal exactly if every bit of every tensor is."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(name.encode() + tensors[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


@dataclass(frozen=True)
class Recipe:
    """What is trained, apart from how it is spread: for workers and reference alike."""

    build: Callable[[], torch.nn.Module]
    optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer]
    windows: Callable[[], list[list[dict]]]
    """For each step its micro-batches, each the whole batch of all ranks."""
    loss: Callable[[torch.nn.Module, dict], torch.Tensor]

    def reference(self, max_norm: float = 0.0, parts: int = 1) -> Run:
        """REF of this recipe; with ``parts`` the mean of the losses of that many ranks' parts."""

        def mean_of_parts(model: torch.nn.Module, batch: dict) -> torch.Tensor:
            return sum(self.loss(model, TinyModel.part(batch, index, parts)) for index in range(parts)) / parts

        return reference_run(self.build(), self.optimizer, self.windows(), self.loss if parts == 1 else mean_of_parts, max_norm)


def mlp_windows(steps: int = STEPS, micro: int = 1, rows: int | None = None) -> list[list[dict]]:
    """Batches for anything that maps 7 features to 5."""
    return batches_of(Case(steps=steps, micro=micro, rows=rows or 0))


def fit(
    rank: int,
    world_size: int,
    recipe: Recipe,
    plugin,
    *,
    max_norm: float = 0.0,
    how: str = "plain",
    read_grads: tuple[int, ...] = (),
    same_data: bool = False,
    booster_args: dict | None = None,
) -> dict:
    """One rank's training of ``recipe`` under ``plugin``: losses, norms, gradients that were read, parameters, digests.

    ``max_norm`` clips by ``clip_grad_by_norm``, where the user does it (DDP, FSDP); ZeRO's is an argument of its
    plugin. With ``same_data`` every rank takes the whole batch: mean gradients are then bitwise those of one process.
    """
    from colossalai.booster import Booster

    booster = Booster(plugin=plugin, **(booster_args or {}))
    model = recipe.build()
    model, optimizer, *_ = booster.boost(model, recipe.optimizer(model))
    losses, norms, grads = [], [], {}
    for step, batches in enumerate(recipe.windows()):
        place = (0, 1) if same_data else (rank, world_size)
        losses.append(run_window(recipe.loss, how, booster, model, optimizer, batches, place))
        if step in read_grads:
            grads[step] = whole_grads(model, optimizer)
        norm = optimizer.clip_grad_by_norm(max_norm) if max_norm else None
        optimizer.step()
        if isinstance(norm, torch.Tensor):
            norm = float(whole(norm))
        norms.append(optimizer.get_grad_norm() if isinstance(optimizer, LowLevelZeroOptimizer) else norm)
        optimizer.zero_grad()
    params = whole_params(model)
    result = {
        "losses": losses,
        "norms": norms,
        "digest": digest(params),
        "grad_digest": [digest(g) for g in grads.values()],
    }
    return result | ({"params": params, "grads": grads} if rank == 0 else {})


def run_window(loss_of, how: str, booster, model, optimizer, batches: list, place: tuple[int, int]) -> float:
    """Forward and backward of one step's micro-batches on this rank's part of each; returns the mean loss."""
    total, device = 0.0, next(model.parameters()).device
    for number, batch in enumerate(batches):
        inside = how == "no_sync" and number < len(batches) - 1
        part = {key: value.to(device) for key, value in TinyModel.part(batch, *place).items()}
        with booster.no_sync(model, optimizer) if inside else nullcontext():
            loss = loss_of(model, part) / len(batches)
            booster.backward(loss, optimizer)
        total += loss.item()
    return total


def train(rank: int, world_size: int, case: Case) -> dict:
    """One rank's training run of a case."""
    zero = case.plugin.startswith("zero")
    plugin = make_plugin(case.plugin, case.max_norm, case.precision, **dict(case.plugin_args))
    max_norm = 0.0 if zero else case.max_norm
    return fit(rank, world_size, recipe_of(case), plugin, max_norm=max_norm, how=case.how, read_grads=case.read_grads)


def recipe_of(case: Case) -> Recipe:
    """The recipe that a case names."""
    tiny = TINY_MODELS[case.model]
    return Recipe(tiny.build, lambda m: make_optimizer(case.optimizer, m), lambda: batches_of(case), tiny.loss)


def batches_of(case: Case) -> list[list[dict]]:
    """For each step its micro-batches, whole."""
    tiny = TINY_MODELS[case.model]
    return [[tiny.batch(step * case.micro + m, case.rows or None) for m in range(case.micro)] for step in range(case.steps)]


@lru_cache(maxsize=256)
def _reference(model: str, optimizer: str, max_norm: float, micro: int, steps: int, rows: int) -> Run:
    return recipe_of(Case(model=model, optimizer=optimizer, micro=micro, steps=steps, rows=rows)).reference(max_norm)


def reference(case: Case) -> Run:
    """REF of a case: the same for all plugins and world sizes."""
    return _reference(case.model, case.optimizer, case.max_norm, case.micro, case.steps, case.rows)


def reference_16bit(case: Case, world_size: int, loss_scale: float = 1.0) -> Run:
    """REF16 of a case: gradients of the ranks' parts are computed apart, since 16-bit rounding depends on the cut."""
    recipe = recipe_of(case)
    return reference_run_16bit(
        recipe.build(),
        recipe.optimizer,
        recipe.windows(),
        recipe.loss,
        DTYPES[case.precision],
        parts=world_size,
        max_norm=case.max_norm,
        loss_scale=loss_scale,
    )


def check_equal_on_ranks(results: list[dict]) -> None:
    """Weights and gradients are the same, bit for bit, on every rank."""
    assert len({result["digest"] for result in results}) == 1, "weights differ between ranks"
    assert len({tuple(result["grad_digest"]) for result in results}) == 1, "gradients differ between ranks"


def mean_losses(results: list[dict]) -> list[float]:
    """The mean over the ranks for each step."""
    return [sum(step) / len(step) for step in zip(*(result["losses"] for result in results), strict=True)]


def check_parity(results: list[dict], wanted: Run, tolerance: float = 1e-5) -> None:
    """Losses, norms, the gradients that were read and all parameters are the reference's."""
    first = results[0]
    check_close("loss", dict(enumerate(mean_losses(results))), dict(enumerate(wanted.losses)), tolerance)
    for rank, result in enumerate(results):
        for step, norm in enumerate(result["norms"]):
            if norm is not None:
                check_close(f"norm on rank {rank}", {step: norm}, {step: wanted.norms[step]}, tolerance)
    for step, grads in first["grads"].items():
        check_close(f"gradients of step {step}", grads, wanted.grads[step], tolerance)
    check_close("parameters", first["params"], wanted.params, tolerance)
    check_equal_on_ranks(results)


def check_close(what: str, found: dict, wanted: dict, tolerance: float) -> None:
    """No tensor, or number, has a relative error above ``tolerance``; names those that do."""
    as_tensors = [{str(k): torch.as_tensor(v) for k, v in values.items()} for values in (found, wanted)]
    bad = {name: f"{error:.2e}" for name, error in tensor_errors(*as_tensors).items() if not error <= tolerance}
    assert not bad, f"{what}: {len(bad)} of {len(wanted)} with an error above {tolerance:g}: {bad}"
