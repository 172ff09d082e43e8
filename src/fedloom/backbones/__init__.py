"""Frozen language models: loading, identity, and the features that routers and clustering read."""
