"""`april top`: a running service in a terminal.

A feed (`feed`) takes the service's events and tells `Seen`, which remembers what it needs; `sections` says what is so
in lines, `screen` fits them to the terminal. Only the feed and the keyboard do I/O.
"""
