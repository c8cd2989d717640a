"""Parts of the trainer's benchmark: the workload, one process for each contestant, exactness over splits and ranks."""
