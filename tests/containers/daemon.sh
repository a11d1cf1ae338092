#!/usr/bin/env bash
# Run a command beside a Docker daemon:
#   daemon.sh install        download what a daemon of our own needs, into build/docker
#   daemon.sh run COMMAND…   use the daemon of this machine, or start one for the time of COMMAND
#
# A daemon of our own needs root on Debian or Ubuntu. It runs in namespaces of its own, so its
# addresses and ports are not those of the machine, and all of it ends with COMMAND. Images cannot
# be pulled everywhere: images.sh makes stand-ins for those that are missing.
# If there is no way to have a daemon, this says why and ends with 0.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=$(cd "$here/../.." && pwd)/build/docker
root=$folder/root

not_run() {
    echo "compose-real: not run: $*"
    exit 0
}

# Docker 26 and Compose 2.26 are Debian 13's; their programs are static. What links the machine's
# libraries comes from the machine's own release.
install() (
    if [ -e "$folder/.installed" ] || has_daemon; then exit 0; fi
    check
    rm -rf "$folder/base" "$root"
    mkdir -p "$folder"/{debs,apt/lists/partial,apt/cache/archives/partial}
    local mirror settings=$folder/apt/apt.conf
    # The mirror that this machine uses. `apt-get update` must have run; .ci/run does it if need be.
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' \
        'Component: main' | grep -v security | head -n 1)
    [ -n "$mirror" ] || { echo "daemon.sh: run apt-get update first" >&2 && exit 1; }
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror trixie main" >"$folder/apt/sources.list"
    : >"$folder/apt/status"
    cat >"$settings" <<END
Dir::Etc::SourceList "$folder/apt/sources.list";
Dir::Etc::SourceParts "/dev/null";
Dir::State::Lists "$folder/apt/lists";
Dir::State::status "$folder/apt/status";
Dir::Cache "$folder/apt/cache";
APT::Sandbox::User "root";
END
    cd "$folder/debs"
    APT_CONFIG=$settings apt-get update -qq
    APT_CONFIG=$settings apt-get download -qq docker.io docker-cli docker-buildx docker-compose containerd
    apt-get download -qq -o APT::Sandbox::User=root runc slirp4netns libslirp0 debootstrap iptables libip4tc2 libip6tc2 \
        libxtables12 libnftnl11 libmnl0 libnetfilter-conntrack3 libnfnetlink0
    for package in *.deb; do dpkg-deb -x "$package" "$root"; done
    ln -sf xtables-legacy-multi "$root/usr/sbin/iptables"
    ln -sf xtables-legacy-multi "$root/usr/sbin/ip6tables"
    # Stands in for the NVIDIA container toolkit: Docker looks for a program of this name, and runs
    # it before each container that has a GPU.
    printf '#!/bin/sh\nexit 0\n' >"$root/usr/bin/nvidia-container-runtime-hook"
    chmod +x "$root/usr/bin/nvidia-container-runtime-hook"
    base "$mirror"
    touch "$folder/.installed"
)

# The file system of the stand-ins: Debian 12 with Python and the servers of the stacks.
base() {
    DEBOOTSTRAP_DIR=$root/usr/share/debootstrap "$root/usr/sbin/debootstrap" --variant=minbase \
        --include=ca-certificates,python3,python3-pip,python3-venv,haproxy,redis-server,prometheus,curl,wget,libcurl4,libgomp1,libibverbs1,libnuma1,librdmacm1,libunwind8 \
        bookworm "$folder/base" "$1" >"$folder/debootstrap.log" 2>&1
    ln -s python3 "$folder/base/usr/bin/python"
    rm "$folder/base/usr/lib/python3.11/EXTERNALLY-MANAGED"
    cp /etc/ssl/certs/ca-certificates.crt "$folder/base/etc/ssl/certs/ca-certificates.crt"
    tar -C "$folder/base" --exclude=./var/cache/apt --exclude=./var/lib/apt --exclude=./usr/share/doc \
        --exclude=./usr/share/man --exclude=./usr/share/locale -cf "$folder/base.tar" .
    rm -rf "$folder/base"
}

# In the namespaces, as their first process: whatever it started ends with it.
inside() {
    mount -t tmpfs tmpfs /run
    ip link set lo up
    PATH=$root/usr/bin:$root/usr/sbin:$PATH XTABLES_LIBDIR=$root/usr/lib/x86_64-linux-gnu/xtables \
        LD_LIBRARY_PATH=$root/usr/lib/x86_64-linux-gnu dockerd --data-root "$folder/data" \
        --exec-root /run/docker --pidfile /run/dockerd.pid -H unix:///run/docker.sock \
        >"$folder/dockerd.log" 2>&1 &
    local daemon=$!
    export DOCKER_HOST=unix:///run/docker.sock DOCKER_CONFIG=/run/docker-config
    export PATH=$root/usr/bin:$PATH
    mkdir -p "$DOCKER_CONFIG/cli-plugins"
    ln -s "$root"/usr/libexec/docker/cli-plugins/* "$DOCKER_CONFIG/cli-plugins/"
    for _ in $(seq 300); do
        if docker info >/dev/null 2>&1; then
            bash "$here/images.sh" "$folder/base.tar"
            "$@"
            return
        fi
        kill -0 "$daemon" 2>/dev/null || break
        sleep 0.1
    done
    not_run "dockerd does not start: $(grep -E 'level=(error|fatal)|^failed' "$folder/dockerd.log" | tail -n 1)"
}

# Say why there can be no daemon of our own.
check() {
    [ "$(id -u)" -eq 0 ] || not_run "no Docker daemon answers, and only root can start one"
    command -v apt-get >/dev/null || not_run "no Docker daemon answers, and one is made from Debian's packages"
    [ -c /dev/net/tun ] || not_run "no Docker daemon answers, and there is no /dev/net/tun for one of our own"
    unshare --mount --net --pid --fork true 2>/dev/null || not_run "no Docker daemon answers, and namespaces are not allowed here"
}

has_daemon() { docker info >/dev/null 2>&1; }

run() {
    if has_daemon; then exec "$@"; fi
    check
    bash "$here/daemon.sh" install || not_run "the packages of a Docker daemon cannot be installed"
    unshare --mount --net --pid --fork --kill-child --mount-proc bash "$here/daemon.sh" inside "$@" &
    namespaces=$!
    local first=
    trap 'kill -KILL "$namespaces" 2>/dev/null || true' EXIT
    while [ -z "$first" ] && kill -0 "$namespaces"; do
        sleep 0.05
        first=$(cat "/proc/$namespaces/task/$namespaces/children")
    done
    # The way out, for `pip` in a build: user-mode networking. The machine's own network stays as it is.
    LD_LIBRARY_PATH=$root/usr/lib/x86_64-linux-gnu "$root/usr/bin/slirp4netns" --configure \
        --mtu=65520 --disable-host-loopback "${first%% *}" tap0 >"$folder/slirp4netns.log" 2>&1 &
    wait "$namespaces"
}

"$@"
