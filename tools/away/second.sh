#!/bin/sh
# Usage: second.sh SECONDS TABLE OPTIONS. Unpacks the data, starts `tbbn reproduce TABLE OPTIONS` in bf16, and waits for it.
# The runs' folder is the working directory, so that the settings name the default folder of data.
set -eu
away=${AWAY:-/tmp/away}
seconds=$1
shift
started=$(date +%s)
cp -r local/away/part1 "$away/parts/"
test ! -d local/away/runs || cp -r local/away/runs "$away/work/"
cd "$away/work"
python "$away/pkgs/montage.py" cifar "$away/parts" data
while kill -0 "$(cat "$away/warm.pid")" 2>/dev/null && [ $(($(date +%s) - started)) -lt 120 ]; do sleep 1; done
tail -n 3 "$away/warm.log"
PYTHONPATH=$away/src:$away/pkgs setsid python -m tbbn.bench.cli.main reproduce "$@" --precision bf16 --out runs > "$away/log" 2>&1 &
echo $! > "$away/pid"
exec sh "$away/tools/away/wait.sh" $((seconds - ($(date +%s) - started)))
