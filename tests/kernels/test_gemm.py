"""The one contraction: right, and each row free of its neighbours and of the thread count."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moet.kernels.gemm import (
    grouped_linear,
    grouped_linear_fp8,
    linear,
    linear_fp8,
    linear_fp32,
    linear_share_fp8,
    matmul,
    streamed,
)
from moet.kernels.layout import to_mma_order
from moet.kernels.quant import FP8_BLOCK, Activations, e8m0_value, fp8_encode, fp8_qdq

SHAPES = [(33, 24), (96, 300), (24, 1536), (257, 512), (1, 1), (130, 1024)]


@pytest.fixture
def restored_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("num_rows", [0, 1, 15, 16, 17, 40])
@pytest.mark.parametrize(("num_out", "num_in"), SHAPES)
def test_matmul_is_a_product(num_rows: int, num_out: int, num_in: int) -> None:
    x, weight = torch.randn(num_rows, num_in), torch.randn(num_out, num_in)
    expected = (x.double() @ weight.double().t()).float()
    torch.testing.assert_close(matmul(x, weight), expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(("num_out", "num_in"), SHAPES)
def test_rows_do_not_depend_on_batch_or_threads(
    num_out: int, num_in: int, restored_threads: None
) -> None:
    x, weight = torch.randn(48, num_in), torch.randn(num_out, num_in)
    torch.set_num_threads(1)
    whole = matmul(x, weight)
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        for size in (1, 3, 17, 48):
            parts = [matmul(part, weight) for part in torch.split(x, size)]
            assert torch.equal(torch.cat(parts), whole), (num_threads, size)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 60), st.integers(1, 70), st.integers(1, 600), st.data())
def test_a_row_is_the_same_at_any_place(
    num_rows: int, num_out: int, num_in: int, data: st.DataObject
) -> None:
    row, weight = torch.randn(num_in), torch.randn(num_out, num_in)
    x = torch.randn(num_rows, num_in)
    place = data.draw(st.integers(0, num_rows - 1))
    x[place] = row
    assert torch.equal(matmul(x, weight)[place], matmul(row[None], weight)[0])


def test_memory_order_of_the_weight_does_not_show() -> None:
    x, weight = torch.randn(5, 600), torch.randn(40, 600)
    assert streamed(weight).shape == weight.shape
    assert torch.equal(matmul(x, streamed(weight)), matmul(x, weight))


def test_linears_round_once_to_the_dtype_of_the_input() -> None:
    x, weight = torch.randn(3, 256).bfloat16(), torch.randn(8, 256)
    product = matmul(x.float(), weight)
    assert torch.equal(linear(x, weight), product.bfloat16())
    assert torch.equal(linear_fp32(x, weight), product)
    assert linear(x.float(), weight).dtype == torch.float32


def test_fp8_linear_rounds_its_input() -> None:
    x, weight = torch.randn(3, 200), torch.randn(8, 200)
    expected = matmul(fp8_qdq(x, block=128), weight)
    assert torch.equal(linear_fp8(x, weight), expected)
    assert not torch.equal(linear_fp8(x, weight), linear(x, weight))


def test_grouped_linear_keeps_groups_apart() -> None:
    x, weight = torch.randn(5, 3, 24), torch.randn(3, 7, 24)
    expected = torch.einsum("tgk,gnk->tgn", x, weight)
    torch.testing.assert_close(grouped_linear(x, weight), expected)
    assert grouped_linear(x[:0], weight).shape == (0, 3, 7)


def test_codes_make_the_products_of_the_values_they_stand_for() -> None:
    x = torch.randn(10, 256).bfloat16()
    codes, exponents = fp8_encode(x.float(), block=FP8_BLOCK)
    coded = Activations(None, to_mma_order(codes.view(torch.uint8)), e8m0_value(exponents))
    matrix, groups = torch.randn(24, 256), torch.randn(2, 24, 256)
    assert torch.equal(coded.decoded(), fp8_qdq(x.float(), block=FP8_BLOCK))
    assert torch.equal(linear_fp8(coded, matrix), linear_fp8(x, matrix))
    assert torch.equal(grouped_linear_fp8(coded, groups), grouped_linear_fp8(x, groups))
    shares = [linear_share_fp8(part, matrix, num_slices=2) for part in (coded, x)]
    assert torch.equal(*shares)
    with pytest.raises(AssertionError, match="e4m3 only"):
        linear(coded, matrix)
