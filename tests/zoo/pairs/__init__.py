"""Pairs of training commands that train the same thing, or that differ in one."""
