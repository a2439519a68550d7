"""Where a draft model runs beside the target, in a thread or in a process.

`workers.py` gives a call its worker, `call.py` talks to it over the wire (`wire.py`), and `serving.py` answers there.
"""
