"""How a trial's ranks are started, watched and reaped."""
