"""The `april` command, the one-machine launcher, and what is needed to deploy both processes."""
