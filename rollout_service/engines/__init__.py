"""Engine replicas: vLLM in this process, vLLM in Ray actors, and a simulated engine."""
