"""The findings of bench/quality.py as rows with targets and as pictures. Measures nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from bench.quality_tasks import STRICT, TASKS
from moet.bench import results

OFFICIAL_TARGETS = {
    "sum": 0.9,
    "problem": 0.9,
    "tool_call": 0.95,
    STRICT: 0.95,
    "needle": 0.95,
    "draft": 0.7,
}
SPEED_TARGET = 20.0  # tokens a second
KEPT = {"w2": 0.9, "fp4": 0.99, "gate": 0.99}  # of what the official precision reaches

Models = dict[str, dict[str, dict[str, Any]]]
"""Family -> variant -> what was measured of it, which may be only a part."""


def judged(models: Models) -> list[results.Row]:
    """Every figure as one row, with what it should be."""
    rows = []
    for family, variants in models.items():
        official = shares(variants.get("official", {}))
        for name, measured in variants.items():
            for case, value in shares(measured).items():
                target = _target(name, case, official)
                rows.append(_row(f"{family}, {name}, {case}", value, "share", target))
            if "perplexity" in measured:
                case = f"{family}, {name}, perplexity"
                rows.append(_row(case, measured["perplexity"], "", None, "lower"))
            if name == "official" and "speed" in measured:
                told = measured["speed"]
                note = (
                    f"CPU, one stream, load {told['load']:.1f}, "
                    f"{told['cpu_ms_per_token']:.1f} ms of processor time a token"
                )
                case = f"{family}, {name}, decoding"
                rows.append(_row(case, told["tokens_per_s"], "tokens/s", SPEED_TARGET, note=note))
            if "computed_again" in measured:
                case, again = f"{family}, {name}, computed again", measured["computed_again"]
                rows.append(_row(case, again, "share of rows", None, "lower"))
    return rows


def shares(measured: dict[str, Any]) -> dict[str, float]:
    """What is measured in shares of questions, needles or steps, by case."""
    tasks = measured.get("tasks", {})
    found = {task: tasks[task]["right"] for task in (*TASKS, STRICT) if task in tasks}
    if "json" in tasks:
        found["json valid"] = tasks["json"]["valid"]
    needle = measured.get("needle", {})
    found |= {f"needle {n}": needle[n]["right"] for n in sorted(needle, key=int)}
    held = measured.get("drafts", {}).get("held", [])
    return found | {f"draft {position + 1}": share for position, share in enumerate(held)}


def _target(variant: str, case: str, official: dict[str, float]) -> float | None:
    kind = case.split()[0]
    # A gate discards drafts behind an uncertain row, so theirs say little; only first ones count.
    if kind == "draft" and (case != "draft 1" or variant.startswith("gate")):
        return None
    if variant == "official":
        return OFFICIAL_TARGETS.get(kind)
    kept = KEPT.get(variant.split()[0])
    return None if kept is None or case not in official else kept * official[case]


def _row(
    case: str,
    value: float,
    unit: str,
    target: float | None,
    better: Literal["lower", "higher"] = "higher",
    note: str = "",
) -> results.Row:
    return results.Row(
        case=case, value=round(value, 4), unit=unit, better=better, target=target, note=note
    )


def table(models: Models) -> str:
    """For people: a line a variant."""
    lines = []
    for family, variants in models.items():
        for name, measured in variants.items():
            told = " ".join(f"{case} {value:.2f}" for case, value in shares(measured).items())
            text = f"ppl {measured['perplexity']:.3f} " if "perplexity" in measured else ""
            lines.append(f"{family:12}{name:24}{text}{told}")
    return "\n".join(lines)


def plot(models: Models, folder: Path) -> None:
    """One picture per model beside the JSON: tasks, needles by distance, drafts by place."""
    from matplotlib import pyplot

    for family, variants in models.items():
        figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(17, 5.5))
        colours = pyplot.get_cmap("tab20").colors  # type: ignore[attr-defined]
        for axis in (left, middle, right):
            axis.set_prop_cycle(color=colours)
        width, tasks = 0.8 / max(len(variants), 1), [*TASKS, STRICT]
        for idx, (name, row) in enumerate(variants.items()):
            done = row.get("tasks", {})
            at = [x + idx * width for x, task in enumerate(tasks) if task in done]
            values = [done[task]["right"] for task in tasks if task in done]
            left.bar(at, values, width, label=name, color=colours[idx])
            needle = sorted((int(n), each["right"]) for n, each in row.get("needle", {}).items())
            middle.plot([n for n, _ in needle], [share for _, share in needle], marker="o")
            held = row.get("drafts", {}).get("held", [])
            right.plot(range(1, len(held) + 1), held, marker="o")
        left.set_xticks([x + 0.4 for x in range(len(tasks))], tasks, rotation=20)
        left.set_ylabel("share of right answers")
        middle.set_xlabel("tokens of text")
        middle.set_ylabel("share of needles found")
        right.set_xlabel("place among a step's drafts")
        right.set_ylabel("share of steps in which it held")
        for axis in (left, middle, right):
            axis.set_ylim(0, 1.05)
        figure.suptitle(f"{family} demo model, greedy answers to held-out questions")
        figure.legend(*left.get_legend_handles_labels(), loc="lower center", ncols=7)
        figure.tight_layout(rect=(0, 0.1, 1, 1))
        figure.savefig(folder / f"quality-{family}.png", dpi=110)
        pyplot.close(figure)
