"""Footprints against the accounting of the released checkpoints, to the byte where it is exact."""

from __future__ import annotations

from typing import Any

import pytest

from moet.errors import CheckpointError, ConfigError
from moet.models.footprint import Footprint, Share, footprint
from moet.models.synthetic import plan_checkpoint
from tests.models.released_config import PREVIEW_CONFIG

GIB = 1 << 30


def full(model: str, flavour: str | None = None) -> dict[str, Any]:
    config: dict[str, Any] = plan_checkpoint("full", flavour, model=model).texts["config.json"]
    return config


@pytest.fixture(scope="module")
def flash() -> Footprint:
    return footprint(PREVIEW_CONFIG, num_spec_tokens=2)


@pytest.fixture(scope="module")
def glm() -> Footprint:
    return footprint(full("glm-5.2", "nvfp4"), num_spec_tokens=2)


def read_bytes(model: Footprint) -> int:
    """Of weights that are not routed experts, in a step."""
    return model.dense.read.on(1) + model.head_bytes.on(1)


def test_flash_weights(flash: Footprint) -> None:
    assert read_bytes(flash) == 7_768_281_308
    assert flash.dense.bytes_on(1) == 156_015_698_140 - 147_169_738_752
    assert flash.head_bytes.on(1) == 1_059_061_760
    assert flash.draft is not None
    expert_bytes = 256 * 13_369_344
    assert flash.draft.bytes_on(1) == 3_593_787_756 - expert_bytes
    assert flash.flops_per_token + flash.head_bytes.on(1) == pytest.approx(26.54e9, rel=1e-3)


def test_flash_experts(flash: Footprint) -> None:
    assert flash.row_bytes == {"w2": 27 << 18, "fp4": 13_369_344}
    assert 43 * 256 * flash.row_bytes["w2"] / GIB == pytest.approx(72.5625)
    assert flash.num_rows == flash.num_pack_rows == 44 * 256
    assert footprint(PREVIEW_CONFIG).num_rows == 43 * 256


def test_flash_state(flash: Footprint) -> None:
    entries = {r.ratio: r for r in flash.kv_reads if r.most is None}
    assert entries[4].entry_bytes == 68
    # 3,514 bytes a token as entries go; two entries of ratio 128 fill a page of 1,728 bytes.
    pages = flash.kv.bytes_per_page / 256
    assert pages == pytest.approx(3514 + 20 * (1728 - 2 * 584) / 256 + 21 * 64 / 256, abs=0.5)
    assert footprint(PREVIEW_CONFIG).kv.bytes_per_seq == pytest.approx(15.4e6, rel=0.01)
    assert flash.kv_read_bytes(1 << 17) == pytest.approx(68e6, rel=0.02)
    assert flash.kv_read_bytes(1 << 20) == pytest.approx(480e6, rel=0.02)
    assert flash.attention_flops(1 << 20) == pytest.approx((90 + 21.5 + 2.1) * 1e9, rel=0.01)


def test_a_release_with_draft_stages_has_no_draft_to_use() -> None:
    made = footprint(full("deepseek-v4-flash", "0731"), num_spec_tokens=2)
    assert (made.num_spec_tokens, made.draft, made.num_rows) == (0, None, 43 * 256)
    assert made.num_pack_rows == 46 * 256


def test_glm_weights(glm: Footprint) -> None:
    assert read_bytes(glm) / 1e9 == pytest.approx(35.30, abs=0.005)
    fp8 = footprint(full("glm-5.2", "nvfp4"), dense_dtype="fp8")
    assert read_bytes(fp8) / 1e9 == pytest.approx(18.72, abs=0.01)
    # 743.377 B parameters without routed experts, and fp32 router biases
    values = 743_377_000_704 - 724_775_731_200 + 75 * 256
    assert glm.dense.num_values == values
    assert fp8.dense.num_values == values
    active = (glm.flops_per_token + glm.head_bytes.on(1)) / 2
    assert active == pytest.approx(40.30e9, rel=1e-3)


def test_glm_experts(glm: Footprint) -> None:
    assert glm.row_bytes["w2"] == 10_616_832
    assert 0 <= glm.row_bytes["fp4"] - 21_233_676 < 4 * 4096  # 4.5 bits a weight, aligned
    assert 75 * 256 * glm.row_bytes["w2"] / GIB == pytest.approx(189.84, abs=0.005)
    assert glm.num_rows == 76 * 256


@pytest.mark.parametrize(
    ("kv_dtype", "plain", "drafting"),
    [("bf16", 92_628, 93_912), ("fp8", 53_940, 54_728), ("nvfp4", 30_228, 30_712)],
)
def test_glm_state(kv_dtype: Any, plain: int, drafting: int) -> None:
    config = full("glm-5.2")
    for num_spec_tokens, expected in ((0, plain), (2, drafting)):
        made = footprint(config, kv_dtype=kv_dtype, num_spec_tokens=num_spec_tokens)
        assert made.kv.bytes_per_page == 64 * expected
    assert made.kv.bytes_per_seq == 0


def test_glm_reads(glm: Footprint) -> None:
    index, latent = 132 * 22 << 20, 2048 * 79 * 656
    assert glm.kv_read_bytes(1 << 20) == index + latent


def test_shares_divide_what_can_be_divided(flash: Footprint) -> None:
    assert Share(7, 5).on(2) == 9
    whole, half = flash.dense.bytes_on(1), flash.dense.bytes_on(2)
    copied = sum(share.copied for share in flash.dense.resident.values())
    assert half == pytest.approx((whole - copied) / 2 + copied, abs=16)
    table = flash.vocab_size * flash.hidden_size * 2  # of tokens, which every rank has
    assert table < copied < table + (whole - table) / 4


def test_what_a_model_does_not_have_is_refused() -> None:
    with pytest.raises(CheckpointError, match="--dense-dtype fp8"):
        footprint(PREVIEW_CONFIG, dense_dtype="fp8")
    with pytest.raises(ConfigError, match="nvfp4"):
        footprint(PREVIEW_CONFIG, kv_dtype="nvfp4")
    with pytest.raises(ConfigError, match="Llama"):
        footprint({"architectures": ["Llama"]})
