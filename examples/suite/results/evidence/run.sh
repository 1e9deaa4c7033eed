#!/bin/sh
# The commands of README.md; run from the root of the repository with the base's folder as BASE.
set -e
E=examples/suite/results/evidence
A=examples/suite/adapters
EXPERTS="$A/clock $A/initials $A/order"
coram-hf sweep $BASE $EXPERTS --suite $E/suite.yaml --lambda 1:3:0.5 --line full --line lr --limit 24 --baseline linear -o $E/even
coram-hf compare $BASE $EXPERTS --suite $E/suite.yaml --lambda 1,1.5 --line full --line lr --baseline linear --baseline ties --limit 24 -o $E/compare
coram-hf sweep $BASE $EXPERTS --suite $E/suite.yaml --grid conflict --grid spread --grid residual --grid height --line full --limit 24 --baseline linear -o $E/grid
coram-hf sweep $BASE $A/clock $A/initials-hard $A/order --suite $E/uneven.yaml --lambda 0.5:2:0.5 --line full --line lr --limit 24 --baseline linear -o $E/uneven
coram-hf analyse $E/even $E/uneven examples/paper/grid.json -o $E/analysis
