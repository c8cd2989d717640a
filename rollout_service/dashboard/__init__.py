"""The page at `/dashboard`: rendered on the server, kept up to date by a small script, and the report of a run."""
