"""Parts of the benchmarks that run the whole service on the real engine with lengths that are given."""
