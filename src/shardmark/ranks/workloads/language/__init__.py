"""Language modelling: causal and masked."""
