"""Calls from Python: `asyncrl.train`, `asyncrl.sft`, `asyncrl.evaluate` and their like.

asyncrl.train(…)                  in the caller's process, in any thread
  │  requests.py: overrides, keywords     saved_code.py: functions     saved_rows.py: rows
  ▼
launcher.py ──request──► python -m asyncrl.api.launcher: what the command `asyncrl train` does
  │  ▲──────── started, ended ────┘   end of the request pipe: stop, with a checkpoint
  ▼
run.py: reads the run's files
"""
