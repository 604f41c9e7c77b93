#!/bin/sh
# Usage: prepare.sh CIFAR MONTAGE. Fills local/away with CIFAR-100 in two parts of 49 MB, and with the packages that training
# needs. MONTAGE is a script that packs a folder of images, and unpacks it in CIFAR-100's layout. The packages are pure Python;
# matplotlib, scikit-learn and Jinja2 are looked for but not used by training: empty folders do.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
away=$root/local/away
mkdir -p "$away/pkgs"
for name in rich markdown_it mdurl pygments tomli_w filelock; do
    cp -r "$("$root/.venv/bin/python" -c "import $name; print(*$name.__path__)")" "$away/pkgs/"
done
find "$away/pkgs" -name __pycache__ -prune -exec rm -r {} +
for name in matplotlib sklearn jinja2; do mkdir -p "$away/pkgs/$name" && touch "$away/pkgs/$name/__init__.py"; done
"$root/.venv/bin/python" -c "import PIL" 2>/dev/null || "$root/.venv/bin/python" -m pip install --quiet pillow
cp "$2" "$away/pkgs/montage.py"
"$root/.venv/bin/python" "$away/pkgs/montage.py" pack "$1" "$away" --parts 2
du -sh "$away"/*
