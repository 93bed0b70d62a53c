"""What DeepSeek-V4-Flash keeps: sizes of the released model, ring and page addressing."""

from dataclasses import replace

import pytest

from moet.models.deepseek_v4_cache import PAGE_SIZE, CacheLayout
from moet.models.deepseek_v4_config import DeepseekV4Config
from moet.models.step import check_pages
from tests.models.hash_weights import DEPLOYED, GOLDEN, GOLDEN_IDS, Piece, forward_input
from tests.models.released_config import PREVIEW_CONFIG


def released() -> DeepseekV4Config:
    return DeepseekV4Config.from_dict(PREVIEW_CONFIG)


def test_bytes_of_the_released_model() -> None:
    spec = CacheLayout(released(), "fp8", 0).spec()
    assert spec.page_size == 256
    # 584 bytes a row padded to 576, 68 an index key; 21 CSA and 20 HCA layers.
    assert spec.bytes_per_page == 21 * (37_440 + 64 * 68) + 20 * 1_728
    sizes = {g.name: g.page_bytes * len(g.layers) for g in spec.groups}
    assert sizes["window"] == 43 * 74_880  # 128 x 584 bytes, rounded up
    assert sizes["csa_state"] + sizes["index_state"] == 21 * 8 * (8192 + 2048)
    assert sizes["hca_state"] == 20 * 128 * 4096


def test_what_a_resume_needs() -> None:
    groups = CacheLayout(released(), "fp8", 0).spec().groups
    needed = {g.name for g in groups if g.resume}
    assert needed == {"window", "csa_state", "index_state"}  # HCA has nothing pending at a border
    resumed = sum(g.page_bytes * len(g.layers) for g in groups if g.resume)
    assert 4.0e6 < resumed < 5.1e6


def test_drafting_adds_rows_and_a_layer() -> None:
    plain = {g.name: g for g in CacheLayout(DEPLOYED, "fp8", 0).spec().groups}
    drafting = {g.name: g for g in CacheLayout(DEPLOYED, "fp8", 3).spec().groups}
    for name, group in plain.items():
        more = 3 if group.kind == "ring" else 0
        assert drafting[name].entries_per_page == group.entries_per_page + more
    assert len(drafting["window"].layers) == len(plain["window"].layers) + 1


def test_groups_without_layers_are_left_out() -> None:
    config = replace(GOLDEN, num_hidden_layers=2, compress_ratios=(0, 128), num_hash_layers=0)
    names = {g.name for g in CacheLayout(config, "fp32", 0).spec().groups}
    assert names == {"window", "hca_entries", "hca_state"}


@pytest.mark.parametrize("pages", [(7, -1), (7,)])
def test_a_token_without_a_page_is_noticed(pages: tuple[int, ...]) -> None:
    check_pages(forward_input([Piece(GOLDEN_IDS[:2], 254, pages=pages)]), PAGE_SIZE)
    with pytest.raises(AssertionError, match="257 tokens"):
        check_pages(forward_input([Piece(GOLDEN_IDS[:3], 254, pages=pages)]), PAGE_SIZE)
