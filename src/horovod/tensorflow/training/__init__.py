"""Reduction of gradients: the tape, and what optimizers share."""
