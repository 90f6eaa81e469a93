"""The largest batch of each strategy."""
