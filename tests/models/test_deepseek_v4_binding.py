"""Which ops a V4 model gets on a GPU architecture, and that what is missing is named."""

import pytest
import torch

from moet.errors import UnsupportedError
from moet.kernels.attention import window_attention, window_attention_q
from moet.kernels.attention_inputs import attention_inputs
from moet.kernels.cache import Fp8Rows, Mxfp4Rows, PlainRows, copy_entries, write_kv
from moet.kernels.compressor import compress
from moet.kernels.hyper_connection import hc_enter, hc_head_norm, hc_pass, hc_post
from moet.kernels.indexer import index_query, index_select
from moet.kernels.norm import rms_norm
from moet.kernels.registry import GPU_ARCHS, Op
from moet.kernels.rope import norm_rope_heads

ROWS, KEYS = Fp8Rows(448, 64, 64), Mxfp4Rows(128, 64)
STATE = PlainRows(2048, 10, torch.float32)
INDEX_STATE = PlainRows(512, 10, torch.float32)
RELEASED = [
    (rms_norm, {}),
    (norm_rope_heads, {"head_dim": 512, "rope_dim": 64}),
    (write_kv, {"form": ROWS}),
    (copy_entries, {"form": ROWS}),
    (compress, {"state": STATE, "entries": ROWS, "ratio": 4, "rotate": False}),
    (compress, {"state": STATE, "entries": ROWS, "ratio": 128, "rotate": False}),
    (compress, {"state": STATE, "entries": KEYS, "ratio": 4, "rotate": True}),
    (index_query, {"head_dim": 128, "rope_dim": 64, "quantised": True}),
    (index_select, {"keys": KEYS, "num_heads": 64, "top_k": 512}),
    (window_attention, {"form": ROWS, "num_heads": 64}),
    (window_attention_q, {"form": ROWS, "num_heads": 64}),
    *(
        (attention_inputs, {"rank": 1024, "form": ROWS, "compressors": sites})
        for sites in (
            (),
            ((STATE, ROWS, 4, False), (INDEX_STATE, KEYS, 4, True)),
            ((STATE, ROWS, 128, False),),
        )
    ),
    *((op, {"mult": 4, "dim": 4096}) for op in (hc_enter, hc_pass, hc_post, hc_head_norm)),
    *((op, {"mult": 4, "dim": 4096, "placed": True}) for op in (hc_enter, hc_pass, hc_head_norm)),
]


@pytest.mark.parametrize("arch", GPU_ARCHS)
@pytest.mark.parametrize(("op", "facts"), RELEASED)
def test_released_shapes_have_an_implementation(
    op: Op[..., object], facts: dict[str, object], arch: str
) -> None:
    assert op.bind(arch=arch, **facts) is not op.reference


@pytest.mark.parametrize(
    ("op", "facts"),
    [
        (window_attention, {"form": PlainRows(512, 64, torch.bfloat16), "num_heads": 64}),
        (write_kv, {"form": Fp8Rows(448, 128, 64)}),
        (index_select, {"keys": KEYS, "num_heads": 64, "top_k": 500}),
        (index_query, {"head_dim": 128, "rope_dim": 64, "quantised": False}),
        (hc_enter, {"mult": 4, "dim": 4000}),
    ],
)
def test_what_no_kernel_takes_is_named(op: Op[..., object], facts: dict[str, object]) -> None:
    with pytest.raises(UnsupportedError, match=f"{op.name} for arch=sm90a.*tried: .*triton"):
        op.bind(arch="sm90a", **facts)
