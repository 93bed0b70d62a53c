"""What narrow KV rows cost GLM-5.2's attention: relative error of its output, layer by layer.

`python bench/kv_error.py` writes results/kv_error.json. Each layer gets the same inputs and the
same selection twice, over bf16 rows and over fp8 or nvfp4 ones, so errors do not add up over
layers. Weights are the synthetic ones, whose latents are Gaussian; 4-bit rounding of such latents
alone is off by 9.2 %, and a mean over many rows by less.
"""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from moet.bench import results
from moet.config import KVDtype, ModelSettings
from moet.models.base import ForwardInput
from moet.models.checkpoint import Checkpoint
from moet.models.glm_moe_dsa import GlmMoeDsa
from moet.models.layers import Weights
from moet.models.moe import ResidentExperts
from moet.models.synthetic import write_checkpoint

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests' rig, when run from anywhere
from tests.models.glm_rig import BesideNarrow

RESULTS = Path(__file__).parent / "results" / "kv_error.json"
NUM_TOKENS = 512
TARGETS: dict[KVDtype, float] = {"fp8": 0.04, "nvfp4": 0.13}


def empty_kv(model: GlmMoeDsa, num_pages: int) -> dict[str, Tensor]:
    """Pages for one sequence."""
    return {
        group.name: torch.zeros(len(group.layers), num_pages, group.page_bytes, dtype=torch.uint8)
        for group in model.kv_cache_spec().groups
    }


def load_experts(checkpoint: Checkpoint) -> ResidentExperts:
    """All routed experts in fp32."""
    experts = checkpoint.experts
    return ResidentExperts.load(
        Weights(checkpoint, ModelSettings()),
        dict(zip(experts.layers, experts.prefixes, strict=True)),
        num_experts=experts.num_experts,
        dim=experts.hidden_size,
        inter=experts.moe_intermediate_size,
        names=experts.names,
    )


def errors_of(checkpoint: Checkpoint, kv_dtype: KVDtype) -> list[float]:
    """Relative error of each layer's attention output over one prompt."""
    num_pages = NUM_TOKENS // 64
    wide, narrow = (
        GlmMoeDsa.load(checkpoint.config, checkpoint, ModelSettings(), dtype)
        for dtype in ("bf16", kv_dtype)
    )
    kv = empty_kv(narrow, num_pages)
    attentions = []
    for layer, other in zip(wide.layers, narrow.layers, strict=True):
        attentions.append(BesideNarrow(layer.attention, other.attention, kv))
        layer.attention = attentions[-1]  # type: ignore[assignment]
    generator = torch.Generator().manual_seed(0)
    inputs = ForwardInput(
        token_ids=torch.randint(0, wide.vocab_size, (NUM_TOKENS,), generator=generator),
        positions=torch.arange(NUM_TOKENS),
        cu_seqlens_q=(0, NUM_TOKENS),
        seq_slots=torch.zeros(1, dtype=torch.int64),
        page_table=torch.arange(num_pages).unsqueeze(0),
        seq_lens=(NUM_TOKENS,),
        logits_indices=torch.tensor([NUM_TOKENS - 1]),
    )
    wide.forward(inputs, empty_kv(wide, num_pages), load_experts(checkpoint))
    return [attention.error for attention in attentions]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder) / "c", size="tiny", flavour="bf16", model="glm-5.2")
        checkpoint = Checkpoint.open(Path(folder) / "c")
        for kv_dtype, target in TARGETS.items():
            for layer_idx, error in enumerate(errors_of(checkpoint, kv_dtype)):
                row = results.Row(
                    case=f"attention output, {kv_dtype} rows against bf16, layer {layer_idx}",
                    value=round(error, 4),
                    unit="relative error",
                    better="lower",
                    floor=0,
                    target=target,
                    note=f"tiny synthetic glm-5.2, {NUM_TOKENS} tokens",
                )
                rows.append(row)
                print(f"{row.case}: {row.value}")
    hardware = f"{platform.machine()} CPU, torch {torch.__version__}; exact, not timed"
    report = results.report("python bench/kv_error.py", rows, hardware=hardware)
    results.write(args.output, report)


if __name__ == "__main__":
    main()
