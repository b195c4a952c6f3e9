# Sourced by tools/chat, tools/serve and tools/test, with the extras wanted in $1 ("" or "[dev]"):
# makes .venv with a Python of at least 3.11 and installs this checkout into it, once.
set -eu
cd "$(dirname "$0")/.."
extras=$1; shift
if [ ! -x .venv/bin/python ]; then
  python=
  for candidate in "${PYTHON:-}" python3 python3.13 python3.12 python3.11 python3.14; do
    [ -n "$candidate" ] || continue
    if "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      python=$candidate; break
    fi
  done
  if [ -z "$python" ]; then
    echo "Python 3.11 or later is needed (with venv); set PYTHON=/path/to/it" >&2; exit 1
  fi
  echo "Setting up .venv with $("$python" --version) ..." >&2
  "$python" -m venv .venv
fi
stamp=.venv/.installed-${extras:-plain}
if [ ! -e "$stamp" ] || [ pyproject.toml -nt "$stamp" ]; then
  echo "Installing vllm-metal-lite$extras and what it needs ..." >&2
  # Python compiles a module when it is first imported; pip would compile all, for longer than it installs.
  .venv/bin/python -m pip install -q --no-compile --disable-pip-version-check -e ".$extras"
  touch "$stamp"
fi
