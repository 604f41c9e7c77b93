#!/bin/sh
# Keeps the code and the first part of the data on the lent machine, and compiles the kernels with tiny runs on random images.
# Usage: first.sh [METHODS [NORMS]], as they will be run.
set -eu
away=${AWAY:-/tmp/away}
mkdir -p "$away/parts" "$away/work/data" "$away/warm"
cp -r local/away/part0 "$away/parts/"
cp -r local/away/pkgs src tools "$away/"
cd "$away/warm"
python "$away/tools/away/random_cifar.py" data/cifar-100-python
PYTHONPATH=$away/src:$away/pkgs setsid python -m tbbn.bench.cli.main reproduce table2 --method "${1:-eeil,lucir,ssil,podnet,afc}" \
    --norm "${2:-bn,cn,tbbn}" --seeds 1 --precision bf16 --scale 0.01 --data.stop_after 3 --lanes 5 --out runs > "$away/warm.log" 2>&1 &
echo $! > "$away/warm.pid"
sleep 5
cat "$away/warm.log"
