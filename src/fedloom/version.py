"""The version, in a file of its own so that any layer can record it."""

__version__ = "0.1.0"
