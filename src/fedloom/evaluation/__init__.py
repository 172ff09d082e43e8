"""Measuring a trained mixture: losses, scores, routing, alignment with labels that training never saw."""
