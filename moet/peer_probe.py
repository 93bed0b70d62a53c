"""`python -m moet.peer_probe A B`: copies between two GPUs, both ways, and says what arrived.

Run by `moet doctor` in a process of its own, since a copy between GPUs that see each other only on
paper does not fail but hang.
"""

from __future__ import annotations

import sys

import torch

NUM_WORDS = 1 << 20


def main() -> None:
    first, second = (torch.device("cuda", int(index)) for index in sys.argv[1:3])
    direct = torch.cuda.can_device_access_peer(first, second)
    for source, target in ((first, second), (second, first)):
        sent = torch.arange(NUM_WORDS, device=source, dtype=torch.int32)
        if not torch.equal(sent.to(target).cpu(), sent.cpu()):
            print("wrong: what arrives is not what was sent")
            return
    print("ok" if direct else "ok, through host memory")


if __name__ == "__main__":
    main()
