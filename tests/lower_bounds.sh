#!/usr/bin/env bash
# Run warmroute with the oldest releases that pyproject.toml allows: of dependencies and extras.
#
#   tests/lower_bounds.sh install    into build/lower of the checkout; half a minute
#   tests/lower_bounds.sh            that, unless it is done; then run: two minutes
#
# Of the extra `engines` nothing is installed: tests/engines/install.sh has the one release for it.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
lower=$root/build/lower
extras=dev,experiments,harmony,kimi,mistral,plots
wanted=$(cat "$root/pyproject.toml" "${BASH_SOURCE[0]}" | sha256sum)
if [ "$(cat "$lower/stamp" 2>/dev/null)" != "$wanted" ]; then
    rm -rf "$lower"
    "${PYTHON:-python3}" -m venv "$lower/uv"
    "$lower/uv/bin/python" -m pip install -q --disable-pip-version-check uv
    "${PYTHON:-python3}" -m venv "$lower/venv"
    "$lower/uv/bin/uv" pip install -q --python "$lower/venv/bin/python" \
        --resolution lowest-direct -e "$root[$extras]"
    echo "$wanted" >"$lower/stamp"
fi
[ "${1:-}" != install ] || exit 0

cd "$root"
bin=$lower/venv/bin
for command in $("$bin/warmroute" --help | sed -n '/^Commands/,$s/^  \([a-z]*\) .*/\1/p'); do
    "$bin/warmroute" "$command" --help >/dev/null
done
# Emulated replicas, a router and a driver, each as a process.
"$bin/warmroute" demo --short -o "$lower/demo" >"$lower/demo.log" 2>&1 || {
    cat "$lower/demo.log" && exit 1
}
# What leans most on others' code. Two things are left out: older tokenizers of Mistral's leave
# more prompts to the engine than the golden files say, and a test whose own client is cancelled
# while it connects leaves a socket that older test tools complain about.
"$bin/python" -m pytest -q -p no:cacheprovider -n 2 --dist loadfile -k "not mistral and not share_a_port" \
    tests/api tests/cli tests/cluster tests/emulator tests/http tests/kv_events tests/policies \
    tests/tokens tests/observers/tracing tests/faults/test_kills.py tests/faults/test_replicas.py
"$bin/python" -m pytest -q -p no:cacheprovider tests/test_docs.py -k example_policy
