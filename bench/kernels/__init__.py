"""How near to memory and matrix speed do the kernels run? `python -m bench.kernels [--only PART]`

Parts: decode (weight streaming, the MoE layer), prefill (experts, dense) and peers (the same shapes
elsewhere). Every figure is the median of captured-graph replays over weights that rotate beyond the
L2 cache, and stands beside the read rate that the same run measured. Needs a CUDA device.
"""
