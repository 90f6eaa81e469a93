"""Starts, watches and ends the ranks of trials."""
