"""Methods × settings × seeds: which cells there are, running them, and reading the results."""
