"""Answers to the main questions about a comparison."""
