#!/usr/bin/env bash
# On a machine with a GPU, torch, torchvision, Pillow, pyarrow and pytest, but perhaps no Spark and no network: the tests
# marked gpu, then gpu.py with these arguments. Under 8 minutes in all; what gpu.py has by then is in its files.
#
#   examples/benchmarks/gpu_check.sh [--out folder]
#   WHEELS=folder examples/benchmarks/gpu_check.sh     # first installs the folder's wheels, such as simplejpeg's
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-python3}
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
# The processes that share the GPU import from here too.
export PYTHONPATH=$PWD:$PWD/examples/benchmarks:$site${PYTHONPATH:+:$PYTHONPATH}
if [ -n "${WHEELS:-}" ]; then
  "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --target "$site" "$WHEELS"/*.whl || exit
fi
"$python" -c '
import importlib.util, sys
missing = [n for n in ("torch", "torchvision", "PIL", "numpy", "pyarrow", "pytest") if not importlib.util.find_spec(n)]
if missing:
    sys.exit("%s has no %s: install gpuml[test] there, or name another Python: PYTHON=..." % (sys.executable, ", ".join(missing)))
import torch
if not torch.cuda.is_available():
    sys.exit("torch %s sees no GPU" % torch.__version__)
print(torch.cuda.get_device_name(0), "torch", torch.__version__, flush=True)
if not importlib.util.find_spec("simplejpeg"):
    print("simplejpeg is not there: Pillow decodes, and takes half as long again; WHEELS=folder installs it", flush=True)
' || exit
failed=0
timeout --kill-after=10 190 "$python" -m pytest -m gpu tests/test_gpu.py || failed=$?
timeout --kill-after=10 240 "$python" examples/benchmarks/gpu.py "$@" || failed=$?
exit "$failed"
