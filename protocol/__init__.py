"""What the processes say to each other: data types, states, HTTP messages, batch encoding, settings, errors.

Always true of this package: it imports none of torch, vllm, ray, redis and deepspeed, so that it loads in well under
a second on any machine, and everything it defines can be checked without an engine.
"""
