#!/usr/bin/env bash
# A shell loop takes part in a group: `rebalanser run` keeps one subprocess going for each owned resource.
#
#     examples/any_language.sh [SECONDS]
#
# Two nodes share four queues; after half of the time one of them leaves and the other takes over its share.
# {resource} is filled in, and the fencing token is in the environment: give it along with every write, and have
# the receiver refuse a smaller one. The subprocess is told to stop with SIGTERM.
set -euo pipefail

seconds=${1:-6}
folder=$(mktemp -d)
export REBALANSER_REGISTRY="sqlite:///$folder/groups.db"
nodes=()

clean_up() {
  if ((${#nodes[@]})); then
    kill "${nodes[@]}" 2>/dev/null || true
    wait "${nodes[@]}" || true
  fi
  rm -rf "$folder"
}
trap clean_up EXIT

# Any program would do. This one says what it got, and then works until it is told to stop.
program='
  queue=$1
  echo "$REBALANSER_NODE: $queue arrived with token $REBALANSER_TOKEN"
  trap "echo $REBALANSER_NODE: $queue is free; exit 0" TERM
  while true; do sleep 0.2; done
'

rebalanser resources add queues queue-1 queue-2 queue-3 queue-4
for node in a b; do
  rebalanser run --node "$node" queues -- sh -c "$program" sh {resource} &
  nodes+=($!)
done

half=$(awk "BEGIN { print $seconds / 2 }")
sleep "$half"
kill "${nodes[0]}"
wait "${nodes[0]}" || true
unset 'nodes[0]'
sleep "$half"
