"""The byte plan: sums that close, tiers that follow the memory, refusals that help."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moet.config import CacheConfig, EngineConfig, SchedulerConfig
from moet.errors import ConfigError
from moet.models.footprint import Footprint, footprint
from moet.models.synthetic import plan_checkpoint
from moet.runtime.hardware import GIB, PRESETS, Hardware, hardware, this_host
from moet.runtime.memory import plan, require_fit
from moet.runtime.plan_types import Plan, PlanSettings


def full(model: str, flavour: str | None = None) -> dict[str, Any]:
    config: dict[str, Any] = plan_checkpoint("full", flavour, model=model).texts["config.json"]
    return config


FLASH = footprint(full("deepseek-v4-flash"), num_spec_tokens=2)
GLM = footprint(full("glm-5.2", "nvfp4"), kv_dtype="nvfp4", dense_dtype="fp8", num_spec_tokens=2)
TINY = plan_checkpoint("tiny").texts["config.json"]


def cards(name: str, ram_gib: float = 128, memory_gib: float | None = None) -> Hardware:
    memory = None if memory_gib is None else int(memory_gib * GIB)
    return hardware(name, host_bytes=int(ram_gib * GIB), memory_bytes=memory)


def check_sums(made: Plan, model: Footprint, given: Hardware) -> None:
    """Every byte and every expert is somewhere, once."""
    experts = made.experts
    assert sum(made.device_bytes.values()) == given.memory_bytes
    if given.kind == "cuda":
        assert sum(made.host_bytes.values()) == given.host_bytes
    assert min([*made.device_bytes.values(), *made.host_bytes.values()]) >= 0
    assert experts.num_static + experts.num_host + experts.num_disk == experts.num_rows
    assert made.disk_bytes == experts.num_disk * experts.row_bytes
    assert experts.num_cached <= experts.num_rows - experts.num_static
    assert made.resident == (experts.num_static == experts.num_rows)
    if not made.resident:
        assert experts.num_cached >= model.num_experts
    assert made.kv.max_model_len <= made.kv.num_tokens
    assert made.kv.max_model_len <= made.kv.largest_model_len
    assert made.device_bytes["kv pages"] == made.kv.num_pages * model.kv.bytes_per_page


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("model", [FLASH, GLM], ids=["flash", "glm"])
def test_every_preset_has_a_plan_whose_sums_close(model: Footprint, name: str, count: int) -> None:
    given = cards(f"{name}x{count}", 256)
    check_sums(plan(model, given, PlanSettings()), model, given)


def test_flash_is_tiered_on_a_5090_and_resident_on_a_pro_6000() -> None:
    small = plan(FLASH, cards("rtx-5090"), PlanSettings())
    assert not small.resident
    assert small.experts.num_host == small.experts.num_rows
    assert 0.15 < small.experts.device_share < 0.25
    assert small.kv.max_model_len == 131_072
    large = plan(FLASH, cards("rtx-pro-6000"), PlanSettings())
    assert large.resident
    assert large.kv.max_model_len == 1 << 20
    assert large.device_bytes["experts, static"] == 44 * 256 * (27 << 18)


def test_rows_that_the_host_cannot_hold_stay_on_the_card_for_good() -> None:
    made = plan(GLM, cards("h200", 128), PlanSettings())
    experts = made.experts
    host_room = 128 * GIB - 8 * GIB - (320 << 20)
    assert experts.num_host == host_room // experts.row_bytes
    assert experts.num_static == experts.num_rows - experts.num_host
    assert experts.num_disk == 0
    assert experts.num_cached > 0


def test_rows_that_nothing_holds_stay_on_disk() -> None:
    given = cards("rtx-5090", 16)
    made = plan(FLASH, given, PlanSettings())
    check_sums(made, FLASH, given)
    assert made.experts.num_disk > 0
    assert made.experts.num_cached == FLASH.num_experts


def test_two_cards_halve_rows_and_divided_weights_but_not_pages() -> None:
    one = plan(FLASH, cards("h200"), PlanSettings(max_model_len=65_536))
    two = plan(FLASH, cards("h200x2"), PlanSettings(max_model_len=65_536))
    assert two.device_bytes["experts, static"] * 2 == one.device_bytes["experts, static"]
    assert two.device_bytes["kv pages"] == one.device_bytes["kv pages"]
    assert two.device_bytes["dense f8_e4m3"] < 0.6 * one.device_bytes["dense f8_e4m3"]


@given(
    memory=st.floats(16, 31),
    more=st.floats(0, 100),
    ram=st.floats(9, 300),
    seqs=st.integers(1, 64),
    model=st.sampled_from([FLASH, GLM]),
)
def test_more_memory_never_gives_less(
    memory: float, more: float, ram: float, seqs: int, model: Footprint
) -> None:
    settings = PlanSettings(max_num_seqs=seqs)
    base = cards("h200", ram)

    def windows(gib: float) -> tuple[int, int, float]:
        given = replace(base, memory_bytes=int(gib * GIB))
        try:
            made = plan(model, given, settings)
        except ConfigError:
            return 0, 0, 0.0
        check_sums(made, model, given)
        return made.kv.max_model_len, made.kv.largest_model_len, made.experts.device_share

    less, greater = windows(memory), windows(memory + more)
    assert less[0] <= greater[0]
    assert less[1] <= greater[1]


@given(ram=st.floats(9, 200), more=st.floats(0, 200))
def test_more_host_memory_never_leaves_more_on_disk(ram: float, more: float) -> None:
    less = plan(FLASH, cards("rtx-5090", ram), PlanSettings())
    greater = plan(FLASH, cards("rtx-5090", ram + more), PlanSettings())
    assert greater.disk_bytes <= less.disk_bytes
    assert greater.kv == less.kv


@given(memory=st.floats(19, 60), seqs=st.integers(1, 32))
def test_the_largest_window_fits_and_a_page_more_does_not(memory: float, seqs: int) -> None:
    given = replace(cards("h200"), memory_bytes=int(memory * GIB))
    largest = plan(FLASH, given, PlanSettings(max_num_seqs=seqs)).kv.largest_model_len
    settings = PlanSettings(max_num_seqs=seqs, max_model_len=largest)
    assert plan(FLASH, given, settings).kv.max_model_len == largest
    if largest < FLASH.max_position_embeddings:
        with pytest.raises(ConfigError, match=f"--max-model-len {largest}"):
            plan(FLASH, given, replace(settings, max_model_len=largest + 1))


def remedies(message: str) -> dict[str, int]:
    """Flags that a refusal names with a number."""
    changes = message.partition("Change: ")[2]
    return {flag: int(value) for flag, value in re.findall(r"(--[\w-]+) (\d+)", changes)}


@given(memory=st.floats(14, 20), seqs=st.integers(1, 200), window=st.integers(1, 1 << 20))
def test_every_number_in_a_refusal_is_a_way_out(memory: float, seqs: int, window: int) -> None:
    given = replace(cards("h200"), memory_bytes=int(memory * GIB))
    settings = PlanSettings(max_num_seqs=seqs, max_model_len=window)
    fields = {
        "--max-model-len": "max_model_len",
        "--max-num-seqs": "max_num_seqs",
        "--max-num-batched-tokens": "max_num_batched_tokens",
    }
    try:
        plan(FLASH, given, settings)
    except ConfigError as error:
        for flag, value in remedies(str(error)).items():
            changed: dict[str, Any] = {fields[flag]: value}
            plan(FLASH, given, replace(settings, **changed))


def test_a_refusal_names_what_the_model_offers() -> None:
    wide = footprint(full("glm-5.2"), kv_dtype="bf16")
    with pytest.raises(ConfigError) as caught:
        plan(wide, cards("rtx-5090"), PlanSettings())
    message = str(caught.value)
    assert "31.84 GiB are available" in message
    for flag in ("--kv-cache-dtype fp8", "--dense-dtype fp8", "--gpu"):
        assert flag in message


def test_positions_end_somewhere() -> None:
    with pytest.raises(ConfigError, match="positions end at 1048576"):
        plan(FLASH, cards("h200"), PlanSettings(max_model_len=(1 << 20) + 1))


def test_cards_that_do_not_exist() -> None:
    for name in ("rtx-9090", "h200x3", "h200x8"):
        with pytest.raises(ConfigError, match="rtx-5090, rtx-pro-6000, h200"):
            cards(name)
    with pytest.raises(ConfigError, match=r"--gpu-memory is 40\.00 GiB; a rtx-5090 has 31\.84"):
        cards("rtx-5090", memory_gib=40)
    with pytest.raises(ConfigError, match="--ram is 4"):
        plan(FLASH, cards("rtx-5090", 4), PlanSettings())


def test_a_kv_budget_is_kept() -> None:
    settings = PlanSettings(kv_cache_bytes=GIB)
    made = plan(FLASH, cards("rtx-5090"), settings)
    assert made.kv.num_pages == GIB // FLASH.kv.bytes_per_page
    assert made.kv.max_model_len == made.kv.num_tokens
    with pytest.raises(ConfigError, match="Raise --kv-cache-memory"):
        plan(FLASH, cards("rtx-5090"), replace(settings, max_model_len=1 << 20))


# The CPU reference


def engine_config(budget_bytes: int = 256 << 20, **scheduler: Any) -> EngineConfig:
    return EngineConfig(
        model="tiny",
        cache=CacheConfig(budget_bytes=budget_bytes),
        scheduler=SchedulerConfig(**scheduler),
    )


def test_the_reference_holds_everything_in_host_memory() -> None:
    made = require_fit(engine_config(), TINY, 2 * GIB)
    check_sums(made, footprint(TINY), this_host(2 * GIB))
    assert made.resident
    assert made.host_bytes == {}
    full_size = EngineConfig(model="full")
    with pytest.raises(ConfigError, match=r"dense fp32 27\.\d+.*experts 74\.25 GiB"):
        require_fit(full_size, full("deepseek-v4-flash"), 64 * GIB)


@pytest.mark.bug("S12")
def test_s12_a_machine_that_is_too_small_is_told_what_fits_and_what_to_change() -> None:
    with pytest.raises(ConfigError) as caught:
        require_fit(engine_config(budget_bytes=4 * GIB), TINY, 10**9)
    message = str(caught.value)
    assert re.search(r"needs \d+\.\d+ GiB of memory; 0\.93 GiB are available", message)
    assert "largest window that fits is 65536 tokens" in message
    change = remedies(message)["--kv-cache-memory"]
    made = require_fit(engine_config(budget_bytes=change), TINY, 10**9)
    assert made.kv.largest_model_len == 65_536
    assert made.kv.num_tokens > 0.9 * change / made.kv.bytes_per_token


@pytest.mark.bug("S12")
def test_s12_a_budget_below_the_window_names_both_flags() -> None:
    with pytest.raises(ConfigError) as caught:
        require_fit(engine_config(1 << 20, max_model_len=65_536), TINY, 2 * GIB)
    message = str(caught.value)
    assert "a window of 65536 tokens needs 13516800 bytes" in message
    assert "enough for 4864 tokens. Raise --kv-cache-memory or lower --max-model-len" in message
