"""Which part of a parameter an optimizer must see to work as it would on the whole.

Element-wise optimizers (Adam, SGD, ...) run on any flat piece. Norm-based ones (LAMB, LARS) run on pieces if they can ask for the
norm of the whole; ours do, through their ``segment_norms``. Matrix ones (Adafactor, Muon) use rows and columns: they get each
tensor whole, on one owner rank. An optimizer not known here is tried once on a toy.
"""

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from enum import Enum

import torch
from torch import Tensor
from torch.optim import Optimizer

from colossalai import comm
from colossalai.logging import get_dist_logger
from colossalai.nn.optimizer import CPUAdam, FusedAdam, FusedSGD, HybridAdam
from colossalai.utils.errors import ConfigError

ELEMENTWISE = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
    CPUAdam,
    FusedAdam,
    FusedSGD,
    HybridAdam,
)
WHOLE = (torch.optim.Adafactor, torch.optim.Muon)
REFUSED = {
    torch.optim.LBFGS: "it calls the model again within a step",
    torch.optim.SparseAdam: "it needs sparse gradients; use AdamW with Embedding(sparse=False)",
}


class OptimizerKind(Enum):
    """How parameters are handed to an optimizer."""

    ELEMENTWISE = "flat pieces"
    SEGMENT_NORMS = "flat pieces, with the norms of the whole tensors"
    WHOLE = "whole tensors, each on one owner rank"


def optimizer_kind(optim: Optimizer) -> OptimizerKind:
    """The kind of ``optim``.

    Raises:
        ConfigError: for optimizers driven by a closure or by sparse gradients.
    """
    cls = type(optim)
    for refused, reason in REFUSED.items():
        if isinstance(optim, refused):
            raise ConfigError(f"optimizer {cls.__name__} cannot be sharded: {reason}. Use TorchDDPPlugin or another optimizer")
    if closure_driven(cls):
        raise ConfigError(f"optimizer {cls.__name__} needs a closure in step(), which ZeRO cannot run: use TorchDDPPlugin")
    if hasattr(optim, "segment_norms"):
        return OptimizerKind.SEGMENT_NORMS
    if cls in WHOLE:
        return OptimizerKind.WHOLE
    if cls in ELEMENTWISE:
        return OptimizerKind.ELEMENTWISE
    if mixes_tensors(optim):
        raise ConfigError(
            f"optimizer {cls.__name__} cannot be sharded: the update of one tensor depends on the others (a norm of all gradients?), "
            "which are not all on one rank. Use TorchDDPPlugin or another optimizer"
        )
    if runs_on_pieces(optim):
        return OptimizerKind.ELEMENTWISE
    get_dist_logger().info(
        f"optimizer {cls.__name__} does not give the same result on flat pieces: each tensor is kept whole on one rank",
        ranks=[0],
    )
    return OptimizerKind.WHOLE


def closure_driven(cls: type) -> bool:
    """Whether ``step`` has a closure without default."""
    closure = inspect.signature(cls.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def runs_on_pieces(optim: Optimizer) -> bool:
    """Whether two toy steps of ``optim`` on flat halves give what they give on a whole matrix and a whole vector.

    An optimizer that cannot be tried (it raises, it draws random numbers) is taken not to.
    """
    halves = lambda tensors: [half for t in tensors for half in t.reshape(-1).chunk(2)]
    with comm.real_tensors(), torch.random.fork_rng(devices=[]):
        values, grads = _toy()
        try:
            whole = toy_steps(optim, values, grads)
            pieces = toy_steps(optim, halves(values), [halves(g) for g in grads])
        except Exception:
            return False
        return all(torch.equal(a, b) for a, b in zip(halves(whole), pieces))


def mixes_tensors(optim: Optimizer) -> bool:
    """Whether two toy steps of ``optim`` on two tensors differ from those on each alone; False where it cannot be tried."""
    with comm.real_tensors(), torch.random.fork_rng(devices=[]):
        values, grads = _toy()
        try:
            seed = torch.get_rng_state()
            together = toy_steps(optim, values, grads)
            torch.set_rng_state(seed)
            again = toy_steps(optim, values, grads)
            alone = [toy_steps(optim, [v], [[step[i]] for step in grads])[0] for i, v in enumerate(values)]
        except Exception:
            return False
        repeats = all(torch.equal(a, b) for a, b in zip(together, again))
        return repeats and not all(torch.allclose(a, b, rtol=1e-6, atol=1e-7) for a, b in zip(together, alone))


def check_runs_on(optim: Optimizer, cut: Callable[[Tensor], Tensor], join: Callable[[Tensor], Tensor]) -> None:
    """Raise ConfigError unless ``optim`` gives on tensors cut by ``cut`` what it gives on whole ones; collective as these are."""
    if type(optim) in ELEMENTWISE:
        return
    values, grads = _toy()
    name, reason = type(optim).__name__, "gives another result on sharded tensors"
    try:
        with torch.random.fork_rng(devices=[]):
            whole = toy_steps(optim, values, grads)
            pieces = toy_steps(optim, [cut(v) for v in values], [[cut(g) for g in step] for step in grads])
        if all(torch.allclose(a, join(b), atol=1e-6) for a, b in zip(whole, pieces)):
            return
    except Exception as error:
        reason = f"cannot step sharded tensors ({str(error).splitlines()[0][:120]})"
    raise ConfigError(f"optimizer {name} {reason}: use LowLevelZeroPlugin, which keeps its tensors whole, or another optimizer")


def _toy() -> tuple[list[Tensor], list[list[Tensor]]]:
    """A matrix and a vector, and gradients of both for two steps."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(6, 4, generator=generator), torch.randn(8, generator=generator)]
    return values, [[torch.randn(v.shape, generator=generator) for v in values] for _ in range(2)]


def toy_steps(optim: Optimizer, values: list, grads: list[list]) -> list:
    """The values after one step of a copy of ``optim`` for each list of gradients."""
    twin = object.__new__(type(optim))
    twin.__dict__.update(optim.__dict__)
    twin.__dict__.pop("step", None)  # a scheduler's patch, bound to the original
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        twin.__dict__[name] = OrderedDict()
    params = [torch.nn.Parameter(v.clone()) for v in values]
    options = {key: value for key, value in optim.param_groups[0].items() if key != "params"}
    twin.state, twin.param_groups = defaultdict(dict), [{**options, "params": params}]
    for step in grads:
        for p, g in zip(params, step):
            p.grad = g.clone()
        twin.step()
    return [p.detach() for p in params]
