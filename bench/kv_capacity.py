"""How much of the memory that weights and steps leave an engine on one GPU gives to KV pages.

    python -m bench.kv_capacity [--model glm-5.2] [--layers N] [--max-num-seqs N] [--out FILE]

Starts the engine's core as `moet serve --weights dummy` does, of as many layers as fit, and runs a
prompt that fills a chunk. What is free beside the pages then was planned for something that did not
need it, or is kept as the planner's reserve.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from pathlib import Path
from shutil import copytree
from time import perf_counter

import torch

from bench.gpu import open_gpu
from moet.bench.results import Row, report, write
from moet.config import CacheConfig, EngineConfig, SchedulerConfig, TargetConfig
from moet.models.glm_moe_dsa_config import GlmMoeDsaConfig
from moet.models.synthetic_glm import MODEL_NAME as GLM
from moet.runtime import memory
from moet.runtime.core import EngineCore
from moet.runtime.dummy import preset_config, preset_folder
from moet.runtime.loader import load_core
from moet.types import Request, SamplingParams

RESULTS = Path(__file__).parent / "results" / "kv_capacity.json"
GIB = 1 << 30
TARGET = 0.95
PROMPT = 8192
SPARE_BYTES = 256 << 20  # that a step is left with, which is not enough


def folder_of(model: str, num_layers: int | None, folder: Path) -> Path:
    """A preset's files there, its config that of the first layers, GLM-5.2's dense stack in fp8."""
    copytree(preset_folder(model), folder, dirs_exist_ok=True)
    raw = preset_config(model, "full", num_layers)
    if model == GLM:
        raw = dict(GlmMoeDsaConfig.from_dict(raw).to_dict("fp8"))
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def run_prompt(core: EngineCore) -> str | None:
    """A prompt of a whole chunk and some tokens behind it. Returns its error, if it ends in one."""
    tokens = torch.randint(2, 100_000, (PROMPT,), generator=torch.Generator().manual_seed(0))
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    core.submit(Request(request_id="r", prompt_token_ids=tokens.tolist(), params=params))
    while core.has_work:
        for event in core.step():
            if event.error:
                return event.error
    return None


def starved(core: EngineCore) -> str:
    """What a request is told where something else has taken the memory that steps need, and whether
    the next one is answered once it is free again."""
    torch.cuda.empty_cache()
    free_bytes, _ = torch.cuda.mem_get_info()
    taken = torch.empty(max(0, free_bytes - SPARE_BYTES), dtype=torch.uint8, device="cuda")
    told = run_prompt(core)
    del taken
    torch.cuda.empty_cache()
    return f"short of memory: {told!r}; afterwards: {run_prompt(core) or 'answered'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=GLM)
    parser.add_argument("--layers", type=int, default=38, help="take the first ones")
    parser.add_argument("--kv", choices=("fp8", "nvfp4"), default="nvfp4")
    parser.add_argument("--max-num-seqs", type=int, default=4)
    parser.add_argument("--drafts", type=int, default=2)
    parser.add_argument("--eager", action="store_true", help="capture no graphs")
    parser.add_argument("--grows", action="store_true", help="segments grow, so that none has gaps")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s", stream=sys.stdout)
    if args.grows:
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
        memory.GAP_BYTES = 0
    device = open_gpu()
    began_s = perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        config = EngineConfig(
            model=str(folder_of(args.model, args.layers, Path(folder))),
            target=TargetConfig(
                device="cuda", weights="dummy", dummy_skew=0.5, enforce_eager=args.eager
            ),
            cache=CacheConfig(kv_dtype=args.kv, prefix_cache="off"),
            scheduler=SchedulerConfig(
                max_num_seqs=args.max_num_seqs,
                max_num_batched_tokens=PROMPT,
                num_spec_tokens=args.drafts,
            ),
        )
        core = load_core(config, lambda stage, share: None)
    started_s = perf_counter() - began_s
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    error = run_prompt(core)
    if error is not None:
        raise RuntimeError(error)
    torch.cuda.synchronize()
    step_bytes = torch.cuda.max_memory_allocated() - held
    gaps = torch.cuda.max_memory_reserved() - torch.cuda.max_memory_allocated()
    info = core.info()
    unused, _ = torch.cuda.mem_get_info(device.torch_device)
    tokens, held = info.num_pages * info.page_size, info.kv_cache_bytes
    note = (
        f"{tokens} tokens of {held / tokens:.0f} B; {unused / GIB:.2f} GiB were never touched; "
        f"started in {started_s:.1f} s, window {info.max_model_len}; a chunk of {PROMPT} took "
        f"{step_bytes / GIB:.3f} GiB, {step_bytes / PROMPT:.0f} B a token; {gaps / GIB:.2f} GiB "
        "lay between what was used"
    )
    label = f"{args.model}, {args.layers} layers, {args.kv} KV, {args.drafts} drafts"
    row = Row(
        case=f"{label}: pages, of what weights and steps leave",
        value=round(held / (held + unused), 4),
        unit="of 1",
        better="higher",
        floor=1.0,
        target=TARGET,
        note=note,
    )
    print(row, flush=True)
    print(starved(core), flush=True)
    command = " ".join(["python -m bench.kv_capacity", *sys.argv[1:]])
    content = report(command, [row], hardware=torch.cuda.get_device_name())
    content["commit"] = args.commit or content["commit"]
    write(args.out, content)
    core.shutdown()


if __name__ == "__main__":
    main()
