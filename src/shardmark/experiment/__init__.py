"""The experiment: what the user writes, what it means, and the trials that it unfolds into."""
