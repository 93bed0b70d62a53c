"""`python -m moet.runtime.parallel.follower`: a rank that rank 0 has started.

Its orders are the first line of its standard input; when that closes, rank 0 is gone.
"""

from __future__ import annotations

import os
import sys
import threading

import msgspec
import torch

from moet import log
from moet.runtime.parallel.ranks import Orders
from moet.runtime.parallel.start import be_rank, leave_signals_to_rank_0


def main() -> None:
    """Be the rank that the orders name."""
    leave_signals_to_rank_0()  # which ends this process while it loads
    orders = msgspec.json.decode(sys.stdin.buffer.readline(), type=Orders)
    threading.Thread(target=_end_with_rank_0, daemon=True).start()
    if orders.log_level is not None:
        log.set_up(level=orders.log_level)
    if orders.config.settings.arch == "reference":
        threads = torch.get_num_threads() // orders.config.parallel.num_ranks
        torch.set_num_threads(max(1, threads))
    be_rank(orders.config, orders.place, orders.place.rank)


def _end_with_rank_0() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
