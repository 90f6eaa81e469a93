"""Engines that start ranks on several machines."""
