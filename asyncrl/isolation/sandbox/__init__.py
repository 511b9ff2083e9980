"""Runs untrusted code: see jail.py. The child imports this package before anything else, so this module stays
empty."""
