#!/usr/bin/env bash
# On a machine with a GPU, torch, torchvision, Pillow and pytest, but perhaps no Spark: the tests marked gpu.
# Prints the card's name first, for docs/performance.md. Takes under two minutes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-python3}
"$python" -c 'import torch; print(torch.cuda.get_device_name(0), "torch", torch.__version__)'
"$python" -m pytest -m gpu tests/test_gpu.py
