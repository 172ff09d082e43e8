"""Federated fine-tuning of language models whose capacity is a mixture of experts."""

__version__ = "0.1.0"
