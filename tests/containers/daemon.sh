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

not_# Say why there can be no daemon of our own.
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
