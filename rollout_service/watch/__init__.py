"""What people watch: a bounded memory of the run, the pictures drawn from it, the verdict, and what waits for what."""
