"""Object detection."""
