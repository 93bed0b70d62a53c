"""Synthetic GLM-5.2 checkpoints: the published totals, every flavour, weights of unit size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from moet.kernels.nvfp4 import nvfp4_dequantize
from moet.models.formats import dequantize_fp8_block
from moet.models.glm_moe_dsa_config import Flavour, GlmMoeDsaConfig
from moet.models.glm_moe_dsa_tensors import tensor_inventory
from moet.models.synthetic import plan_checkpoint, write_checkpoint
from moet.models.synthetic_tokenizer_glm import special_token_ids, tokenizer_json
from tests.models.glm_configs import released

FLAVOURS: tuple[Flavour, ...] = get_args(Flavour)
MODEL = "glm-5.2"


@pytest.mark.parametrize(
    ("flavour", "payload_bytes"),
    [("bf16", 1_506_659_919_872), ("fp8", 755_617_140_416), ("nvfp4", 464_795_267_072)],
)
def test_full_size_is_byte_exact(flavour: Flavour, payload_bytes: int) -> None:
    plan = plan_checkpoint("full", flavour, model=MODEL)
    assert plan.payload_bytes == payload_bytes
    assert plan.num_tensors == len(tensor_inventory(plan.config, flavour))
    read = GlmMoeDsaConfig.from_dict(plan.texts["config.json"])
    assert read == GlmMoeDsaConfig.from_dict(released(flavour))


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_every_flavour_is_written(flavour: Flavour, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    plan = write_checkpoint(folder, size="tiny", flavour=flavour, model=MODEL)
    assert sum(path.stat().st_size for path in folder.iterdir()) < 30_000_000
    config = GlmMoeDsaConfig.from_file(folder / "config.json")
    assert [config.owns_indexer(i) for i in range(8)] == [True] * 3 + [False] * 3 + [True] * 2
    assert [config.is_dense(i) for i in range(7)] == [True] * 3 + [False] * 4
    stored: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            stored |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert len(stored) == plan.num_tensors
    weights = {
        "expert": expert_weight(stored, "model.layers.4.mlp.experts.3.up_proj", flavour),
        "down": expert_weight(stored, "model.layers.4.mlp.experts.3.down_proj", flavour),
        "head": stored["lm_head.weight"].float(),
        "o": linear_weight(stored, "model.layers.2.self_attn.o_proj"),
        "wk": linear_weight(stored, "model.layers.6.self_attn.indexer.wk"),
    }
    for name, weight in weights.items():
        assert weight.isfinite().all(), name
        assert 0.3 < weight.std() * weight.shape[1] ** 0.5 < 1.5, name
    assert 0.5 < stored["model.embed_tokens.weight"].float().std() < 1.5


def linear_weight(stored: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    weight = stored[f"{name}.weight"]
    if weight.dtype != torch.float8_e4m3fn:
        return weight.float()
    return dequantize_fp8_block(weight, stored[f"{name}.weight_scale_inv"])


def expert_weight(stored: dict[str, torch.Tensor], name: str, flavour: Flavour) -> torch.Tensor:
    if flavour != "nvfp4":
        return linear_weight(stored, name)
    scales = stored[f"{name}.weight_scale"].view(torch.uint8)
    factor = stored[f"{name}.weight_scale_2"].item()
    return nvfp4_dequantize(stored[f"{name}.weight"], scales, global_scale=factor)


def test_gate_and_up_differ_in_global_scale_somewhere(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "c", size="tiny", flavour="nvfp4", model=MODEL)
    differ = 0
    for path in (tmp_path / "c").glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            gates = [n for n in file.keys() if n.endswith("gate_proj.weight_scale_2")]  # noqa: SIM118
            for gate in gates:
                up = gate.replace("gate_proj", "up_proj")
                differ += file.get_tensor(gate).item() != file.get_tensor(up).item()
    assert differ > 10


@pytest.mark.parametrize("vocab_size", [512, 154_880])
def test_added_tokens_are_contiguous_and_official(vocab_size: int) -> None:
    tokenizer = Tokenizer.from_str(json.dumps(tokenizer_json(vocab_size)))
    ids = special_token_ids(vocab_size)
    for text, token_id in ids.items():
        assert tokenizer.encode(f"a{text}b", add_special_tokens=False).ids[1] == token_id
    assert [*ids.values()] == list(range(min(ids.values()), min(ids.values()) + 36))
    if vocab_size == 154_880:
        known = {
            "<|endoftext|>": 154820,
            "[gMASK]": 154822,
            "<|user|>": 154827,
            "<|observation|>": 154829,
            "<think>": 154841,
            "</tool_response>": 154846,
            "<|image|>": 154854,
            "<|video|>": 154855,
        }
        assert {text: ids[text] for text in known} == known


@pytest.mark.parametrize("text", ["Hello, the world 1234", "ünï 日本 😀\n\n\tx", "", " the"])
def test_tokenizer_round_trips_any_text(text: str) -> None:
    tokenizer = Tokenizer.from_str(json.dumps(tokenizer_json(1024)))
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text
    thinking = tokenizer.encode("<think>a</think><|user|>", add_special_tokens=False).ids
    assert tokenizer.decode(thinking, skip_special_tokens=True) == "<think>a</think>"
