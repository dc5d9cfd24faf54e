"""``python -m captioner``, which ``torchrun -m captioner`` needs."""

import sys

from captioner.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
