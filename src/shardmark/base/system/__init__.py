"""The process and its installation: signals, variables, modules, plug-ins and extras."""
