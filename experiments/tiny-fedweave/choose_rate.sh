#!/usr/bin/env bash
# Chooses each method's learning rate on validation rows of seed 41, which no reported run uses, after 4 of 20 rounds.
# The router's rate is half of it, as in the paper.
# usage: choose_rate.sh OUT
set -euo pipefail
here=$(dirname "$0")
for method in ${METHODS:-fedit fedweave}; do
  for lr in ${RATES:-1.0e-3 3.0e-3 1.0e-2}; do
    router=$(python3 -c "print($lr / 2)")
    fedloom run "$here/$method.yaml" --out "$1/$method-$lr" --quiet --set seed=41 --set federation.rounds=4 \
      --set training.lr=$lr --set training.router_lr=$router --set evaluation.split=validation \
      --set evaluation.every=0 --set evaluation.generate=false
  done
done
