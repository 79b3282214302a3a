#!/usr/bin/env bash
# From nothing to the scorer in examples/scorers/smollm2-135m-kvpop, and how it compares: a few hours on two cores.
# The shares of its heads come afterwards: `kvpop calibrate MODEL --policy kvpop --scorer OUT` measures them.
#
#   examples/distill_demo.sh [OUT [OPTIONS of `kvpop distill`]]        stopped at any time, the same command goes on
#
# DATA (a folder that `kvpop distill texts` has filled; without it data/ is filled, with all kinds of text or with those in KINDS),
# LENGTHS, SHARES and ROWS (of the comparison) can be set.
set -euo pipefail

out=${1:-runs/smollm2-135m-kvpop}
shift || true
here=$(cd "$(dirname "$0")/.." && pwd)
kvpop=${KVPOP:-$here/.venv/bin/kvpop}
model=${MODEL:-$here/models/SmolLM2-135M-Instruct}
data=${DATA:-$here/data}

[ -x "$kvpop" ] && [ -e "$model/config.json" ] || make -C "$here" model
[ -n "${DATA:-}" ] || "$kvpop" distill texts --out "$data" ${KINDS:+--data $KINDS} # what is there already is left alone
[ -n "$(ls "$data/held-out" 2> /dev/null)" ] || { echo "$data/held-out holds no text to compare on: put some there, or leave KINDS out" >&2; exit 2; }
"$kvpop" distill --recipe demo --model "$model" --data "$data/training" --out "$out" "$@"
for text in "$data"/held-out/*; do
    echo "== $(basename "$text")"
    "$kvpop" eval --model "$model" --data "$text" --split all --scorer "$out" --length ${LENGTHS:-1024 2048} \
        --share ${SHARES:-4 8} --rows "${ROWS:-2}"
done
