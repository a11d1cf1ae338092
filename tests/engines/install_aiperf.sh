#!/usr/bin/env bash
# Install AIPerf, NVIDIA's load generator, which test_5_aiperf.py runs, into build/aiperf.
#
#   tests/engines/install_aiperf.sh        half a minute and 0.9 GB; nothing if already done
#
# The pins are made by
#   echo aiperf==0.13.0 | uv pip compile --universal --no-header --no-annotate \
#     --python-version 3.11 - -o aiperf.txt
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
folder=$(cd "$here/../.." && pwd)/build/aiperf
python=${PYTHON:-python3}
wanted=$({ cat "$here/install_aiperf.sh" "$here/aiperf.txt" && "$python" -VV; } | sha256sum)
if [ "$(cat "$folder/stamp" 2>/dev/null)" = "$wanted" ]; then
    echo "install_aiperf.sh: $folder is up to date"
    exit 0
fi
echo "install_aiperf.sh: installing AIPerf (half a minute, 0.9 GB)"
rm -rf "$folder"
"$python" -m venv "$folder"
"$folder/bin/python" -m pip install -q --no-input --disable-pip-version-check --no-compile \
    -r "$here/aiperf.txt"
echo "$wanted" >"$folder/stamp"
