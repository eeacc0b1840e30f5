"""Comparisons with other projects' own code, run by hand against a checkout: `python -m tests.parity.mini_omni CHECKOUT`."""
