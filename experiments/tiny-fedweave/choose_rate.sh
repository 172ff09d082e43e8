#!/usr/bin/env bash
# Chooses the learning rate for both methods: the best of FedIT's (the baseline's) on validation rows of seed 41, which
# no reported run uses, after 4 rounds. The router's rate stays half of it, as in the paper.
# usage: choose_rate.sh OUT
set -euo pipefail
here=$(dirname "$0")
for lr in ${RATES:-1.0e-4 1.0e-3 3.0e-3}; do
  fedloom run "$here/fedit.yaml" --out "$1/fedit-$lr" --quiet --set seed=41 --set federation.rounds=4 \
    --set training.lr=$lr --set evaluation.split=validation --set evaluation.every=0 --set evaluation.generate=false
done
