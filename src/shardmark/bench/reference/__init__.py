"""Proves or refutes that strategies train the same thing."""
