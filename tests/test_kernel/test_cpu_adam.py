"""The native Adam, built just in time, against torch's; every instruction set this CPU has."""

import shutil

import pytest
import torch

from colossalai.kernel.kernel_loader import CPUAdamLoader

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")

SIZES = (1, 7, 16, 4095, 4096, 100_003)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path_factory.mktemp("kernels")))
    try:
        yield CPUAdamLoader().load()
    finally:
        patch.undo()


@pytest.fixture(params=["base", "avx2", "avx512"])
def isa(kernel, request):
    try:
        kernel.force_isa(request.param)
    except ValueError:
        pytest.skip(f"this CPU does not run {request.param}")
    yield request.param
    kernel.force_isa(None)


def run(kernel, n, *, decoupled=True, grad_dtype=torch.float32, copy_dtype=None, scale=-1.0, bias_correction=True):
    """Three steps of the kernel and of torch's Adam from the same start: both parameters, and the copy."""
    torch.manual_seed(n)
    p, m, v = torch.randn(n), torch.zeros(n), torch.zeros(n)
    reference = torch.nn.Parameter(p.double())
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    plain = kind([reference], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    adam = kernel.CPUAdamOptimizer(1e-2, 0.9, 0.95, 1e-8, 0.1, decoupled)
    copy = None if copy_dtype is None else torch.empty(n, dtype=copy_dtype)
    for step in (1, 2, 3):
        g = torch.randn(n).to(grad_dtype)
        reference.grad = g.double() / (scale if scale > 0 else 1.0)
        plain.step()
        adam.step(step, 1e-2, 0.9, 0.95, 1e-8, 0.1, bias_correction, p, g, m, v, scale, copy)
    return p, reference.detach(), copy, m, v


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("decoupled", [True, False])
def test_equals_torch(kernel, isa, n, decoupled):
    p, reference, *_ = run(kernel, n, decoupled=decoupled)
    assert torch.allclose(p.double(), reference, rtol=2e-6, atol=5e-7)


@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("copy_dtype", [torch.bfloat16, torch.float16])
def test_low_precision_gradients_scale_and_copies(kernel, isa, grad_dtype, copy_dtype):
    p, reference, copy, *_ = run(kernel, 10_007, grad_dtype=grad_dtype, copy_dtype=copy_dtype, scale=4.0)
    assert torch.allclose(p.double(), reference, rtol=2e-6, atol=5e-7)
    assert torch.equal(copy, p.to(copy_dtype))  # rounded as torch rounds, bit for bit


def test_without_bias_correction(kernel, isa):
    n, lr, (b1, b2), eps = 1000, 1e-2, (0.9, 0.95), 1e-8
    p, _, _, m, v = run(kernel, n, bias_correction=False, decoupled=False)
    torch.manual_seed(n)
    q, mm, vv = torch.randn(n).double(), torch.zeros(n).double(), torch.zeros(n).double()
    for _ in range(3):
        g = torch.randn(n).double() + 0.1 * q
        mm, vv = mm + (1 - b1) * (g - mm), b2 * vv + (1 - b2) * g * g
        q = q - lr * mm / (vv.sqrt() + eps)
    assert torch.allclose(p.double(), q, rtol=2e-6, atol=5e-7)
    assert torch.allclose(m.double(), mm, rtol=1e-5, atol=1e-7) and torch.allclose(v.double(), vv, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_number_is_read_and_written_as_torch_does(kernel, isa, dtype):
    """All 65536 patterns: as gradients (read), and as neighbours of parameters (written)."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    g = bits.view(dtype)
    n = g.numel()
    adam = kernel.CPUAdamOptimizer(0.0, 0.0, 0.0, 1.0, 0.0)
    m, v = torch.zeros(n), torch.zeros(n)
    adam.step(1, 0.0, 0.0, 0.0, 1.0, 0.0, False, torch.zeros(n), g, m, v)  # beta1 = 0: m becomes g
    assert torch.equal(m.nan_to_num(1.5, 2.5, 3.5), g.float().nan_to_num(1.5, 2.5, 3.5))
    finite = g.float().nan_to_num(0.0, 6e4, -6e4)
    next_up = torch.nextafter(finite, torch.tensor(float("inf")))
    halfway = finite / 2 + torch.roll(finite, 1) / 2  # ties between neighbours
    special = torch.tensor([float("nan"), 65519.99, 65520.0, 3.39e38, 1e-45, -1e-8, -0.0])
    p = torch.cat([finite, next_up, halfway, special])
    zero, copy = torch.zeros(p.numel()), torch.empty(p.numel(), dtype=dtype)
    adam.step(1, 0.0, 0.0, 0.0, 1.0, 0.0, False, p.clone(), zero, zero.clone(), zero.clone(), -1.0, copy)
    expected = p.to(dtype)
    nan = expected.isnan()
    assert torch.equal(copy.isnan(), nan)
    assert torch.equal(copy[~nan].view(torch.int16), expected[~nan].view(torch.int16))


def test_threads_give_the_same_bits(kernel):
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        two = run(kernel, 1_000_003)[0]
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(two, run(kernel, 1_000_003)[0])


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"grad": torch.ones(3)}, "grad has 3 elements, param 4"),
        ({"grad": torch.ones(4, dtype=torch.float64)}, "grad must be float32, bfloat16 or float16"),
        ({"param": torch.ones(4, dtype=torch.bfloat16)}, "param must be float32"),
        ({"exp_avg": torch.ones(8)[::2]}, "exp_avg must be contiguous"),
        ({"low_precision_copy": torch.ones(4)}, "low_precision_copy must be bfloat16 or float16"),
        ({"step": 0}, "step=0 counts from 1"),
    ],
)
def test_wrong_arguments_are_named(kernel, change, name):
    given = {
        "step": 1, "lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.0, "bias_correction": True,
        "param": torch.ones(4), "grad": torch.ones(4), "exp_avg": torch.ones(4), "exp_avg_sq": torch.ones(4),
    } | change  # fmt: skip
    with pytest.raises(RuntimeError, match=name):
        kernel.CPUAdamOptimizer(0.1, 0.9, 0.99, 1e-8, 0.0).step(**given)


def test_the_best_instruction_set_is_taken_by_itself(kernel):
    runs = []
    for name in ("base", "avx2", "avx512"):
        try:
            kernel.force_isa(name)
            runs.append(name)
        except ValueError:
            pass
    kernel.force_isa(None)
    assert kernel.isa() == runs[-1]
    with pytest.raises(ValueError, match="'mmx'"):
        kernel.force_isa("mmx")
