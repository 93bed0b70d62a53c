"""`python -m moet` is `moet`."""

import sys

from moet.cli import main

if __name__ == "__main__":
    sys.exit(main())
