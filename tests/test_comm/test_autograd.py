"""Each pair is its own adjoint, and networks built from them have one process's gradients. float64 throughout."""

import pytest
import torch

from colossalai import comm
from colossalai.comm import autograd as pair
from colossalai.utils.errors import ConfigError
from tests.test_comm.data import make

pytestmark = pytest.mark.fast
TIGHT = dict(rtol=1e-12, atol=1e-12)

# (pair, whether the input is one number held by all ranks, whether the output is, shape in, shape out) for N ranks
PAIRS = {
    "copy": (pair.copy, True, False, lambda n: (2, 3), lambda n: (2, 3)),
    "reduce": (pair.reduce, False, True, lambda n: (2, 3), lambda n: (2, 3)),
    "gather": (lambda x: pair.gather(x, 1), False, True, lambda n: (2, 3, 2), lambda n: (2, 3 * n, 2)),
    "scatter": (lambda x: pair.scatter(x, -1), True, False, lambda n: (2, 3 * n), lambda n: (2, 3)),
    "gather_reduce": (lambda x: pair.gather_reduce(x, 1), False, False, lambda n: (2, 3, 2), lambda n: (2, 3 * n, 2)),
    "reduce_scatter": (lambda x: pair.reduce_scatter(x, 0), False, False, lambda n: (2 * n, 3), lambda n: (2, 3)),
    "exchange": (lambda x: pair.exchange(x, 2, 1), False, False, lambda n: (2, 3, 2 * n), lambda n: (2, 3 * n, 2)),
    "shift": (lambda x: pair.shift(x, 1), False, False, lambda n: (2, 3), lambda n: (2, 3)),
    "shift back": (lambda x: pair.shift(x, -2), False, False, lambda n: (2, 3), lambda n: (2, 3)),
}


def inner_product(left, right, replicated):
    """Over all ranks; a number that all ranks hold counts once."""
    total = (left * right).sum().detach().clone()
    comm.all_reduce(total, op="mean" if replicated else "sum")
    return total.item()


def adjoints(rank, world_size):
    results = {}
    for name, (function, in_replicated, out_replicated, shape_in, shape_out) in PAIRS.items():
        x = make(0 if in_replicated else rank, shape_in(world_size), torch.float64, seed=1).requires_grad_()
        y = make(0 if out_replicated else rank, shape_out(world_size), torch.float64, seed=2).requires_grad_()
        out = function(x)
        assert out.shape == y.shape and out.is_contiguous()
        # An expanded, strided gradient must do as well; and the gradient of the gradient is the forward again.
        (grad,) = torch.autograd.grad(out, x, y, create_graph=True)
        assert grad.shape == x.shape
        results[name] = inner_product(out, y, out_replicated), inner_product(x, grad, in_replicated)
        z = make(0 if in_replicated else rank, x.shape, torch.float64, seed=3)
        if not (in_replicated or out_replicated):
            (again,) = torch.autograd.grad(grad, y, z)
            torch.testing.assert_close(again, function(z), **TIGHT)
        before = y.detach().clone()
        function(x).sum().backward()
        assert torch.equal(y, before)
    return results


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_pair_is_adjoint(workers, world_size):
    for results in workers(world_size).run(adjoints):
        assert set(results) == set(PAIRS)
        for name, (forward, backward) in results.items():
            assert forward == pytest.approx(backward, rel=1e-12), name


def weights(shape, seed):
    return make(0, shape, torch.float64, seed).requires_grad_()


def norm(x, scale):
    return x * scale / x.square().mean(-1, keepdim=True).sqrt()


def one_process_block(n):
    x, scale, up, down = weights((2, 2 * n, 6), 1), weights((6,), 2), weights((6, 4 * n), 3), weights((4 * n, 6), 4)
    loss = (x + torch.nn.functional.gelu(norm(x, scale) @ up) @ down).square().sum()
    loss.backward()
    return loss.item(), x.grad, scale.grad, up.grad, down.grad


def tensor_parallel(rank, n):
    """Columns of one weight, rows of the next: copy in, reduce out."""
    loss, x_grad, scale_grad, up_grad, down_grad = one_process_block(n)
    x, scale = weights((2, 2 * n, 6), 1), weights((6,), 2)
    up = weights((6, 4 * n), 3).detach()[:, 4 * rank : 4 * rank + 4].clone().requires_grad_()
    down = weights((4 * n, 6), 4).detach()[4 * rank : 4 * rank + 4].clone().requires_grad_()
    hidden = torch.nn.functional.gelu(pair.copy(norm(x, scale)) @ up)
    mine = (x + pair.reduce(hidden @ down)).square().sum()
    mine.backward()
    assert mine.item() == pytest.approx(loss, rel=1e-12)
    for grad, expected in ((x.grad, x_grad), (scale.grad, scale_grad)):
        torch.testing.assert_close(grad, expected, **TIGHT)
    torch.testing.assert_close(up.grad, up_grad[:, 4 * rank : 4 * rank + 4], **TIGHT)
    torch.testing.assert_close(down.grad, down_grad[4 * rank : 4 * rank + 4], **TIGHT)


def sequence_parallel(rank, n):
    """The same with activations cut along the sequence between the weights."""
    loss, x_grad, scale_grad, up_grad, down_grad = one_process_block(n)
    x, scale = weights((2, 2 * n, 6), 1), weights((6,), 2)
    up = weights((6, 4 * n), 3).detach()[:, 4 * rank : 4 * rank + 4].clone().requires_grad_()
    down = weights((4 * n, 6), 4).detach()[4 * rank : 4 * rank + 4].clone().requires_grad_()
    part = pair.scatter(x, 1)
    hidden = torch.nn.functional.gelu(pair.gather_reduce(norm(part, pair.copy(scale)), 1) @ up)
    mine = pair.gather(part + pair.reduce_scatter(hidden @ down, 1), 1).square().sum()
    mine.backward()
    assert mine.item() == pytest.approx(loss, rel=1e-12)
    for grad, expected in ((x.grad, x_grad), (scale.grad, scale_grad)):
        torch.testing.assert_close(grad, expected, **TIGHT)
    torch.testing.assert_close(up.grad, up_grad[:, 4 * rank : 4 * rank + 4], **TIGHT)
    torch.testing.assert_close(down.grad, down_grad[4 * rank : 4 * rank + 4], **TIGHT)


def attention(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
    ).transpose(1, 2)


def ulysses(rank, n):
    """(B, S/n, H, D) -> (B, S, H/n, D), attention, and back."""
    whole = [weights((2, 3 * n, 2 * n, 4), seed) for seed in (1, 2, 3)]
    attention(*whole).square().sum().backward()
    mine = [t.detach()[:, 3 * rank : 3 * rank + 3].clone().requires_grad_() for t in whole]
    out = pair.exchange(attention(*(pair.exchange(t, 2, 1) for t in mine)), 1, 2)
    out.square().sum().backward()
    for part, full in zip(mine, whole, strict=True):
        torch.testing.assert_close(part.grad, full.grad[:, 3 * rank : 3 * rank + 3], **TIGHT)


def ring(rank, n):
    """Each rank's part meets every other's: a sum over pairs, as in ring attention."""
    whole = weights((n, 5), 1)
    torch.sin(whole[:, None] * whole[None]).sum().backward()
    mine = whole.detach()[rank].clone().requires_grad_()
    guest, loss = mine, 0.0
    for _ in range(n):
        loss = loss + torch.sin(mine * guest).sum()
        guest = pair.shift(guest)
    loss.backward()
    torch.testing.assert_close(mine.grad, whole.grad[rank], **TIGHT)


NETWORKS = {"tensor": tensor_parallel, "sequence": sequence_parallel, "ulysses": ulysses, "ring": ring}


def network(rank, world_size, name):
    NETWORKS[name](rank, world_size)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_are_those_of_one_process(workers, world_size, name):
    workers(world_size).run(network, name=name)


def unusual(rank, world_size):
    with pytest.raises(ConfigError, match="dim=1 .* does not divide"):
        pair.scatter(torch.ones(2, 3), 1)
    x = torch.ones(2, requires_grad=True)
    assert pair.shift(x, world_size) is x
    # Gradients arrive expanded (a sum's) and must not be written to; inputs of 16 bits keep their dtype.
    half = torch.ones(2, 4, dtype=torch.bfloat16, requires_grad=True)
    pair.copy(half.t()).sum().backward()
    assert half.grad.dtype == torch.bfloat16 and half.grad.tolist() == [[world_size] * 4] * 2
    with torch.no_grad():
        assert pair.reduce(x).tolist() == [world_size] * 2 and x.tolist() == [1, 1]


def test_unusual_inputs(workers):
    workers(2).run(unusual)


def test_one_process_returns_its_input():
    x = torch.ones(2, 2, requires_grad=True)
    assert pair.copy(x) is pair.reduce(x) is pair.gather(x, 0) is pair.scatter(x, 0) is x
    assert pair.gather_reduce(x, 1) is pair.reduce_scatter(x, 1) is pair.exchange(x, 0, 1) is pair.shift(x) is x
