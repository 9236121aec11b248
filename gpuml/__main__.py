"""``python -m gpuml`` -> `gpuml.cli.main`."""

import sys

from gpuml.cli import main

if __name__ == "__main__":
    sys.exit(main())
