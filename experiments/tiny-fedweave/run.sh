#!/usr/bin/env bash
# Runs the study: both methods, three seeds. Finished runs are left alone, an interrupted one goes on.
# usage: run.sh OUT
set -euo pipefail
here=$(dirname "$0")
for method in ${METHODS:-fedweave fedit}; do
  for seed in ${SEEDS:-42 43 44}; do
    out=$1/$method-$seed
    [ -f "$out/report.html" ] && continue
    resume=$([ -d "$out/checkpoints" ] && echo --resume || true)
    fedloom run "$here/$method.yaml" --out "$out" --set seed="$seed" $resume
  done
done
