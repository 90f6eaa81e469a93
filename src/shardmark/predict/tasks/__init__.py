"""Tasks whose shapes alone are needed."""
