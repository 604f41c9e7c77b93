#!/bin/sh
# Keeps the code and the first part of the data on the lent machine, and compiles the kernels with tiny runs on random images.
# Usage: first.sh [METHODS [NORMS [OPTIONS]]], as they will be run. Any norm will do, also one that is in no table.
set -eu
away=${AWAY:-/tmp/away}
methods=${1:-eeil,lucir,ssil,podnet,afc}
norms=${2:-bn,cn,tbbn}
shift $(($# < 2 ? $# : 2))
mkdir -p "$away/parts" "$away/work/data" "$away/warm"
cp -r local/away/part0 "$away/parts/"
cp -r local/away/pkgs src tools "$away/"
cd "$away/warm"
python "$away/tools/away/random_cifar.py" data/cifar-100-python
PYTHONPATH=$away/src:$away/pkgs setsid python -m tbbn.bench.cli.main sweep table2-cifar100 --method "$methods" --norm "$norms" \
    --seeds 1 --precision bf16 --train.scale 0.01 --data.stop_after 3 --lanes 5 "$@" > "$away/warm.log" 2>&1 &
echo $! > "$away/warm.pid"
sleep 5
cat "$away/warm.log"
