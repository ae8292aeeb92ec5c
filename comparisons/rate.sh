#!/bin/sh
# 17,280 units of a GPT-2-shaped random model: 5 prompts x 4 positions x 144 heads x 6 radii, query fixed (exact) and
# moving (lagrangian), first-order on both; two processes. The last line printed is the rate.
#     sh comparisons/rate.sh runs/rate
set -e
out=${1:?usage: rate.sh FOLDER}
here=$(dirname "$0")
[ -d "$out/model" ] || python "$here/make_gpt2.py" random "$out/model"
set --
for text in "The old bridge was closed" "Her second novel sold well" "Rain fell on the empty sq" "They counted every vote t" "A proof is a path that so"; do
    set -- "$@" --token-ids "$(python "$here/make_gpt2.py" ids "$text")"
done
for moves in no yes; do
    [ $moves = no ] && method=exact || method=lagrangian
    attn-bounds sweep --model "$out/model" "$@" --queries 6,12,18,24 --radii .001,.002,.005,.01,.02,.05 \
        --methods "$method,first-order" --query-moves $moves --jobs 2 --resume --out "$out/query-moves-$moves"
done
