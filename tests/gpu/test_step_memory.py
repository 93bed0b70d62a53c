"""What a chunk takes of a GPU is what the plan reserves for it, and not much less."""

from __future__ import annotations

import pytest
import torch

from moet.config import KVDtype, ModelSettings
from moet.kernels.device_gemm import Device
from moet.kernels.triton_indexer import SCORE_BYTES
from moet.models.base import ForwardInput
from moet.models.dummy import DummyOptions
from moet.models.footprint import footprint
from moet.models.synthetic import MODEL_NAME as V4
from moet.models.synthetic_glm import MODEL_NAME as GLM
from moet.runtime.dummy import dummy_model, preset_config

TOKENS = 4096


@pytest.mark.parametrize(("name", "kv_dtype"), [(V4, "fp8"), (GLM, "nvfp4")])
def test_a_chunk_takes_what_is_planned(name: str, kv_dtype: KVDtype, gpu: Device) -> None:
    raw, settings = preset_config(name, "small"), ModelSettings(arch=gpu.arch)
    made = dummy_model(raw, settings, gpu, kv_dtype=kv_dtype, options=DummyOptions(skew=0.5))
    model, spec = made.model, made.model.kv_cache_spec()
    num_pages = -(-TOKENS // spec.page_size)
    kv = {
        group.name: torch.zeros(
            len(group.layers),
            num_pages if group.kind == "paged" else 1,
            group.page_bytes,
            dtype=torch.uint8,
            device=gpu.torch_device,
        )
        for group in spec.groups
    }
    inputs = ForwardInput(
        token_ids=torch.randint(2, 500, (TOKENS,), generator=torch.Generator().manual_seed(3)),
        positions=torch.arange(TOKENS),
        cu_seqlens_q=(0, TOKENS),
        seq_slots=torch.zeros(1, dtype=torch.int64),
        page_table=torch.arange(num_pages).unsqueeze(0),
        seq_lens=(TOKENS,),
        logits_indices=torch.tensor([TOKENS - 1]),
    )
    model.forward(inputs, kv, made.experts)  # compiles
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model.forward(inputs, kv, made.experts)
    taken = torch.cuda.max_memory_allocated() - before
    planned = footprint(raw, kv_dtype=kv_dtype).step_bytes(TOKENS, 1)
    scores = min(SCORE_BYTES, 4 * TOKENS * TOKENS)
    assert taken <= planned + scores, f"{taken} bytes taken, {planned} planned beside scores"
    assert planned <= 1.6 * taken, f"{taken} bytes taken, {planned} planned"
