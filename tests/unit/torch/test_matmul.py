"""Products of a recorded step have PyTorch's bits, or PyTorch computes them."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import cerebro._core as _core  # noqa: E402
from cerebro.torch import native_calls  # noqa: E402
from cerebro.torch.native_calls import make_native_call  # noqa: E402

ATEN = torch.ops.aten


@pytest.fixture
def blas():
    if not native_calls.find_library_function("sgemm_"):
        pytest.skip("PyTorch's library does not export its BLAS")


def factors(rows, inner, columns, transposed=(False, False)):
    generator = torch.Generator().manual_seed(rows + 7 * inner + 31 * columns)
    a = torch.randn(rows, inner, generator=generator)
    b = torch.randn(inner, columns, generator=generator)
    if transposed[0]:
        a = a.t().contiguous().t()
    if transposed[1]:
        b = b.t().contiguous().t()
    return a, b, torch.randn(columns, generator=generator)


def made(func, args, out, **numbers):
    return make_native_call(func, func, args, {"out": out, **numbers})


def same(one, two):
    return torch.equal(one.view(torch.int32), two.view(torch.int32))


@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("rows", [1, 2, 7, 32, 256])
@pytest.mark.parametrize("inner", [1, 3, 64, 100])
@pytest.mark.parametrize("columns", [1, 2, 10, 96])
def test_products_match_pytorch_bit_for_bit(blas, rows, inner, columns, transposed):
    a, b, bias = factors(rows, inner, columns, transposed)
    for out in (torch.empty(rows, columns), torch.empty(columns, rows).t()):
        for func, args in ((ATEN.mm.out, [a, b]), (ATEN.addmm.out, [bias, a, b])):
            found = made(func, args, out)
            assert found is not None
            expected = func(*args, out=out).clone()
            out.fill_(torch.nan)
            found.compute()
            assert same(out, expected)


def test_products_unsupported_by_blas_are_left_to_pytorch():
    a, b, bias = factors(8, 6, 4)
    out = torch.empty(8, 4)
    wide = torch.randn(16, 12)
    for func, args, to, numbers in [
        (ATEN.mul.out, [out, 2.0], out, {}),
        (ATEN.mm.out, [a.double(), b.double()], out.double(), {}),
        (ATEN.addmm.out, [bias, a, b], out, {"alpha": 2}),
        (ATEN.addmm.out, [bias, a, b], out, {"beta": 0.5}),
        (ATEN.addmm.out, [bias[:1].expand(4), a, b], out, {}),
        (ATEN.addmm.out, [torch.randn(8, 4), a, b], out, {}),
        (ATEN.mm.out, [wide[::2, ::2], b], out, {}),  # rows and columns have gaps
        (ATEN.mm.out, [a, b], torch.empty(16, 8)[::2, ::2], {}),
        (ATEN.mm.out, [a[:0], b], out[:0], {}),
    ]:
        assert made(func, args, to, **numbers) is None


def test_several_threads_leave_products_to_pytorch(blas):
    a, b, _ = factors(8, 6, 4)
    torch.set_num_threads(2)
    assert made(ATEN.mm.out, [a, b], torch.empty(8, 4)) is None


def test_the_python_engine_leaves_products_to_pytorch(blas, monkeypatch):
    a, b, _ = factors(8, 6, 4)
    monkeypatch.setenv("CEREBRO_STEP_ENGINE", "python")
    assert made(ATEN.mm.out, [a, b], torch.empty(8, 4)) is None


def test_a_product_that_differs_is_left_to_pytorch(blas, monkeypatch):
    """As where PyTorch calls another function for some shapes."""
    a, b, _ = factors(8, 6, 4)
    out = torch.empty(8, 4)

    class Rounded:
        def __init__(self, *arguments):
            self.compute = _core.MatMul(*arguments)

        def __call__(self):
            self.compute()
            out[0, 0] = out[0, 0].nextafter(torch.tensor(9.0))

    monkeypatch.setattr(native_calls, "_core", type("Core", (), {"MatMul": Rounded}))
    assert made(ATEN.mm.out, [a, b], out) is None


def test_a_library_without_blas(monkeypatch):
    monkeypatch.setattr(native_calls.ctypes, "CDLL", lambda path: object())
    assert native_calls.find_library_function.__wrapped__("sgemm_") == 0


@pytest.mark.parametrize(
    ("sizes", "a", "message"),
    [((0, 2, 2), (64, 2), "empty"), ((2, 2, 2), (64, 1), "overlap"), ((2, 2, 2), (0, 2), "lacks")],
)
def test_wrong_products_are_refused(sizes, a, message):
    with pytest.raises(ValueError, match=message):
        _core.MatMul(64, (False, False), sizes, a, (64, 2), (64, 2), 0, False)
