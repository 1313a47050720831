#!/usr/bin/env bash
# Installs Sangam and FlashInfer into .venv beside pyproject.toml, for the python3 on PATH: in the
# container the image's own, because Triton's Python backend embeds that one. It finds .venv, which
# `sangam serve` puts first on PATH, and the image's packages stay as they are: its NumPy is too new.
#   SANGAM_FLASHINFER=0 leaves FlashInfer out, for a machine without a GPU
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

requirements=(.)
if [[ ${SANGAM_FLASHINFER:-1} != 0 ]]; then
  nvcc=${CUDA_HOME:-/usr/local/cuda}/bin/nvcc
  if [[ ! -x $nvcc ]]; then
    echo "install.sh: no $nvcc, with which FlashInfer compiles its kernels at the first start" >&2
    exit 1
  fi
  requirements=('.[cuda]')
fi

[[ -e .venv ]] || python3 -m venv .venv
.venv/bin/python -m pip install -c constraints.txt "${requirements[@]}"
.venv/bin/python -c 'import sangam_backend.engine, sangam_client'
