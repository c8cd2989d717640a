"""The demo: a small policy made on this machine, and the whole loop around it."""
