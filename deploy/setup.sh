#!/usr/bin/env bash
# Set up this checkout: system packages (when root), .venv, the project with its extras, DeepSpeed's compiled operators.
# Run by `make run` and `make test`; quick when nothing changed. Python: the newest of python3.13 ... python3.11, or $PYTHON.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv

# --- the Python to use -------------------------------------------------------------------------------------------
python=${PYTHON:-} bare=
for candidate in python3.13 python3.12 python3.11 python3; do
  [ -n "$python" ] && break
  if ! "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    continue # not there, or too old
  elif "$candidate" -c 'import venv, ensurepip' 2>/dev/null; then
    python=$candidate
  else
    bare=${bare:-$candidate}
  fi
done
[ -x "$venv/bin/python" ] && python=$venv/bin/python # an environment that is there is kept, and it is what must be complete

# --- system packages: installed when root, otherwise named in one command -----------------------------------------
missing=() unmet=()
need() { # need COMMAND PACKAGE WHAT-FOR: remember it once
  unmet+=("$1: $3")
  case " ${missing[*]-} " in *" $2 "*) ;; *) missing+=("$2") ;; esac
}
while read -r command package purpose; do
  case "$command" in ''|'#'*) continue ;; esac
  command -v "$command" >/dev/null 2>&1 || need "$command" "$package" "$purpose"
done < deploy/apt-packages.txt
if [ -n "$python" ]; then
  header=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"] + "/Python.h")')
  [ -f "$header" ] || need Python.h "$("$python" -c 'import sys; print("python%d.%d-dev" % sys.version_info[:2])')" "compiling DeepSpeed's operators"
elif [ -n "$bare" ]; then
  need ensurepip "$("$bare" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')" "making .venv with $bare"
fi
if [ ${#missing[@]} -gt 0 ]; then
  installed=
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "setup: installing ${missing[*]}"
    if apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null; then
      installed=yes
    else
      echo "setup: apt-get could not install them (is a mirror reachable?)"
    fi
  fi
  if [ -z "$installed" ]; then
    echo "setup: some parts need system packages that are not here. To install them:"
    echo "    sudo apt-get install ${missing[*]}"
    echo "setup: without them this is not run:"
    printf '    %s\n' "${unmet[@]}"
    [ -z "${CI:-}" ] || { echo "setup: CI needs them all"; exit 1; }
  elif [ -z "$python" ]; then
    python=$bare
  fi
fi

# --- the environment ---------------------------------------------------------------------------------------------
if [ -z "$python" ]; then
  if [ -n "$bare" ]; then
    echo "setup: $bare cannot make an environment: its module ensurepip is missing (the package above brings it); or set PYTHON=/path/to/python"
  else
    echo "setup: needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"
  fi
  exit 1
fi
stamp="$venv/.installed"
wanted=$(cat pyproject.toml constraints.txt | cksum)
if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ]; then
  [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
  echo "setup: installing the project and its extras into $venv (a few minutes the first time)"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,serve,eval,test,bench]'
  echo "$wanted" > "$stamp"
fi

# --- DeepSpeed's operators ---------------------------------------------------------------------------------------
header=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["include"] + "/Python.h")')
if ! command -v g++ >/dev/null 2>&1; then
  echo "setup: no g++: DeepSpeed's operators are not built, and what needs them will not run"
elif [ ! -f "$header" ]; then
  echo "setup: no $header: DeepSpeed's operators are not built, and what needs them will not run"
else
  "$venv/bin/python" deploy/prebuild.py
fi
