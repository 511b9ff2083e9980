"""Run untrusted code: jail.py. Its child imports this package before anything
else, so it stays empty."""
