#!/usr/bin/env bash
# One model over two hosts: run on each host, rank 0's first.
#
#   on host A:  two_hosts.sh 0 10.0.0.1 MODEL -tp 2
#   on host B:  two_hosts.sh 1 10.0.0.1 MODEL -tp 2
#
# NODE is 0 on the host that answers HTTP; ADDRESS is that host's, as the other one reaches it.
# Everything behind MODEL goes to `moet serve` and must be the same on both, and so must the pack.
# RANKS_PER_HOST: processes on each host (1). NIC: the network interface that NCCL is to use.
set -euo pipefail
node=$1 address=$2 model=$3
shift 3
if [[ -n ${NIC:-} ]]; then
    export NCCL_SOCKET_IFNAME=$NIC
fi
exec torchrun --nnodes 2 --nproc-per-node "${RANKS_PER_HOST:-1}" --node-rank "$node" \
    --master-addr "$address" --master-port "${MASTER_PORT:-29400}" \
    -m moet serve "$model" --host "${HTTP_HOST:-0.0.0.0}" --port "${HTTP_PORT:-8000}" "$@"
