"""Training scripts of users, started unchanged with hooks in their interpreters."""
