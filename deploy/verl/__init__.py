"""verl's launch scripts, read without being run, in this project's settings."""
