#!/bin/sh
# Pin the images by digest, so that a tag that is moved changes nothing:  ./pin.sh
# Asks their registries what each tag is now, and writes NAME:TAG@sha256:… into .env and Dockerfile.
# Run it again to move to what the tags have become; `git diff` shows what moved.
set -eu
cd "$(dirname "$0")"
pin() {
    digest=$(docker buildx imagetools inspect "$1" --format '{{.Manifest.Digest}}')
    case $digest in
    sha256:*) ;;
    *) echo "pin.sh: no digest for $1: $digest" >&2 && exit 1 ;;
    esac
    sed -i "s|$1\(@sha256:[0-9a-f]*\)\{0,1\}|$1@$digest|" "$2"
    echo "pin.sh: $1 is $digest"
}
for image in $(sed -n 's/^\(HAPROXY\|REDIS\|PROMETHEUS\|GRAFANA\|VLLM\)_IMAGE=\([^@]*\).*/\2/p' .env); do
    pin "$image" .env
done
for image in $(sed -n 's/^FROM \([^ @]*\).*/\1/p' Dockerfile | sort -u); do
    pin "$image" Dockerfile
done
