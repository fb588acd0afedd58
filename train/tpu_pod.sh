#!/usr/bin/env bash
# Trains a head on all hosts of a Cloud TPU slice, or goes on with a run that was stopped:
#
#   train/tpu_pod.sh TPU ZONE RECIPE    copy and install this checkout on every host, then train
#   train/tpu_pod.sh TPU ZONE stop      have the run write a checkpoint, export its head and end
#
# TPU is the slice's name (gcloud compute tpus tpu-vm list --zone ZONE). RECIPE is a path in this checkout; the
# data, features and output that it names must be the same folders on every host: a bucket mounted with gcsfuse,
# or Filestore. Training outlives this terminal: the log of each host is peagle_jax/train.log in its home.
set -euo pipefail
[[ $# -eq 3 ]] || { sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 2; }
tpu=$1 zone=$2 recipe=$3
cd "$(dirname "$0")/.."

everywhere() { gcloud compute tpus tpu-vm ssh "$tpu" --zone="$zone" --worker=all --command="$1"; }

if [[ $recipe == stop ]]; then # one host is enough: all agree on the step
  exec gcloud compute tpus tpu-vm ssh "$tpu" --zone="$zone" --worker=0 \
    --command='kill -TERM "$(cat peagle_jax/train.pid)"'
fi

# Everything that git tracks, and the recipe as it is now.
archive=$(mktemp --suffix=.tar.gz)
trap 'rm -f "$archive"' EXIT
{ git ls-files -z; printf '%s\0' "$recipe"; } | sort -zu | tar --create --gzip --null --files-from=- --file="$archive"
gcloud compute tpus tpu-vm scp "$archive" "$tpu:peagle_jax.tar.gz" --zone="$zone" --worker=all

everywhere 'set -e; mkdir -p peagle_jax; tar -xzf peagle_jax.tar.gz -C peagle_jax; cd peagle_jax
  python3 -m pip install --quiet --user uv
  [ -x .venv/bin/python ] || python3 -m uv venv --python 3.12 .venv
  python3 -m uv pip install --quiet --python .venv/bin/python --editable ".[train]" "jax[tpu]"'

# The lock keeps a second run off the slice; the hosts find each other by the slice's own metadata.
everywhere "cd peagle_jax
  nohup flock --nonblock train.lock sh -c 'echo \$\$ > train.pid
    exec .venv/bin/python -m peagle_jax.train --config \"$recipe\" --distributed > train.log 2>&1' \\
    > /dev/null 2>&1 < /dev/null &
  run=\$!; sleep 2; tail --pid=\$run --lines=+1 --follow train.log; wait \$run || echo 'failed, or running already'"
