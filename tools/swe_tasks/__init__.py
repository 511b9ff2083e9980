"""Parts of make_swe_tasks.py."""
