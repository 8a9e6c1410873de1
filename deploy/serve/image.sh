#!/usr/bin/env bash
# Build the image where there is no Docker daemon and no registry: debootstrap makes the base, buildah runs the Dockerfile in a chroot.
#   deploy/serve/image.sh pmi:0.1.0                                        as root; needs debootstrap, buildah (Debian packages)
#   deploy/serve/image.sh pmi:0.1.0-train --build-arg EXTRAS=train,serve   what follows the tag goes to `buildah bud`
#   buildah push pmi:0.1.0 docker-archive:pmi.tar                          for `docker load` and `ctr images import` elsewhere
set -euo pipefail
tag=${1:?the image to make, e.g. pmi:0.1.0}
shift
cd "$(dirname "$0")/../.."
suite=bookworm
base=localhost/debian:$suite-minbase

if ! buildah inspect --type image "$base" >/dev/null 2>&1; then
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    debootstrap --variant=minbase "$suite" "$folder/root"
    container=$(buildah from scratch)
    buildah add --quiet "$container" "$folder/root" /
    buildah commit --quiet --rm "$container" "$base"
fi
buildah bud --isolation chroot --file deploy/serve/Dockerfile --ignorefile deploy/serve/Dockerfile.dockerignore \
    --build-arg BASE="$base" --tag "$tag" "$@" .
