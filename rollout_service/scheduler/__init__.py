"""The round scheduler: observations and the time in, decisions out. It owns no task, client, socket or clock."""
