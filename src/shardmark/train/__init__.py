"""One rank of a trial: loop, epochs, record, checkpoints."""
