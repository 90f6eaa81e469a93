"""Tables, and how they are written."""
