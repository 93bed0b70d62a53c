"""How many expert rows each tier holds: byte budgets in, counts out. Touches no memory."""

from __future__ import annotations

from dataclasses import dataclass

from moet.errors import ConfigError
from moet.runtime.experts.disk import NUM_READERS

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class TierSizes:
    """In rows. num_static of num_slots never leave. num_staging places are in flight at most."""

    num_slots: int
    num_static: int
    num_places: int
    num_staging: int
    num_rows: int

    @property
    def all_in_memory(self) -> bool:
        """Whether no row has to be read while steps run."""
        return self.num_static + self.num_places >= self.num_rows


def in_mib(num_bytes: int) -> str:
    """A size that holds so many bytes, as flags take it."""
    return f"{-(-num_bytes // 2**20)}MiB"


def tier_sizes(
    *,
    row_bytes: int,
    num_rows: int,
    top_k: int,
    pool_bytes: int | None,
    host_bytes: int | None,
    static_bytes: int = 0,
    staging_bytes: int = 2 * GIB,
    disk: bool = True,
    pool_flag: str = "--expert-pool",
) -> TierSizes:
    """Cut byte budgets into rows; None is room for all.

    Raises ConfigError if a token's experts do not fit the pool, or rows would have no place.
    """
    num_slots = num_rows if pool_bytes is None else min(num_rows, pool_bytes // row_bytes)
    num_static = min(static_bytes // row_bytes, num_rows)
    least = num_static + top_k
    if num_slots < min(least, num_rows):
        raise ConfigError(
            f"{pool_flag} gives {num_slots} expert slots of {row_bytes} bytes; {least} are needed, "
            f"{top_k} for the experts of a token and {num_static} static ones: give it "
            f"{in_mib(least * row_bytes)}"
        )
    rest = num_rows - num_static
    num_places = rest if host_bytes is None else min(rest, host_bytes // row_bytes)
    if num_places < rest and not disk:
        raise ConfigError(
            f"{rest - num_places} of {num_rows} expert rows have no place in memory and "
            "--no-disk-experts forbids to read them while serving: give --host-experts "
            f"{in_mib(rest * row_bytes)}, or more --static-experts"
        )
    num_staging = max(2, min(staging_bytes // row_bytes, num_rows))
    in_flight = 2 * NUM_READERS
    if num_places < rest:  # what is read passes through
        num_places = max(num_places, in_flight)
        num_staging = min(num_staging, max(2, num_places // 2))
    return TierSizes(
        num_slots=num_slots,
        num_static=min(num_static, num_slots - 1),
        num_places=num_places,
        num_staging=num_staging,
        num_rows=num_rows,
    )
