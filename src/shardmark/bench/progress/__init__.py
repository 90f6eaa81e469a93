"""Displays of a run's progress: lines, or a bar at the foot of the terminal."""
