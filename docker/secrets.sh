#!/bin/sh
# Make the secrets of the compose stacks, random, where they are missing:  ./secrets.sh [DIRECTORY]
# Compose mounts these files as they are, and the containers run as other users: so the files are
# readable for all and the directory is yours alone.
set -eu
directory=${1:-$(dirname "$0")/secrets}
mkdir -p "$directory"
chmod 700 "$directory"
for name in redis_password admin_token grafana_password; do
    file=$directory/$name
    if [ ! -s "$file" ]; then
        od -An -N24 -tx1 /dev/urandom | tr -d ' \n' >"$file"
        echo "secrets.sh: made $file"
    fi
    chmod 444 "$file"
done
# For gated models, compose.gpu.yaml: write yours into it, or leave it empty.
[ -e "$directory/hf_token" ] || : >"$directory/hf_token"
chmod 644 "$directory/hf_token"
