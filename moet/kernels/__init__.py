"""Functions on tensors: each op's contract and reference in torch, and its accelerated forms."""
