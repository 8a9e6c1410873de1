#!/usr/bin/env bash
# Set up this checkout: system packages (when root), .venv, the project with its extras, DeepSpeed's compiled operators.
# Run by `make run` and `make test`; quick when nothing changed. Python: the newest of python3.13 ... python3.11, or $PYTHON.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv

# --- system packages: installed when root, otherwise named in one command -----------------------------------------
missing=()
while read -r command package _; do
  case "$command" in ''|'#'*) continue ;; esac
  command -v "$command" >/dev/null 2>&1 || missing+=("$package")
done < deploy/apt-packages.txt
if [ ${#missing[@]} -gt 0 ]; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "setup: installing ${missing[*]}"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
  else
    echo "setup: some tests need system packages that are not here. To install them:"
    echo "    sudo apt-get install ${missing[*]}"
    [ -z "${CI:-}" ] || { echo "setup: CI needs them all"; exit 1; }
  fi
fi

# --- the environment ---------------------------------------------------------------------------------------------
python=${PYTHON:-}
for candidate in python3.13 python3.12 python3.11 python3; do
  [ -n "$python" ] && break
  if command -v "$candidate" >/dev/null 2>&1 && "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    python=$candidate
  fi
done
[ -n "$python" ] || { echo "setup: needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }

stamp="$venv/.installed"
wanted=$(cat pyproject.toml constraints.txt | cksum)
if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ]; then
  [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
  echo "setup: installing the project and its extras into $venv (a few minutes the first time)"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,serve,eval,test,bench]'
  echo "$wanted" > "$stamp"
fi

# --- DeepSpeed's operators ---------------------------------------------------------------------------------------
if command -v g++ >/dev/null 2>&1; then
  "$venv/bin/python" deploy/prebuild.py
else
  echo "setup: no g++: DeepSpeed's operators are not built, and what needs them will not run"
fi
