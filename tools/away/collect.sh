#!/bin/sh
# Usage: collect.sh ARCHIVE TABLE [FOLDER], here, after every call. Commits the finished runs of a records.tgz to results/TABLE, or
# those of one FOLDER in it: with more than one command there, each has its own. ONLY='ft-*' takes the runs of these names;
# REPLACE=yes puts them in place of older runs.
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
if [ $# -lt 3 ] && [ "$(find "$unpacked" -name record.json | sed 's|/[^/]*/record.json$||' | sort -u | wc -l)" -gt 1 ]; then
    echo "runs of more than one command; name the FOLDER of one of them:"
    ls "$unpacked"
    rm -r "$unpacked"
    exit 1
fi
find "$unpacked/${3:-}" -name record.json | sort > "$unpacked/records"
while read -r record; do
    run=$(dirname "$record")
    kept=results/$2/$(basename "$run")
    case $(basename "$run") in ${ONLY:-*}) ;; *) continue ;; esac
    if ! grep -q '^ "status": "finished"' "$record"; then
        echo "not finished: $(basename "$run")"
    elif [ -z "${REPLACE:-}" ] && [ -e "$kept/record.json" ] && ! cmp -s "$record" "$kept/record.json"; then
        echo "not collected: $kept is there, and is another run; to replace it: REPLACE=yes"
    else
        mkdir -p "$kept"
        for file in config.toml predictions.safetensors record.json; do
            [ ! -e "$run/$file" ] || cp "$run/$file" "$kept/"
        done
    fi
done < "$unpacked/records"
rm -r "$unpacked"
if [ ! -d "results/$2" ]; then
    echo "no finished run yet"
    exit 0
fi
git add "results/$2"
git diff --cached --quiet -- "results/$2" || git commit --quiet -m "Add finished runs to results/$2" -- "results/$2"
git log --oneline -1 --stat -- "results/$2"
