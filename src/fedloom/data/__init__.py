"""Rows in, token ids out.

``sources``: files and hub datasets as examples · ``tasks``: prompt and metric of each task ·
``partition``: examples over clients · ``tokenize``: templates, labels, batches ·
``preflight``: counts for ``fedloom check``.
"""
