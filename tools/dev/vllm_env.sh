#!/bin/sh
# Makes a virtual environment with vLLM VERSION and this checkout in it, without a compiler:
#   tools/dev/vllm_env.sh 0.33.0 [DIRECTORY]      (default: .venv-vllm-VERSION)
# vLLM has no CPU wheel of its own on PyPI, so its pure-Python wheel ("empty" target) is built
# from its source package; the plugin needs none of its compiled extensions.  The wheel is kept
# in VLLM_WHEEL_DIR (default ~/.cache/vllm-metal-lite/wheels), where a later call finds it.
set -eu
version=${1:?usage: tools/dev/vllm_env.sh VERSION [DIRECTORY]}
cd "$(dirname "$0")/../.."
venv=${2:-.venv-vllm-$version}
wheels=${VLLM_WHEEL_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/vllm-metal-lite/wheels}
# Written last: a directory without it is a build that was cut short.
stamp=$venv/.installed
if [ -e "$stamp" ] && [ ! pyproject.toml -nt "$stamp" ] && [ ! tools/dev/vllm_env.sh -nt "$stamp" ]; then
  exit 0
fi
python=
for candidate in "${PYTHON:-}" python3.12 python3.11 python3.13 python3; do
  [ -n "$candidate" ] || continue
  if "$candidate" -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
      2>/dev/null; then
    python=$candidate; break
  fi
done
[ -n "$python" ] || { echo "Python 3.11 to 3.13 is needed; set PYTHON=/path/to/it" >&2; exit 1; }
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
mkdir -p "$wheels"
# A CPU build everywhere: on Linux the plain package of this version asks for no CUDA libraries.
pip install -q --no-compile torch==2.13.0 "setuptools>=77,<81" setuptools_scm setuptools-rust wheel jinja2 packaging
wheel=$(ls "$wheels"/vllm-"$version"-*.whl 2>/dev/null || true)
if [ -z "$wheel" ]; then
  echo "Building the wheel of vLLM $version ..." >&2
  # The override keeps the version free of a suffix, which pip would refuse as another version.
  export VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE="$version"
  scratch=$(mktemp -d)
  trap 'rm -rf "$scratch"' EXIT
  pip download -q --no-deps --no-build-isolation --no-binary vllm -d "$scratch" "vllm==$version"
  tar xzf "$scratch"/vllm-"$version".tar.gz -C "$scratch"
  # On macOS its setup.py would take the CPU target whatever is asked, and compile for minutes; with
  # cargo, it would compile a front end that nothing here uses.
  sed -i.bak -e 's/^if sys.platform.startswith("darwin") and .*/if False:/' \
    -e 's/^    rust_extensions=.*/    rust_extensions=[],/' "$scratch/vllm-$version/setup.py"
  pip wheel -q --no-deps --no-build-isolation -w "$wheels" "$scratch/vllm-$version"
  wheel=$(ls "$wheels"/vllm-"$version"-*.whl)
fi
echo "Installing vLLM $version and this checkout into $venv ..." >&2
# vLLM's own requirements, but for the date of the certificates: a mirror may lag behind it.
"$venv/bin/python" - "$wheel" >"$venv/requirements.txt" <<'END'
import email, sys, zipfile
from packaging.requirements import Requirement

with zipfile.ZipFile(sys.argv[1]) as wheel:
    name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    needs = email.message_from_bytes(wheel.read(name)).get_all("Requires-Dist")
for need in map(Requirement, needs):
    if need.marker is None or need.marker.evaluate({"extra": ""}):
        print("certifi" if need.name == "certifi" else need)
END
# One call, so that the resolver keeps the torch that is there.
pip install -q --no-compile torch==2.13.0 -r "$venv/requirements.txt" -e ".[dev]" openai
pip install -q --no-compile --no-deps "$wheel"
# A gigabyte that only CUDA uses; vLLM does without it.
pip uninstall -q -y triton 2>/dev/null || true
touch "$stamp"
