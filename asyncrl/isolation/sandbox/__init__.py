"""Run code that nobody has read: `box.Sandbox`. Its child imports this package before anything else, so it
stays empty."""
