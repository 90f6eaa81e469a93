"""A training step as its rank sees it: spans, collectives, compilation and progress."""
