#!/usr/bin/env bash
# Run the CPU tiers of the tests on every supported torch, each in a virtual environment of its own.
#
#   scripts/test_versions.sh [-d DIRECTORY] [pytest arguments]
#
# DIRECTORY keeps the environments for the next run (default: .venvs beside this repository's
# pyproject.toml). VERSIONS chooses among them: VERSIONS="2.11 2.15" scripts/test_versions.sh
# PYTHON names the interpreter (default: python3). TORCH_INDEX, if set, is passed to pip as
# --index-url for torch and triton, e.g. the index of CPU-only builds.
#
# Where a torch needs CUDA's libraries to be imported, pip brings them as its dependencies.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
environments=$root/.venvs
if [[ ${1:-} == -d ]]; then
  environments=$2
  shift 2
fi

# Lower bound, the version of development, upper bound: torch, triton, further pins.
pins() {
  case $1 in
    2.11) echo "torch==2.11.0 triton==3.6.0 numpy<2.5" ;;
    2.13) echo "torch==2.13.0 triton==3.7.0 numpy" ;;
    2.15) echo "torch==2.15.0 triton==3.9.0 numpy" ;;
    *) echo "unknown version $1" >&2 && return 1 ;;
  esac
}

# A virtual environment with this torch and what the tests import; made once.
environment() {
  local version=$1 python=$environments/torch-$1/bin/python packages
  read -ra packages <<<"$(pins "$version")"
  if [[ ! -e $environments/torch-$version/complete ]]; then
    "${PYTHON:-python3}" -m venv "$environments/torch-$version"
    "$python" -m pip install --quiet ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "${packages[@]}"
    "$python" -m pip install --quiet \
      pytest pytest-xdist expecttest hypothesis hatchling sympy "${packages[2]}"
    touch "$environments/torch-$version/complete"
  fi
}

failed=()
for version in ${VERSIONS:-2.11 2.13 2.15}; do
  environment "$version"
  python=$environments/torch-$version/bin/python
  echo "== torch $("$python" -c 'import torch; print(torch.__version__)')"
  (cd "$root" && "$python" -m pytest -m "not gpu" "$@") || failed+=("$version")
done

if ((${#failed[@]})); then
  echo "failed on torch ${failed[*]}" >&2
  exit 1
fi
echo "passed on every version"
