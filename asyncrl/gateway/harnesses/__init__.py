"""Describes coding agents as people run them, one in each file: data for `programs.Command`."""
