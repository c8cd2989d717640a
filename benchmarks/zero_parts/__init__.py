"""Parts of `benchmarks/zero.py`: what each rank trains, and the engine that serves it."""
