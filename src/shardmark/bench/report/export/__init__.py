"""Hands finished runs to trackers and launchers, or writes them as tables."""
