"""`python -m shardmark.cli`: the command line where the script is not on the path."""

import sys

from shardmark.cli import main

sys.exit(main())
