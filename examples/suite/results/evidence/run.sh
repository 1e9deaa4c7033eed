#!/bin/sh
# The commands of README.md; run from the root of the repository with the base's folder as BASE.
set -e
E=examples/suite/results/evidence
A=examples/suite/adapters
EVEN="$A/clock $A/initials $A/order --suite $E/suite.yaml --limit 24 -o $E/even"
coram-hf sweep $BASE $EVEN --lambda 1:3:0.5 --line full --line lr --baseline linear
coram-hf compare $BASE $EVEN --lambda 1:3:0.5 --line full --line lr --baseline linear --baseline ties
coram-hf sweep $BASE $A/clock $A/initials-hard $A/order --suite $E/uneven.yaml --limit 24 -o $E/uneven --lambda 0.5:2:0.5 --line full --baseline linear
coram-hf sweep $BASE $EVEN --grid conflict --grid residual --line full --baseline linear --baseline ties
coram-hf analyse $E/even $E/uneven examples/paper/grid.json -o $E/analysis
