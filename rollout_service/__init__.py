"""The rollout service: scheduler, engines, prompts, rewards, weights and the HTTP app around them."""
