#!/usr/bin/env bash
# Make the images that the compose files name, as far as they cannot be pulled:  images.sh BASE.tar
# Their tags come from docker/.env and docker/Dockerfile, their contents from ./Dockerfile. Our own
# image is built from docker/Dockerfile as it is.
set -euo pipefail
cd "$(dirname "$0")/../.."
. docker/.env
python=$(sed -n 's/^FROM \([^ ]*\) AS build/\1/p' docker/Dockerfile)
docker image inspect "$python" >/dev/null 2>&1 || docker import - "$python" <"$1" >/dev/null
docker build -q -f docker/Dockerfile -t "$ROUTER_IMAGE" . >/dev/null
for name in HAPROXY REDIS PROMETHEUS GRAFANA; do
    image=${name}_IMAGE
    docker build -q -f tests/containers/Dockerfile --build-arg PYTHON="$python" \
        --build-arg ROUTER="$ROUTER_IMAGE" --target "${name,,}" -t "${!image}" tests/containers >/dev/null
done
