"""KV entries as bytes: sizes, layouts, round trips, and writes that stay in their place."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moet.errors import ConfigError
from moet.kernels.cache import EntryFormat, Fp8Rows, Mxfp4Rows, PlainRows
from moet.kernels.quant import fp8_encode

FORMS = {
    "fp32": lambda: PlainRows(24, 5, torch.float32),
    "bf16": lambda: PlainRows(24, 5, torch.bfloat16),
    "fp8": lambda: Fp8Rows(128, 16, 5),
    "mxfp4": lambda: Mxfp4Rows(64, 5),
}


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> EntryFormat:
    made: EntryFormat = FORMS[request.param]()
    return made


def test_bytes_of_the_released_model() -> None:
    assert Fp8Rows(448, 64, 64).page_bytes == 37_440  # 64 x 584, rounded up to a multiple of 576
    assert Fp8Rows(448, 64, 2).page_bytes == 1_728
    assert Mxfp4Rows(128, 64).page_bytes == 64 * 68
    assert PlainRows(512, 128, torch.float32).page_bytes == 128 * 2048


def test_fp8_page_is_data_then_scales() -> None:
    form = Fp8Rows(448, 64, 4)
    pages = torch.zeros(2, form.page_bytes, dtype=torch.uint8)
    row = torch.randn(1, 512)
    form.write(pages, torch.tensor([6]), row)  # page 1, offset 2
    codes, scale = fp8_encode(row[:, :448], block=64)
    assert torch.equal(pages[1, 2 * 576 : 2 * 576 + 448], codes[0].view(torch.uint8))
    rope = pages[1, 2 * 576 + 448 : 3 * 576].view(torch.bfloat16)
    assert torch.equal(rope, row[0, 448:].bfloat16())
    scales = pages[1, 4 * 576 + 2 * 8 : 4 * 576 + 3 * 8]
    assert torch.equal(scales[:7], scale[0])
    assert scales[7] == 0
    assert pages[0].count_nonzero() == 0


def test_mxfp4_page_is_nibbles_then_exponents() -> None:
    form = Mxfp4Rows(32, 2)
    pages = torch.zeros(1, form.page_bytes, dtype=torch.uint8)
    form.write(pages, torch.tensor([1]), torch.tensor([[6.0, -1.0] + [0.0] * 30]))
    assert pages[0, 16] == 7 | (0b1010 << 4)  # low nibble first
    assert pages[0, 33] == 127


def test_what_is_read_is_what_round_says(form: EntryFormat) -> None:
    pages = torch.full((4, form.page_bytes), 0x7F, dtype=torch.uint8)
    rows = torch.randn(7, form.width) * 5
    slots = torch.tensor([19, 0, 3, 11, 5, 4, 8])
    form.write(pages, slots, rows)
    assert torch.equal(form.read(pages, slots), form.round(rows))
    assert form.read(pages, slots[:0]).shape == (0, form.width)


def test_a_row_is_encoded_alone(form: EntryFormat) -> None:
    rows = torch.randn(17, form.width)
    one_by_one = torch.cat([form.round(row[None]) for row in rows])
    assert torch.equal(form.round(rows), one_by_one)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(FORMS)), st.sets(st.integers(0, 19), max_size=8), st.data())
def test_writes_touch_their_own_slots_only(name: str, taken: set[int], data: st.DataObject) -> None:
    form = FORMS[name]()
    pages = torch.randint(0, 256, (4, form.page_bytes), dtype=torch.uint8)
    before = pages.clone()
    slots = [s if data.draw(st.booleans()) else -1 for s in sorted(taken)]
    form.write(pages, torch.tensor(slots, dtype=torch.int64), torch.randn(len(slots), form.width))
    others = torch.tensor([s for s in range(20) if s not in slots], dtype=torch.int64)
    for plane, old in zip(form._planes.views(pages), form._planes.views(before), strict=True):
        assert torch.equal(plane[others // 5, others % 5], old[others // 5, others % 5])


def test_padding_slot_is_skipped_and_not_the_last_one(form: EntryFormat) -> None:
    pages = torch.zeros(2, form.page_bytes, dtype=torch.uint8)
    form.write(pages, torch.tensor([-1, -1]), torch.randn(2, form.width))
    assert pages.count_nonzero() == 0


def test_widths_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="24"):
        Fp8Rows(24, 8, 4)
    with pytest.raises(ConfigError, match="16"):
        Mxfp4Rows(16, 4)
