"""The rollout service: HTTP app, scheduler, engines, prompts, rewards, weights, metrics. Imports `protocol` and `buffer`."""
