#!/usr/bin/env bash
# setup.sh FOLDER: Debian sid with Mesa's compiler for Apple GPUs, 1.1 GB, a minute or two, as root.
# Mesa's OpenCL (rusticl) with the asahi driver, and the shim that stands in for the GPU: an M1 (G13G).
set -euo pipefail
folder=${1:?folder}
here=$(cd "$(dirname "$0")" && pwd)
if ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
  echo "setup.sh needs Debian or Ubuntu, and root" >&2
  exit 1
fi
command -v debootstrap >/dev/null ||
  { apt-get update -qq && apt-get install -y -qq debootstrap debian-archive-keyring >/dev/null; }
sources=(/etc/apt/sources.list.d/debian.sources /etc/apt/sources.list)
mirror= # debootstrap's own; on Debian the machine's
grep -q '^ID=debian' /etc/os-release &&
  mirror=$(sed -nE 's/^URIs: *([^ ]+).*/\1/p; s/^deb (\[[^]]*\] )?([^ ]+) .*/\2/p' "${sources[@]}" 2>/dev/null | head -n 1 || true)
packages=mesa-opencl-icd,mesa-drm-shim,ocl-icd-libopencl1,ocl-icd-opencl-dev,opencl-c-headers,gcc,libc6-dev
debootstrap --variant=minbase --include=$packages sid "$folder" ${mirror:+"$mirror"} >"$folder.log" 2>&1 ||
  { tail -n 20 "$folder.log" >&2; exit 1; }
mkdir -p "$folder/agx"
cp "$here/loader.c" "$folder/agx/"
chroot "$folder" gcc -O1 -o /agx/loader /agx/loader.c -lOpenCL
