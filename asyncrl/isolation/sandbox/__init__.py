"""Run untrusted code: `base.Sandbox`. The child of jail.py imports this package before anything
else, so it stays empty."""
