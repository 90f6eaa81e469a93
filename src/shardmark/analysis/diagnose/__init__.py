"""Diagnose."""
