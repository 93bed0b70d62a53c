"""Writes a trained model as a checkpoint folder in its official format, names and number formats.

What is written follows moet's own tensor inventories, so nothing can be missing or misnamed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from bench.train_demo.glm import Glm
from bench.train_demo.v4 import V4, official_name
from moet.kernels.nvfp4 import nvfp4_quantize
from moet.models.deepseek_v4_tensors import PREVIEW
from moet.models.deepseek_v4_tensors import tensor_inventory as v4_inventory
from moet.models.formats import quantize_fp8_block, quantize_mxfp4
from moet.models.glm_moe_dsa_tensors import tensor_inventory as glm_inventory
from moet.models.tensor_spec import TensorSpec

INPUT_SCALE = 0.004  # of NVFP4 activations, which moet does not round: amax 10 over 6 * 448
_EXPERT_NAMES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def official_weights(model: nn.Module, masters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Official name (with .weight) -> fp32 values, experts apart, buffers included; on the CPU."""
    found: dict[str, Tensor] = {}
    buffers = {name: b for name, b in model.named_buffers() if name in model.state_dict()}
    for name, tensor in {**buffers, **masters}.items():
        value = tensor.detach().cpu()
        if ".experts.w" not in name:
            found[official_name(name)] = value
            continue
        prefix, matrix = official_name(name).rsplit(".", 1)
        matrix = _EXPERT_NAMES[matrix] if isinstance(model, Glm) else matrix
        for expert_id, weight in enumerate(value):
            found[f"{prefix}.{expert_id}.{matrix}.weight"] = weight
    return found


def export(
    model: nn.Module, masters: Mapping[str, Tensor], tokenizer: Path, folder: Path
) -> dict[str, int]:
    """Write model.safetensors, the configs and the tokenizer files; returns bytes per file."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = official_weights(model, masters)
    if isinstance(model, V4):
        config = model.config.to_dict()
        inventory, encode = v4_inventory(model.config, PREVIEW), _encode_v4
        ends: object = model.config.eos_token_id
    else:
        assert isinstance(model, Glm)
        config = model.config.to_dict("nvfp4")
        inventory, encode = glm_inventory(model.config, "nvfp4"), _encode_glm
        ends = list(model.config.eos_token_id)
    tensors = dict(encode({spec.name: spec for spec in inventory}, weights))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    generation = {"do_sample": True, "eos_token_id": ends, "temperature": 0.6, "top_p": 0.95}
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=1) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if tokenizer.resolve() != folder.resolve():
            shutil.copy(tokenizer / name, folder / name)
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir())}


_PLAIN = {"BF16": torch.bfloat16, "F32": torch.float32, "I64": torch.int64}


def _encode_v4(
    specs: Mapping[str, TensorSpec], weights: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    for name, spec in specs.items():
        if name.endswith(".scale") and name.replace(".scale", ".weight") in specs:
            continue
        value = weights[name]
        scale_name = name.replace(".weight", ".scale")
        if spec.dtype == "F8_E4M3":
            codes, scale = quantize_fp8_block(value)
        elif spec.dtype == "I8":
            codes, scale = quantize_mxfp4(value)
        else:
            yield name, value.to(_PLAIN[spec.dtype]).contiguous()
            continue
        yield name, codes.contiguous()
        yield scale_name, scale.view(torch.float8_e8m0fnu).contiguous()


def _encode_glm(
    specs: Mapping[str, TensorSpec], weights: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    for name, spec in specs.items():
        if name.endswith(("_scale", "_scale_2")):
            continue
        value = weights[name]
        if spec.dtype != "U8":
            yield name, value.to(_PLAIN[spec.dtype]).contiguous()
            continue
        whole = value.abs().amax() / (6 * 448)
        packed, scale = nvfp4_quantize(value, global_scale=float(whole))
        yield name, packed
        yield f"{name}_scale", scale.view(torch.float8_e4m3fn)
        yield f"{name}_scale_2", whole.float()
        yield f"{name.removesuffix('.weight')}.input_scale", torch.tensor(INPUT_SCALE)
