"""The byte plan: what goes where, which window fits, and what to change if it does not.

A pure function of a model's footprint, the hardware and the settings; touches no device. Every rank
holds its part of the dense weights and of each expert row, and a full copy of the KV pages.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

from moet.config import EngineConfig
from moet.errors import ConfigError
from moet.models.footprint import Footprint, footprint
from moet.runtime.experts.serving import formats_of, sizes_of
from moet.runtime.hardware import GIB, Hardware, this_host
from moet.runtime.plan_types import SHORT_CONTEXT, ExpertPlan, KVPlan, Plan, PlanSettings

DEFAULT_WINDOW = 131_072  # tokens, where a longer one would cost expert slots
DEVICE_RESERVE_BYTES = 1 * GIB  # driver context, kernels, collectives' buffers
GAP_BYTES = 1 * GIB  # between a step's tensors, which the allocator cannot put to use
GRAPH_BYTES = GIB // 2  # captured decode graphs of all buckets
SCORE_BYTES = GIB // 2  # index scores of one tile of queries over the whole window
STAGING_BYTES = 2 * GIB  # at most, of the ring that streams a layer's experts through a prefill
HOST_RESERVE_BYTES = 8 * GIB  # operating system, server process, file cache
CPU_RESERVE_BYTES = GIB // 2  # the server process


def plan(model: Footprint, hardware: Hardware, settings: PlanSettings) -> Plan:
    """Place everything. Raises ConfigError with what is needed, available and worth changing."""
    return _Planner(model, hardware, settings).plan()


def require_fit(config: EngineConfig, raw_config: Mapping[str, Any], available_bytes: int) -> Plan:
    """Plan the CPU reference as an engine config has it, before anything is loaded.

    raw_config: the model's config.json. Raises ConfigError as `plan` does.
    """
    settings, cache, scheduler = config.settings, config.cache, config.scheduler
    model = footprint(
        raw_config,
        kv_dtype=cache.kv_dtype,
        rounding=settings.rounding,
        num_spec_tokens=scheduler.num_spec_tokens,
    )
    chosen = PlanSettings(
        precision=settings.precision,
        max_model_len=scheduler.max_model_len,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        kv_cache_bytes=cache.page_bytes,
        host_cache_bytes=cache.host_budget_bytes + cache.host_cache_bytes,
        num_expert_rows=_expert_rows(config, model),
        snapshot_bytes=0 if cache.prefix_cache == "off" else cache.snapshot_budget_bytes,
    )
    return plan(model, this_host(available_bytes), chosen)


def _expert_rows(config: EngineConfig, model: Footprint) -> int | None:
    """Rows in memory at once on the CPU reference, counted in those of ModelSettings.precision."""
    if config.experts.is_plain:
        return None
    total, unit = 0, model.row_bytes[config.settings.precision]
    for tier in formats_of(config):
        row_bytes, rows = model.row_bytes[tier], model.num_pack_rows
        sizes = sizes_of(config, tier, row_bytes=row_bytes, num_rows=rows, top_k=model.top_k)
        held = rows if sizes is None else sizes.num_slots + sizes.num_places
        total += held * row_bytes
    return -(-total // unit)


class _Planner:
    """The quantities of one plan: bytes are those of one card unless they say otherwise."""

    def __init__(self, model: Footprint, hardware: Hardware, settings: PlanSettings) -> None:
        self.model, self.hardware, self.settings = model, hardware, settings
        ranks = hardware.num_devices
        if model.sub_rows % ranks:
            raise ConfigError(
                f"{hardware.label}: expert rows have {model.sub_rows} parts, which {ranks} cards "
                "cannot share; use one card"
            )
        self.has_tiers = hardware.kind == "cuda"
        self.whole_row = model.row_bytes[settings.precision]
        self.row = self.whole_row // ranks
        self.num_rows = model.num_rows if self.has_tiers else model.num_pack_rows
        if not self.has_tiers and settings.num_expert_rows is not None:
            self.num_rows = settings.num_expert_rows
        self.page = model.kv.bytes_per_page
        self.page_size = model.kv.page_size
        self.fixed = self._fixed_bytes()
        self.room = hardware.memory_bytes - sum(self.fixed.values())
        two_layers = 2 * model.num_experts * self.whole_row
        self.staging = min(STAGING_BYTES, two_layers) // ranks
        self.least_cached = model.num_experts  # one layer's routed set, whatever the batch

    def plan(self) -> Plan:
        largest = self.largest_window
        wanted = self.settings.max_model_len
        if wanted is not None and wanted > self.model.max_position_embeddings:
            raise ConfigError(
                f"--max-model-len is {wanted}; the model's positions end at "
                f"{self.model.max_position_embeddings}"
            )
        num_pages = self._num_pages_asked()
        if largest == 0 or num_pages * self.page_size > self.most_pages * self.page_size:
            raise ConfigError(self._refusal(num_pages, largest))
        resident = self._pages_if_resident >= max(num_pages, 1)
        if wanted is None and self.settings.kv_cache_bytes is None:
            resident, num_pages = self._default_pages()
        window = wanted or min(self.model.max_position_embeddings, num_pages * self.page_size)
        if resident and self.settings.kv_cache_bytes is None:
            useful = self.settings.max_num_seqs * self._pages_of(window)
            num_pages = min(self._pages_if_resident, useful)
        return self._place(resident, num_pages, window, largest)

    # Sizes

    def _fixed_bytes(self) -> dict[str, int]:
        """What does not depend on windows or on how many experts are on the card."""
        model, settings, ranks = self.model, self.settings, self.hardware.num_devices
        rows = settings.max_num_seqs * (model.num_spec_tokens + 1)
        logits = rows * model.vocab_size * 4
        if model.num_spec_tokens:
            logits *= 2  # of the draft block, and what drafts were drawn from
        rings = settings.max_num_seqs * model.kv.bytes_per_seq
        if not self.has_tiers:
            step = settings.max_num_batched_tokens * model.step_bytes_per_token
            return {
                "dense fp32": 4 * model.dense.num_values,
                "kv rings": rings,
                "kv in host memory": settings.host_cache_bytes,
                "resume snapshots": settings.snapshot_bytes,
                "workspace": 2 * step + logits,
                "reserve": CPU_RESERVE_BYTES,
            }
        dense = {
            f"dense {dtype.lower()}": share.on(ranks)
            for dtype, share in model.dense.resident.items()
        }
        draft = {}
        if model.draft is not None:
            head = model.draft_head_bytes.on(ranks)
            draft = {"draft block": model.draft.bytes_on(ranks) + head}
        return {
            **dense,
            **draft,
            "kv rings": rings,
            "graphs": GRAPH_BYTES,
            "workspace": model.step_bytes(settings.max_num_batched_tokens, ranks)
            + logits
            + SCORE_BYTES,
            "reserve": DEVICE_RESERVE_BYTES + GAP_BYTES,
        }

    def _pages_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    @property
    def _pages_if_resident(self) -> int:
        return (self.room - self.num_rows * self.row) // self.page

    @property
    def _pages_if_tiered(self) -> int:
        if not self.has_tiers:
            return -1
        return (self.room - self.staging - self.least_cached * self.row) // self.page

    @property
    def most_pages(self) -> int:
        return max(self._pages_if_resident, self._pages_if_tiered, 0)

    @property
    def largest_window(self) -> int:
        """In tokens, with everything else as asked; 0 if nothing fits."""
        return min(self.model.max_position_embeddings, self.most_pages * self.page_size)

    def _num_pages_asked(self) -> int:
        asked = self._pages_of(self.settings.max_model_len or 1)
        if self.settings.kv_cache_bytes is None:
            return asked
        given = self.settings.kv_cache_bytes // self.page
        if given < asked:
            raise ConfigError(
                f"a window of {self.settings.max_model_len or 1} tokens needs {asked * self.page} "
                f"bytes of pages; --kv-cache-memory gives {self.settings.kv_cache_bytes}, enough "
                f"for {given * self.page_size} tokens. Raise --kv-cache-memory or lower "
                "--max-model-len"
            )
        return given

    def _default_pages(self) -> tuple[bool, int]:
        """Whether all experts stay on the card, and pages of the window planned for nobody's wish.

        A window costs expert slots where they do not all fit: it gets a quarter of the room then.
        """
        wanted = self._pages_of(min(DEFAULT_WINDOW, self.model.max_position_embeddings))
        if self._pages_if_resident >= wanted or not self.has_tiers:
            most = self._pages_of(self.model.max_position_embeddings)
            return True, min(self._pages_if_resident, most)
        quarter = max(1, (self.room - self.staging) // 4 // self.page)
        return False, min(wanted, quarter, self._pages_if_tiered)

    # Places

    def _place(self, resident: bool, num_pages: int, window: int, largest: int) -> Plan:
        model, settings, ranks = self.model, self.settings, self.hardware.num_devices
        experts = self._experts(resident, num_pages)
        pages = num_pages * self.page
        uses = {
            **self.fixed,
            "kv pages": pages,
            "experts, static": experts.num_static * self.row,
            "experts, cache": experts.num_cached * self.row,
            "expert staging": 0 if resident else self.staging,
        }
        uses["free"] = self.hardware.memory_bytes - sum(uses.values())
        assert uses["free"] >= 0
        short = model.kv.bytes_per_seq + self._pages_of(SHORT_CONTEXT) * self.page
        return Plan(
            hardware=self.hardware.label,
            num_devices=ranks,
            resident=resident,
            device_bytes={use: size for use, size in uses.items() if size},
            host_bytes=self._host_bytes(experts),
            disk_bytes=experts.num_disk * self.whole_row,
            experts=experts,
            kv=KVPlan(
                bytes_per_token=self.page / self.page_size,
                bytes_per_seq=model.kv.bytes_per_seq,
                num_pages=num_pages,
                num_tokens=num_pages * self.page_size,
                max_model_len=window,
                largest_model_len=largest,
                max_num_seqs=settings.max_num_seqs,
                num_short_seqs=(pages + uses["kv rings"]) // short if "kv rings" in uses else 0,
            ),
        )

    def _experts(self, resident: bool, num_pages: int) -> ExpertPlan:
        """Host memory keeps what it can; what it cannot is static if the card has room, else disk.

        Static rows are never evicted, so they need no copy elsewhere.
        """
        total = self.num_rows
        static, cached, on_host, on_disk = total, 0, 0, 0
        if not resident:
            on_card = (self.room - self.staging - num_pages * self.page) // self.row
            host_room = self._host_room // self.whole_row
            spare = min(on_card, total) - self.least_cached
            static = min(max(total - host_room, 0), max(spare, 0))
            cached = min(on_card - static, total - static)
            on_host = min(host_room, total - static)
            on_disk = total - static - on_host
        return ExpertPlan(
            row_bytes=self.whole_row,
            num_rows=total,
            num_static=static,
            num_cached=cached,
            num_host=on_host,
            num_disk=on_disk,
            num_layer_rows=self.model.num_experts,
        )

    @property
    def _host_room(self) -> int:
        kept = self.settings.host_cache_bytes + self.settings.snapshot_bytes
        return max(0, self.hardware.host_bytes - HOST_RESERVE_BYTES - kept)

    def _host_bytes(self, experts: ExpertPlan) -> dict[str, int]:
        if not self.has_tiers:
            return {}
        uses = {
            "experts": experts.num_host * self.whole_row,
            "kv in host memory": self.settings.host_cache_bytes,
            "resume snapshots": self.settings.snapshot_bytes,
            "reserve": HOST_RESERVE_BYTES,
        }
        uses["free"] = self.hardware.host_bytes - sum(uses.values())
        if uses["free"] < 0:
            raise ConfigError(
                f"--ram is {self.hardware.host_bytes / GIB:.1f} GiB; at least "
                f"{(sum(uses.values()) - uses['free']) / GIB:.1f} GiB are needed beside the cards"
            )
        return {use: size for use, size in uses.items() if size}

    # Refusals

    def _refusal(self, num_pages: int, largest: int) -> str:
        least = self.num_rows * self.row
        if self.has_tiers:
            least = min(least, self.staging + self.least_cached * self.row)
        needed = sum(self.fixed.values()) + least + num_pages * self.page
        have, what = self.hardware.memory_bytes, "of a card" if self.has_tiers else "of memory"
        parts = [f"{use} {size / GIB:.2f}" for use, size in self.fixed.items() if size > GIB // 4]
        what_for = "window" if self.settings.kv_cache_bytes is None else "KV pool"
        fits = f"The largest window that fits is {largest} tokens"
        if largest == 0:
            fits = "No window fits"
        return (
            f"{self.hardware.label}: a {what_for} of {num_pages * self.page_size} tokens for "
            f"{self.settings.max_num_seqs} sequences needs {needed / GIB:.2f} GiB {what}; "
            f"{have / GIB:.2f} GiB are available. "
            f"{fits}. It takes: {', '.join([*parts, f'experts {least / GIB:.2f}'])} GiB, and "
            f"{self.page / self.page_size:.0f} bytes of pages a token. "
            f"Change: {'; '.join(self._remedies(needed - have, largest))}"
        )

    def _remedies(self, excess: int, largest: int) -> list[str]:
        """What brings the plan below what is there, each alone where a number is given."""
        model, settings = self.model, self.settings
        found = []
        if largest and settings.kv_cache_bytes is None:
            found.append(f"--max-model-len {largest}")
        elif largest:
            shorter = (settings.max_model_len or 0) > largest
            window = f" with --max-model-len {largest}" if shorter else ""
            found.append(f"--kv-cache-memory {self.most_pages * self.page}{window}")
        if not self.has_tiers and settings.host_cache_bytes > excess:
            found.append(f"--host-cache-memory {settings.host_cache_bytes - excess}")
        if model.kv.bytes_per_seq:
            fewer = settings.max_num_seqs + -excess // model.kv.bytes_per_seq
            if fewer >= 1:
                found.append(f"--max-num-seqs {fewer}")
        chunk = self._chunk_that_frees(excess)
        if chunk >= max(256, settings.max_num_seqs):
            found.append(f"--max-num-batched-tokens {chunk}")
        narrower = {"fp32": "fp8", "bf16": "fp8"}.get(model.kv_dtype)
        if model.kv_dtype == "fp8" and "GlmMoeDsa" in model.architecture:
            narrower = "nvfp4"
        if narrower:
            found.append(f"--kv-cache-dtype {narrower}")
        if model.dense_dtype == "keep" and _is_bf16(model) and self.has_tiers:
            found.append("--dense-dtype fp8 (at conversion)")
        if self.has_tiers:
            found.append("more or larger cards (--gpu)")
        else:
            found.append("--expert-pool and --host-experts, so that experts come from disk")
            found.append("a machine with more memory")
        return found

    def _chunk_that_frees(self, excess: int) -> int:
        """Tokens of a chunk that takes so many bytes less than the one asked for; 0 or less if none
        does."""
        model, most = self.model, self.settings.max_num_batched_tokens
        if not self.has_tiers:
            return most + -excess // (2 * model.step_bytes_per_token)
        ranks = self.hardware.num_devices
        wanted = model.step_bytes(most, ranks) - excess
        return bisect_right(range(most), wanted, key=lambda n: model.step_bytes(n, ranks)) - 1


def _is_bf16(model: Footprint) -> bool:
    """Whether the linears outside of routed experts are bf16."""
    shares = {dtype: share.on(1) for dtype, share in model.dense.resident.items()}
    return shares.get("BF16", 0) > sum(shares.values()) / 2
