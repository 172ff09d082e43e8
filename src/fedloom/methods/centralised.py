"""Centralised: all rows in one place, the upper end of every table.

Differs from FedAvg: there is one client that holds everyone's rows. It takes as many optimiser steps per round, at the
same batch size, as the clients of a round of a federation take together.
"""

from __future__ import annotations

from fedloom.methods.base import Method


class Centralised(Method):
    title = "Centralised"
    aggregated = "nothing: one place holds all rows"
    local_only = "nothing: all rows leave the clients"
    exact = "nothing is averaged"
    pooled = True
