"""`python -m shardmark` is the command line."""

from shardmark.cli import main

main()
