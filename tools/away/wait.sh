#!/bin/sh
# Usage: wait.sh SECONDS [checkpoints]. Waits for the runs, then puts the records so far into $OUT, and the checkpoints of
# unfinished runs if that is asked for, as one archive in pieces of 15 MiB.
set -eu
away=${AWAY:-/tmp/away}
until=$(($(date +%s) + $1))
running() {
    for pid in $(cat "$away/pids"); do
        kill -0 "$pid" 2>/dev/null && return
    done
    return 1
}
while running && [ "$(date +%s)" -lt "$until" ]; do sleep 1; done
if running; then echo "still running"; else echo "ended"; fi
tail -c 1500 "$away/log"
cp "$away/log" "$OUT/log.txt"
mkdir -p "$away/work/runs" # a command that has only just started has not made it
cd "$away/work/runs"
# tar complains of a file that a run replaces or deletes meanwhile; the others are in the archive.
find . -name '*.json' -o -name '*.toml' -o -name 'predictions*.safetensors' > "$away/records"
tar -czf "$OUT/records.tgz" -T "$away/records" || echo "tar: $?"
# A finished run has a checkpoint as well; it would only fill what may come back.
find . -name checkpoint.safetensors | sort | while read -r checkpoint; do
    grep -qs '^ "status": "finished"' "$(dirname "$checkpoint")/record.json" || echo "$checkpoint"
done > "$away/unfinished"
sed 's|^\./|unfinished: |; s|/checkpoint.safetensors$||' "$away/unfinished"
if [ "${2:-}" = checkpoints ] && [ -s "$away/unfinished" ]; then
    tar -cf - -T "$away/unfinished" | split -b 15m - "$OUT/unfinished.tar."
fi
ls -l "$OUT"
