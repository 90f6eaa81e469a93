"""`python -m shardmark` is the command line."""

import sys

from shardmark.cli import main

if __name__ == "__main__":
    sys.exit(main())
