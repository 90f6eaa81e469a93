"""Deepspeed."""
