#!/bin/sh
# Usage: collect.sh ARCHIVE TABLE, here, after every call. Commits the finished runs of a records.tgz to results/TABLE.
# A sitting that is cut off loses what is not committed, and with it all the time on the machine.
set -eu
archive=$(realpath "$1")
cd "$(dirname "$0")/../.."
moved=${MOVED:-/tmp/results} # where results/ lies while it does not travel
if [ ! -d results ]; then
    mv "$moved" results
    trap 'mv results "$moved"' EXIT
fi
unpacked=$(mktemp -d)
tar -xzf "$archive" -C "$unpacked"
for record in $(find "$unpacked" -name record.json | sort); do
    run=$(dirname "$record")
    if grep -q '^ "status": "finished"' "$record"; then
        mkdir -p "results/$2/$(basename "$run")"
        for file in config.toml predictions.safetensors record.json; do
            [ ! -e "$run/$file" ] || cp "$run/$file" "results/$2/$(basename "$run")/"
        done
    else
        echo "not finished: $(basename "$run")"
    fi
done
rm -r "$unpacked"
git add "results/$2"
git diff --cached --quiet -- "results/$2" || git commit --quiet -m "Add finished runs to results/$2" -- "results/$2"
git log --oneline -1 --stat -- "results/$2"
