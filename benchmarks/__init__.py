"""One file a benchmark; each prints a table and, with `--json FILE`, writes the same as JSON."""
