"""Which bucket each local step draws from (FedWeave, 'Local Training over Interleaved Buckets')."""

from __future__ import annotations

from collections.abc import Sequence

from fedloom.errors import FedloomError


def allocate(sizes: Sequence[int], steps: int) -> list[int]:
    """Return the number of steps H_c of each bucket: in proportion to size, at least 1 for each non-empty one.

    Largest remainder, ties to the lower index. With more non-empty buckets than steps, the ``steps`` largest get one
    each. All arithmetic is on integers; the counts sum to ``steps`` unless every bucket is empty.
    """
    if steps < 0 or any(size < 0 for size in sizes):
        raise FedloomError(f"Bucket sizes and steps must not be negative; got sizes {list(sizes)}, steps {steps}.")
    total = sum(sizes)
    filled = [c for c, size in enumerate(sizes) if size > 0]
    counts = [0] * len(sizes)
    if len(filled) >= steps:
        for c in sorted(filled, key=lambda c: (-sizes[c], c))[:steps]:
            counts[c] = 1
        return counts
    for c in filled:
        counts[c] = max(1, steps * sizes[c] // total)

    def owed(c: int) -> int:
        """Return (quota − count) · total, exactly."""
        return steps * sizes[c] - counts[c] * total

    while filled and sum(counts) < steps:
        counts[max(filled, key=lambda c: (owed(c), -c))] += 1
    while sum(counts) > steps:  # the minimum of 1 took too much: take back where least is owed
        counts[min((c for c in filled if counts[c] > 1), key=lambda c: (owed(c), -c))] -= 1
    return counts


def schedule(sizes: Sequence[int], steps: int) -> list[int]:
    """Return the bucket id of each of ``steps`` local steps, evenly interleaved (none if every bucket is empty).

    Visit k of a bucket with H visits stands at (k + 1/2) / H of the way; ties go to the lower index.
    """
    visits = [((k + 0.5) / count, c) for c, count in enumerate(allocate(sizes, steps)) for k in range(count)]
    return [c for _, c in sorted(visits)]
