"""The race of d2_memfit and those who accumulate gradients too. One file for each way to train."""
