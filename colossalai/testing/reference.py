"""The reference: the same model, data and hyper-parameters in one process of plain torch.

[Note: REF and REF16]
REF takes the whole batch of each step, or of each micro-batch, through plain torch. REF16 does what a 16-bit plugin
promises: 16-bit weights that are cast anew from fp32 masters at each step, gradients summed in fp32 over micro-batches
and over the parts that the ranks would have had, one loss scale. Both record losses, norms, gradients and the final
parameters; comparing every tensor is the point, since a loss can be right while a gradient is wrong by half.
"""

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

Batch = dict[str, Tensor]
LossFn = Callable[[nn.Module, Batch], Tensor]
VOCAB = 101


@dataclass(frozen=True)
class TinyModel:
    """A small model with data and loss, equal in every process that asks for it.

    Attributes:
        make: builds the model; called with the seed set.
        make_batch: ``(rows, generator)`` to a batch, a dict of tensors cut along dimension 0.
        loss: the mean loss of a batch.
        rows: rows of the whole batch unless asked otherwise.
    """

    name: str
    make: Callable[[], nn.Module]
    make_batch: Callable[[int, torch.Generator], Batch]
    loss: LossFn
    rows: int

    def build(self, seed: int = 0) -> nn.Module:
        """The model with the weights of this seed; the global generator is left as it was."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.make()

    def batch(self, index: int, rows: int | None = None) -> Batch:
        """The ``index``-th batch of ``rows`` rows."""
        return self.make_batch(rows or self.rows, torch.Generator().manual_seed(1000 + index))

    @staticmethod
    def part(batch: Batch, index: int, parts: int) -> Batch:
        """The ``index``-th of ``parts`` equal parts of a batch: what that rank would get."""
        return {key: value.tensor_split(parts)[index] for key, value in batch.items()}


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 13), nn.ReLU(), nn.Linear(13, 5))


def _mlp_batch(rows: int, generator: torch.Generator) -> Batch:
    return {"x": torch.randn(rows, 7, generator=generator), "y": torch.randn(rows, 5, generator=generator)}


def _mlp_loss(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.mse_loss(model(batch["x"]).float(), batch["y"])


def _llama(tied: bool) -> nn.Module:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=tied,
            use_cache=False,
        )
    )


def _gpt2() -> nn.Module:
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel

    sizes = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, use_cache=False))


def _mixtral() -> nn.Module:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
            max_position_embeddings=64,
            use_cache=False,
        )
    )


def _text_batch(rows: int, generator: torch.Generator) -> Batch:
    ids = torch.randint(0, VOCAB, (rows, 16), generator=generator)
    return {"input_ids": ids, "labels": ids}


def _text_loss(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch).loss


def _language_model(name: str, make: Callable[[], nn.Module]) -> TinyModel:
    return TinyModel(name, make, _text_batch, _text_loss, rows=4)


TINY_MODELS: dict[str, TinyModel] = {
    model.name: model
    for model in (
        TinyModel("MLP", _mlp, _mlp_batch, _mlp_loss, rows=12),
        _language_model("LLA", lambda: _llama(tied=False)),
        _language_model("LLA-T", lambda: _llama(tied=True)),
        _language_model("GPT", _gpt2),
        _language_model("MIX", _mixtral),
    )
}
"""By name: a multi-layer perceptron, then of transformers a Llama untied and tied, a GPT-2 (tied) and a Mixtral."""


@dataclass
class Run:
    """What a training run left behind; gradients are those before clipping."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    grads: list[dict[str, Tensor]] = field(default_factory=list)
    """For each step the gradient of each parameter by name."""
    params: dict[str, Tensor] = field(default_factory=dict)
    """The working weights after the last step."""
    masters: dict[str, Tensor] = field(default_factory=dict)
    """The fp32 weights behind them; empty where there are none."""


def reference_run(
    model: nn.Module,
    make_optimizer: Callable[[nn.Module], Optimizer],
    steps: Iterable[Sequence[Batch]],
    loss: LossFn,
    max_norm: float = 0.0,
    after_step: Callable[[Optimizer], Any] | None = None,
) -> Run:
    """REF: train ``model`` in this process with plain torch.

    Args:
        model: trained in place.
        steps: for each step its micro-batches; each counts ``1 / len`` of the step.
        max_norm: clip to this gradient norm; 0 does not clip.
        after_step: called after each step, for a learning-rate scheduler.
    """
    run, optimizer = Run(), make_optimizer(model)
    for batches in steps:
        optimizer.zero_grad()
        total = 0.0
        for batch in batches:
            part = loss(model, batch) / len(batches)
            part.backward()
            total += part.item()
        run.losses.append(total)
        _clip_and_record(run, model, max_norm)
        optimizer.step()
        if after_step is not None:
            after_step(optimizer)
    run.params = _copies(model.named_parameters())
    return run


def reference_run_16bit(
    model: nn.Module,
    make_optimizer: Callable[[nn.Module], Optimizer],
    steps: Iterable[Sequence[Batch]],
    loss: LossFn,
    dtype: torch.dtype,
    *,
    parts: int = 1,
    max_norm: float = 0.0,
    loss_scale: float = 1.0,
    round_masters: bool = True,
) -> Run:
    """REF16: as :func:`reference_run`, in ``dtype`` (bfloat16 or float16) with fp32 masters.

    Args:
        parts: how many ranks would share each micro-batch; their gradients are computed apart and averaged in fp32.
        loss_scale: what the loss is multiplied by before the backward, and the summed gradients are divided by.
        round_masters: the masters start from the rounded weights, else from the fp32 ones.
    """
    masters = model.float()
    work = copy.deepcopy(masters)
    for param in work.parameters():
        param.data = param.data.to(dtype)
    if round_masters:
        _copy_weights(work, masters)
    work.register_forward_pre_hook(lambda module, args, kwargs: _cast((args, kwargs), dtype), with_kwargs=True)
    run, optimizer = Run(), make_optimizer(masters)
    for batches in steps:
        optimizer.zero_grad()
        total = 0.0
        for batch in batches:
            for index in range(parts):
                part = loss(work, TinyModel.part(batch, index, parts)) / len(batches)
                total += part.item() / parts
                (part * loss_scale).backward()
                _move_grads(work, masters, 1.0 / (loss_scale * parts))
        run.losses.append(total)
        _clip_and_record(run, masters, max_norm)
        optimizer.step()
        _copy_weights(masters, work)
    run.params, run.masters = _copies(work.named_parameters()), _copies(masters.named_parameters())
    return run


def _cast(inputs: Any, dtype: torch.dtype) -> Any:
    if isinstance(inputs, Tensor):
        return inputs.to(dtype) if inputs.is_floating_point() else inputs
    if isinstance(inputs, tuple | list):
        return type(inputs)(_cast(item, dtype) for item in inputs)
    if isinstance(inputs, dict):
        return {key: _cast(item, dtype) for key, item in inputs.items()}
    return inputs


def _copy_weights(source: nn.Module, target: nn.Module) -> None:
    with torch.no_grad():
        for one, other in zip(source.parameters(), target.parameters(), strict=True):
            other.copy_(one)


def _move_grads(work: nn.Module, masters: nn.Module, factor: float) -> None:
    for one, other in zip(work.parameters(), masters.parameters(), strict=True):
        if one.grad is not None:
            wide = one.grad.float() * factor
            other.grad = wide if other.grad is None else other.grad + wide
            one.grad = None


def _clip_and_record(run: Run, model: nn.Module, max_norm: float) -> None:
    run.grads.append({name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None})
    run.norms.append(float(clip_grad_norm_(model.parameters(), max_norm or math.inf)))


def _copies(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in named}


def tensor_errors(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, float]:
    """The error of each tensor: ``max|found - wanted| / max(max|wanted|, 1e-3 * the largest |wanted| of all)``.

    The floor is for tensors whose true value is zero, such as the gradient of a key's bias. A tensor with NaN or
    infinity on one side only, of another shape, or missing on one side has the error infinity.
    """
    exact = {name: tensor.detach().double() for name, tensor in wanted.items()}
    largest = max((_size(tensor) for tensor in exact.values()), default=0.0)
    errors = {name: math.inf for name in found.keys() ^ wanted.keys()}
    for name in found.keys() & wanted.keys():
        one, other = found[name].detach().double(), exact[name]
        if one.shape != other.shape:
            errors[name] = math.inf
            continue
        difference = torch.where(one == other, 0.0, one - other)
        difference = torch.where(one.isnan() & other.isnan(), 0.0, difference).abs()
        bad = bool((~difference.isfinite()).any())
        scale = max(_size(other), 1e-3 * largest)
        worst = float(difference.max()) if difference.numel() else 0.0
        errors[name] = math.inf if bad else worst / scale if scale else math.inf if worst else 0.0
    return dict(sorted(errors.items()))


def _size(tensor: Tensor) -> float:
    finite = tensor[tensor.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0


def worst_error(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """The largest of :func:`tensor_errors`."""
    return max(tensor_errors(found, wanted).values(), default=0.0)
