"""A step with state for it: rows of several sequences at scattered pages and slots."""

from __future__ import annotations

import torch
from torch import Tensor

from moet.kernels.cache import Cache, PlanedFormat
from moet.kernels.rows import Rows
from moet.models.deepseek_v4_cache import PAGE_SIZE

DECODE = [(p, p + 1) for p in (0, 2, 3, 127, 130, 255, 256, 700)]
VERIFY = [(2, 5), (125, 128), (254, 257), (510, 513), (700, 703)]
CHUNKS = [(0, 7), (250, 262), (130, 131), (640, 649)]
STEPS = {"none": [], "one": DECODE[-1:], "three": VERIFY[2:3], "decode": DECODE, "verify": VERIFY}


def make_rows(
    pieces: list[tuple[int, int]],
    *,
    short: bool,
    device: torch.device,
    fill: int = 0,
    page_size: int = PAGE_SIZE,
) -> Rows:
    """pieces: first and one past the last position of each sequence."""
    num_seqs, width = max(1, len(pieces)), 3 * PAGE_SIZE // page_size
    pages = torch.randperm(num_seqs * width + 2)[: num_seqs * width].view(num_seqs, width)
    slots = torch.randperm(num_seqs + 1)[:num_seqs].tolist()
    table = {"positions": [], "starts": [], "ends": [], "seq_slots": [], "page_rows": []}
    for i, (start, end) in enumerate(pieces):
        n = end - start
        for name, values in zip(
            table,
            (list(range(start, end)), [start] * n, [end] * n, [slots[i]] * n, [i] * n),
            strict=True,
        ):
            table[name] += values
    for name, values in table.items():
        values += [-1 if name == "positions" else 0] * fill
    return Rows(
        **{k: torch.tensor(v, dtype=torch.int64, device=device) for k, v in table.items()},
        page_table=pages.to(device),
        page_size=page_size,
        short=short,
    )


def filled(form: PlanedFormat, num_pages: int, device: torch.device) -> Cache:
    """A cache in which every entry holds random values."""
    pages = torch.zeros(num_pages, form.page_bytes, dtype=torch.uint8)
    num = num_pages * form.entries_per_page
    Cache(pages, form).write(torch.arange(num), torch.randn(num, form.width))
    return Cache(pages.to(device), form)


def paged(form: PlanedFormat, rows: Rows) -> Cache:
    return filled(form, int(rows.page_table.max()) + 1, rows.positions.device)


def ringed(form: PlanedFormat, rows: Rows) -> Cache:
    return filled(form, len(rows.page_table) + 1, rows.positions.device)


def twin(cache: Cache) -> Cache:
    return Cache(cache.pages.clone(), cache.form)


def values(cache: Cache) -> Tensor:
    num = len(cache.pages) * cache.form.entries_per_page
    return cache.read(torch.arange(num, device=cache.pages.device))


def assert_close(got: Tensor, want: Tensor, tolerance: float) -> None:
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    if want.numel():
        error = (got.float() - want.float()).abs().max()
        assert error <= tolerance * want.float().abs().max(), float(error)


def assert_close_but_for_steps(got: Cache, want: Cache, tolerance: float) -> None:
    """Entries are equal but for few values that rounded to the neighbouring code."""
    a, b = values(got), values(want)
    assert not a.isnan().any()
    off = a != b
    assert off.float().mean() < 0.01, f"{int(off.sum())} of {off.numel()} values differ"
    block = b.abs().amax(-1, keepdim=True)
    assert ((a - b).abs() <= tolerance * torch.maximum(b.abs(), block / 16)).all()
