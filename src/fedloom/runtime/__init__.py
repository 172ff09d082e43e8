"""Rounds, clients, memory, checkpoints: what belongs to no method and to every run."""
