"""What runs under faults: the settings of a small run, on the simulated engine and on vLLM."""

# Samples that their group does without wait for their prompt, so few prompts come up again and again.
POOLING = ("--rollout.samples_ratio=1.5", "--data.source=tests.support.tasks:few_rows")

TOML = """
[run]
name = "chaos"
seed = 5
dir = "{folder}"
[model]
tokenizer_path = "{model}"
[data]
source = "tests.support.tasks:rows"
apply_chat_template = false
train_batch_size = 4
max_prompt_length = 16
max_response_length = 240
[reward]
name = "tests.support.tasks:score"
[rollout]
n = 2
ratio = 2.0
lookahead = 1
max_lag = 3
checkpoint_interval_s = 0.1
stop_token_ids = [0]
[engine]
backend = "simulated"
max_num_seqs = 16
stall_timeout_s = 1.0
[engine.simulated]
median_tokens = 60
sigma = 0.8
step_base_s = 0.004
step_per_sequence_s = 0.0
install_s = 0.05
[buffer]
url = "redis://127.0.0.1:{redis_port}"
sample_lease_s = 1.5
[trainer]
service_url = "http://127.0.0.1:{port}"
"""

VLLM_TOML = """
[run]
name = "chaos"
seed = 5
dir = "{folder}"
[model]
path = "{model}"
[data]
source = "tests.support.tasks:rows"
apply_chat_template = false
train_batch_size = 4
max_prompt_length = 16
max_response_length = 200
[reward]
name = "tests.support.tasks:score"
[rollout]
n = 2
ratio = 2.0
lookahead = 1
max_lag = 3
checkpoint_interval_s = 0.1
[engine]
max_num_seqs = 16
num_threads = 1
[buffer]
url = "redis://127.0.0.1:{redis_port}"
sample_lease_s = 5.0
[trainer]
service_url = "http://127.0.0.1:{port}"
"""
