"""The training of one rank: loop, epochs, evaluation, probe, record."""
