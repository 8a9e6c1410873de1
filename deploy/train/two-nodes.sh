#!/usr/bin/env bash
# Two nodes on one machine: network namespaces with addresses and names of their own, joined by a cable (needs root and `ip`).
#   deploy/train/two-nodes.sh up HOSTFILE              make them, and write a hostfile of both
#   deploy/train/two-nodes.sh run 0 COMMAND...         run a command on node 0 (or 1)
#   deploy/train/two-nodes.sh down                     take them away
# In each node then: deepspeed --hostfile HOSTFILE --no_ssh --node_rank 0 --master_addr 10.77.0.1 --module lm train ...
set -euo pipefail

node() { echo "pmi-node-$1"; }
cable=pmi-cable # the interface's name in both: what a scheduler hands to all nodes names one

case "${1:-}" in
up)
    for n in 0 1; do ip netns add "$(node $n)"; done
    ip link add pmi-end-0 type veth peer name pmi-end-1
    for n in 0 1; do
        ip link set pmi-end-$n netns "$(node $n)" name "$cable"
        ip -n "$(node $n)" address add "10.77.0.$((n + 1))/24" dev "$cable"
        ip -n "$(node $n)" link set "$cable" up
        ip -n "$(node $n)" link set lo up
        mkdir -p "/etc/netns/$(node $n)" # `ip netns exec` shows what is in here as /etc
        printf '%s\n' '127.0.0.1 localhost' "10.77.0.1 $(node 0)" "10.77.0.2 $(node 1)" > "/etc/netns/$(node $n)/hosts"
    done
    printf '10.77.0.1 slots=1\n10.77.0.2 slots=1\n' > "$2"
    ;;
run)
    n=$2
    shift 2
    # shellcheck disable=SC2016
    exec ip netns exec "$(node "$n")" unshare --uts sh -c 'hostname "$0"; exec "$@"' "$(node "$n")" env GLOO_SOCKET_IFNAME="$cable" "$@"
    ;;
down)
    for n in 0 1; do
        ip netns delete "$(node $n)" 2>/dev/null || true
        rm -rf "/etc/netns/$(node $n)"
    done
    ;;
*)
    sed -n 2,6p "$0"
    exit 2
    ;;
esac
