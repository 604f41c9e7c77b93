#!/bin/sh
# Usage: second.sh SECONDS [reproduce] TABLE OPTIONS, or: second.sh SECONDS sweep OPTIONS, or: second.sh SECONDS resume OPTIONS for
# the sweeps in local/away/runs. Unpacks the data, starts that command of tbbn in bf16 (or in the --precision given; a resumed
# sweep has its own), and waits for it. Called again, it starts another command beside the first.
# The runs' folder is the working directory, so that the settings name the default folder of data.
set -eu
away=${AWAY:-/tmp/away}
seconds=$1
shift
started=$(date +%s)
if [ ! -d "$away/parts/part0" ]; then
    echo "$away has no first part of the data: this is another machine than first.sh's. Start again with call 1."
    exit 1
fi
case $1 in
    reproduce | sweep | resume) command=$1 && shift ;;
    *) command=reproduce ;;
esac
common="--precision bf16 --out runs"
[ "$command" != resume ] || common=runs
test ! -d local/away/runs || cp -r local/away/runs "$away/work/"
test ! -d local/away/part1 || cp -r local/away/part1 "$away/parts/"
cd "$away/work"
if [ ! -e data/cifar-100-python/meta ]; then # written last
    python "$away/pkgs/montage.py" cifar "$away/parts" data
fi
while kill -0 "$(cat "$away/warm.pid")" 2>/dev/null && [ $(($(date +%s) - started)) -lt 120 ]; do sleep 1; done
tail -n 3 "$away/warm.log"
echo "tbbn $command $*" >> "$away/log"
PYTHONPATH=$away/src:$away/pkgs setsid python -m tbbn.bench.cli.main "$command" $common "$@" >> "$away/log" 2>&1 &
echo $! >> "$away/pids"
exec sh "$away/tools/away/wait.sh" $((seconds - ($(date +%s) - started)))
