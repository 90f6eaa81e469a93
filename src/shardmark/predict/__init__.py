"""Predictions of training on machines that nobody has measured."""
