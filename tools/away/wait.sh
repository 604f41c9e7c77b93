#!/bin/sh
# Usage: wait.sh SECONDS [checkpoints]. Waits for the runs, then puts the records so far into $OUT, and the checkpoints of
# unfinished runs if that is asked for, two to a file.
set -eu
away=${AWAY:-/tmp/away}
until=$(($(date +%s) + $1))
while kill -0 "$(cat "$away/pid")" 2>/dev/null && [ "$(date +%s)" -lt "$until" ]; do sleep 1; done
if kill -0 "$(cat "$away/pid")" 2>/dev/null; then echo "still running"; else echo "ended"; fi
tail -c 1500 "$away/log"
cd "$away/work/runs"
find . -name '*.json' -o -name '*.toml' -o -name 'predictions*.safetensors' | tar -czf "$OUT/records.tgz" -T -
cp "$away/log" "$OUT/log.txt"
for run in $(find . -name checkpoint.safetensors -exec dirname {} \;); do
    echo "unfinished: $run"
    [ "${2:-}" = checkpoints ] && echo "$run" >> "$away/unfinished"
done
if [ "${2:-}" = checkpoints ] && [ -s "$away/unfinished" ]; then
    split -l 2 "$away/unfinished" "$away/pair."
    for pair in "$away"/pair.*; do
        tar -cf "$OUT/unfinished${pair##*pair}.tar" $(sed 's|$|/checkpoint.safetensors|' "$pair")
    done
fi
ls -l "$OUT"
