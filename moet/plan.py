"""`moet plan`: a model by name or folder, planned for cards, as a table, as JSON, or as recipes.

Needs no checkpoint: the built-in names stand for the released sizes. Arithmetic is in
runtime/memory.py and runtime/roofline.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from moet.config import KVDtype
from moet.errors import ConfigError
from moet.models.footprint import Footprint, footprint
from moet.models.pack import MANIFEST_NAME, is_pack
from moet.models.release import DenseDtype
from moet.models.synthetic import MODELS, plan_checkpoint
from moet.runtime.hardware import COUNTS, GIB, PRESETS, Hardware, hardware
from moet.runtime.memory import plan
from moet.runtime.plan_types import Plan, PlanSettings
from moet.runtime.roofline import ASSUMPTIONS, Rates, predict
from moet.runtime.text_side import model_folder


@dataclass(frozen=True, slots=True)
class _Recipe:
    """What card sets are planned with in docs/recipes.md. flavour: the published form."""

    flavour: str
    ram_gib: int
    kv_dtype: KVDtype
    dense_dtype: DenseDtype


_RECIPES: Mapping[str, _Recipe] = {
    "deepseek-v4-flash": _Recipe("preview", 128, "fp8", "keep"),
    "glm-5.2": _Recipe("nvfp4", 256, "nvfp4", "fp8"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """A plan, what it was made of, and the rates to expect."""

    model: str
    footprint: Footprint
    hardware: Hardware
    settings: PlanSettings
    plan: Plan
    rates: Rates

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; sizes in bytes."""
        settings, footprint = self.settings, self.footprint
        return {
            "model": self.model,
            "precision": settings.precision,
            "kv_cache_dtype": footprint.kv_dtype,
            "dense_dtype": footprint.dense_dtype,
            "num_spec_tokens": footprint.num_spec_tokens,
            "max_num_batched_tokens": settings.max_num_batched_tokens,
            "plan": msgspec.to_builtins(self.plan),
            "predicted": msgspec.to_builtins(self.rates),
            "hardware_basis": self.hardware.basis,
            "assumptions": list(ASSUMPTIONS),
            "commands": commands(self),
        }


def raw_config(model: str, flavour: str | None = None) -> tuple[dict[str, Any], DenseDtype]:
    """A model's config.json, and how its dense weights are kept.

    model: a built-in name, or a checkpoint or pack folder. Raises ConfigError naming what there is.
    """
    if model in MODELS:
        made: dict[str, Any] = plan_checkpoint("full", flavour, model=model).texts["config.json"]
        return made, "keep"
    folder = model_folder(model)
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"{model} is neither a folder with a config.json nor one of {', '.join(MODELS)}"
        )
    try:
        config = json.loads(path.read_text("utf-8"))
        pack = json.loads((folder / MANIFEST_NAME).read_text("utf-8")) if is_pack(folder) else {}
    except ValueError as error:
        raise ConfigError(f"{folder}: {error}") from error
    dense: DenseDtype = pack.get("dense_dtype", "keep")
    return config, dense


def make_report(
    model: str,
    cards: Hardware,
    settings: PlanSettings,
    *,
    kv_dtype: KVDtype = "fp8",
    dense_dtype: DenseDtype | None = None,
    num_spec_tokens: int = 2,
    flavour: str | None = None,
) -> Report:
    """Plan a model. Raises ConfigError for what is wrong or does not fit."""
    config, kept = raw_config(model, flavour)
    made = footprint(
        config,
        kv_dtype=kv_dtype,
        dense_dtype=dense_dtype or kept,
        num_spec_tokens=num_spec_tokens,
    )
    return _report(model, made, cards, settings)


def _report(model: str, made: Footprint, cards: Hardware, settings: PlanSettings) -> Report:
    planned = plan(made, cards, settings)
    return Report(
        model=model,
        footprint=made,
        hardware=cards,
        settings=settings,
        plan=planned,
        rates=predict(made, cards, planned, prefill_tokens=settings.max_num_batched_tokens),
    )


def commands(report: Report) -> list[str]:
    """The command lines that this plan stands for."""
    settings, kv, dense = report.settings, report.plan.kv, report.footprint.dense_dtype
    is_folder = report.model not in MODELS
    pack = report.model if is_folder else f"{report.model}-pack"
    convert = f"moet convert {report.model} {pack}"
    if dense != "keep":
        convert += f" --dense-dtype {dense}"
    serve = [
        f"moet serve {pack}",
        f"--max-model-len {kv.max_model_len}",
        f"--max-num-seqs {kv.max_num_seqs}",
        f"--max-num-batched-tokens {settings.max_num_batched_tokens}",
        f"--kv-cache-dtype {report.footprint.kv_dtype}",
        f"--kv-cache-memory {kv.num_pages * report.footprint.kv.bytes_per_page}",
    ]
    if settings.precision != "w2":
        serve.append(f"--precision {settings.precision}")
    if report.plan.num_devices > 1:
        serve.append(f"-tp {report.plan.num_devices}")
    fastest = max(
        (rate for rate in report.rates.decode if rate.num_streams == 1),
        key=lambda rate: rate.tokens_per_s,
    )
    if fastest.num_spec_tokens:
        serve.append(f"--spec-tokens {fastest.num_spec_tokens}")
    return [*([] if is_folder else [convert]), " ".join(serve)]


# On a terminal


def show(report: Report, console: Console) -> None:
    """Print the plan as tables."""
    plan, kv, experts = report.plan, report.plan.kv, report.plan.experts
    each = " (each card)" if plan.num_devices > 1 else ""
    summary = Table("what", "value", show_header=False, title=f"{report.model} on {plan.hardware}")
    summary.add_row("window", f"{kv.max_model_len:,} tokens (at most {kv.largest_model_len:,})")
    summary.add_row("KV pool", f"{kv.num_tokens:,} tokens, {kv.bytes_per_token:,.0f} bytes each")
    summary.add_row(
        "sequences", f"{kv.max_num_seqs} as asked; {kv.num_short_seqs} of 8,192 tokens would fit"
    )
    for name, number in (
        ("experts on cards for good", experts.num_static),
        ("experts in the cards' cache", experts.num_cached),
        ("experts in host memory", experts.num_host),
        ("experts on disk alone", experts.num_disk),
    ):
        if number:
            size = number * experts.row_bytes / GIB
            summary.add_row(name, f"{number:,} of {experts.num_rows:,} rows, {size:.1f} GiB")
    summary.add_row("predicted hit rate", f"{report.rates.hit_rate:.1%}")
    rates = report.rates
    summary.add_row(
        "predicted prefill",
        f"{rates.prefill_tokens_per_s:,.0f} tok/s for {rates.prefill_tokens:,} tokens",
    )
    memory = Table("memory" + each, "GiB", "host memory", "GiB ", title="bytes")
    left = [(use, f"{size / GIB:.2f}") for use, size in plan.device_bytes.items()]
    right = [(use, f"{size / GIB:.2f}") for use, size in plan.host_bytes.items()]
    for i in range(max(len(left), len(right))):
        blank = ("", "")
        memory.add_row(*(left[i] if i < len(left) else blank), *(right + [blank] * 99)[i])
    decode = Table("streams", "drafts", "ms/step", "floor ms", "misses/step", "tok/s",
                   title="predicted decoding")  # fmt: skip
    for rate in rates.decode:
        decode.add_row(
            str(rate.num_streams),
            str(rate.num_spec_tokens),
            f"{rate.step_ms:.1f}",
            f"{rate.floor_ms:.1f}",
            f"{rate.missed_rows:.1f}",
            f"{rate.tokens_per_s:,.0f}",
        )
    lines = [Text("assumed:"), *(Text(f"- {line}") for line in ASSUMPTIONS)]
    commands_shown = [Text("commands:"), *(Text(f"  {line}") for line in commands(report))]
    console.print(Group(summary, memory, decode, *lines, *commands_shown))


# As a page


def recipes() -> str:
    """docs/recipes.md: for each model and card set one plan and its command."""
    parts = [
        "# Recipes",
        "",
        "One command per card set, written by `moet plan --recipes`. Bytes are computed from the "
        "models' released sizes; rates are **predictions** from the assumptions below and were "
        "not measured on these cards. `moet plan MODEL --gpu NAME --ram GIB` plans any other "
        "setting and prints where every byte goes. What this version can serve is in the README; "
        "`-tp` divides a model over the cards of a host.",
    ]
    for model, recipe in _RECIPES.items():
        parts += _recipes_of(model, recipe)
    parts += ["", "## What the predictions assume", ""]
    parts += [f"- {line}" for line in ASSUMPTIONS]
    return "\n".join(parts) + "\n"


def _recipes_of(model: str, recipe: _Recipe) -> list[str]:
    config, _ = raw_config(model, recipe.flavour)
    made = footprint(
        config, kv_dtype=recipe.kv_dtype, dense_dtype=recipe.dense_dtype, num_spec_tokens=2
    )
    host_bytes = recipe.ram_gib * GIB
    reports = [
        _report(model, made, hardware(f"{name}x{count}", host_bytes=host_bytes), PlanSettings())
        for name in PRESETS
        for count in COUNTS
    ]
    lines = ["", f"## {model}", ""]
    lines.append(
        f"2-bit experts, KV {recipe.kv_dtype}, {recipe.ram_gib} GiB of host memory, 4 sequences, "
        f"chunks of 8,192 tokens. On disk the checkpoint ({recipe.flavour}) takes "
        f"{_gigabytes(plan_checkpoint('full', recipe.flavour, model=model).payload_bytes)} and its "
        f"pack {_gigabytes(_pack_bytes(made))}. Convert once:"
    )
    lines += ["", "```", commands(reports[0])[0], "```", ""]
    lines.append(
        "| cards | window | experts on cards | hits | prefill tok/s | tok/s, 1 stream | with 2 "
        "drafts |"
    )
    lines.append("|---|---|---|---|---|---|---|")
    for report in reports:
        plan, rates = report.plan, report.rates
        plain, drafted = rates.decode[0], rates.decode[1]
        lines.append(
            f"| {plan.hardware} | {plan.kv.max_model_len:,} | {plan.experts.device_share:.0%} | "
            f"{rates.hit_rate:.1%} | {rates.prefill_tokens_per_s:,.0f} | "
            f"{plain.tokens_per_s:,.0f} | {drafted.tokens_per_s:,.0f} |"
        )
    for report in reports:
        lines += ["", f"{report.plan.hardware}:", "```", commands(report)[-1], "```"]
    return lines


def _pack_bytes(made: Footprint) -> int:
    """Of a pack on disk: expert rows in both formats, and everything else."""
    dense = made.dense.bytes_on(1) + (made.draft.bytes_on(1) if made.draft else 0)
    return made.num_pack_rows * sum(made.row_bytes.values()) + dense


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.0f} GB"
