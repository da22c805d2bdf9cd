#!/usr/bin/env bash
# Two hosts by torchrun. In a checkout of this repository, on the first host and on the second:
#
#     RANKS=8 bash examples/launch/torchrun_two_hosts.sh HOST 0 [options of train.py]
#     RANKS=8 bash examples/launch/torchrun_two_hosts.sh HOST 1 [options of train.py]
#
# HOST: a name or address of the first host that the second one can reach. RANKS: ranks of each host, as many as it has
# GPUs. PORT: a free one of HOST.
set -eu
host=$1 number=$2
shift 2
exec torchrun --nnodes 2 --node-rank "$number" --nproc-per-node "${RANKS:-8}" \
    --master-addr "$host" --master-port "${PORT:-29500}" examples/launch/train.py "$@"
