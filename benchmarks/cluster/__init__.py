"""A cluster on one machine: nodes as network namespaces, joined by a bridge with rate limits."""
