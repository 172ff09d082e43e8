"""Rows in, token ids out.

``sources``: files and hub datasets as examples · ``tasks``: prompt of each task · ``metrics``: how answers are scored ·
``partition``: examples over clients · ``synthetic``: contradictory patterns, made up ·
``tokenize``: templates, labels, batches · ``preflight``: counts for ``fedloom check``.
"""
