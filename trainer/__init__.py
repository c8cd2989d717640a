"""The trainer: HTTP client, DeepSpeed loop, advantages, corrections, losses, packing, publishing. Imports
`protocol`."""
