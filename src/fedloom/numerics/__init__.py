"""Pure functions on tensors: seeds, trees, low rank, aggregation, clustering, schedules. No I/O, no models."""
