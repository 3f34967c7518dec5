"""kvkeep: keep the entries of a key-value cache that matter, physically delete the rest."""
