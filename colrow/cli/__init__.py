"""The command line: parse, call one function, print. `app.py` has the commands; `run.py` and `chat.py` what the ranks do; `screen.py`
prints."""
