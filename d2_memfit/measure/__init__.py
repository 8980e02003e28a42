"""What a GPU takes and how fast it is, and whether d2_memfit is right on it: measured."""
