"""Counters of network interfaces, and timings of links."""
