"""Advise."""
