"""Tables for all formats, and the notes below them."""
