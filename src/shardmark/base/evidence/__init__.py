"""Evidence of what ranks computed, and the checks and causes that a user may accept."""
