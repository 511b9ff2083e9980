"""Coding agents as people run them, a file each: data for `programs.Command`."""
