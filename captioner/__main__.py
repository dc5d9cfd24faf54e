"""The entry point for ``python -m captioner`` and ``torchrun -m captioner``."""

import sys

from captioner.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
