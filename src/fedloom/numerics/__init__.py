"""Pure functions on tensors: no I/O, no models."""
