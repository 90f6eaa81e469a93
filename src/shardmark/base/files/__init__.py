"""Files: names in a run, strict YAML, private copies, and errors of the disk."""
