"""Memory that a rank uses."""
