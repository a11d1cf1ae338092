#!/usr/bin/env bash
# Install the coding agents that test_5_agents.py drives into .engines/clients of the checkout.
#
#   tests/engines/install_clients.sh        about a minute and 1.1 GB; nothing if already done
#
# Without node and npm nothing is installed, and those tests are skipped.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
clients=$(cd "$here/../.." && pwd)/.engines/clients
if ! command -v node >/dev/null || ! command -v npm >/dev/null; then
    echo "install_clients.sh: no node and npm here; the tests with coding agents will be skipped"
    exit 0
fi
mkdir -p "$clients"
wanted=$({ cat "$here/install_clients.sh" "$here/clients/package.json" && node --version; } | sha256sum)
if [ "$(cat "$clients/stamp" 2>/dev/null)" = "$wanted" ]; then
    echo "install_clients.sh: $clients is up to date"
    exit 0
fi
echo "install_clients.sh: installing coding agents (about a minute, 1.1 GB)"
rm -rf "$clients/node_modules" "$clients/stamp"
cp "$here/clients/package.json" "$clients"
cd "$clients"
npm install --ignore-scripts --no-package-lock --no-audit --no-fund --loglevel=error
# What their own install scripts do: put the binary for this machine where the command looks.
node node_modules/@anthropic-ai/claude-code/install.cjs
(cd node_modules/opencode-ai && node postinstall.mjs)
for name in claude codex opencode; do
    node_modules/.bin/$name --version >/dev/null || {
        echo "install_clients.sh: $name was installed but does not run" >&2
        exit 1
    }
done
echo "$wanted" >stamp
